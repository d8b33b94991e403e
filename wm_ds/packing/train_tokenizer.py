"""Training a small tokenizer with sentencepiece and wrapping it for transformers.

sentencepiece learns BPE pieces with byte fallback and without any normalisation. The wrapper is a plain
tokenizer.json of the `tokenizers` library, so `AutoTokenizer` loads the folder without remote code. Spaces
are written as spaces instead of sentencepiece's U+2581, hence that character, too, survives a round trip, and
so do leading spaces, line ends and NUL: decode(encode(text)) == text for every text.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from wm_ds import files
from wm_ds.errors import WmError

_SPACE = "\u2581"
# Characters with a meaning of their own for sentencepiece's trainer: it leaves out what holds NUL or U+2585
# and takes U+2581 for a space. They separate lines, so the rest is learned from; as text they are bytes.
_RESERVED = re.compile("[\0\n\u2585\u2581]")
_LARGEST_VOCABULARY = 2**31 - 1
UNK = "<unk>"
_LONGEST_LINE = 4096  # characters; sentencepiece counts pieces inside lines and wants them bounded
_ROUND_TRIPS = [
    "",
    " ",
    "  leading",
    "tail  ",
    "a\nb\r\n\n\tc",
    "a\0b",
    f"a{_SPACE}b",
    "\u2585\u2587",
    "<0x41>",
    UNK,
    "é\U0001f600\u2028",
]


class TrainingError(WmError, ValueError):
    """No tokenizer came out of the training text, or one that does not give back its text."""


def train(texts: Iterable[str], vocab_size: int, eos: str, character_coverage: float = 0.9995) -> bytes:
    """Train a BPE model of exactly `vocab_size` pieces; returns the sentencepiece .model file's bytes.

    character_coverage: share of the text's characters, the most frequent first, that get pieces of their own;
        the others are written as bytes. Raises TrainingError when settings or text do not allow such a model;
        its message says which of them, and what would.
    """
    import sentencepiece

    _check_settings(vocab_size, eos, character_coverage)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            character_coverage=character_coverage,
            max_sentence_length=8 * _LONGEST_LINE,
            unk_id=0,
            unk_piece=UNK,
            eos_id=1,
            eos_piece=eos,
            bos_id=-1,
            pad_id=-1,
            num_threads=1,  # the same model on every machine
            minloglevel=2,
        )
    except RuntimeError as error:
        raise TrainingError(_advice(str(error), vocab_size, character_coverage)) from error
    return model.getvalue()


def _check_settings(vocab_size: int, eos: str, character_coverage: float) -> None:
    if vocab_size < 2 + 256 + 1:
        raise TrainingError(f"--vocab-size {vocab_size} is too small: 256 bytes, EOS and unk alone take 258")
    if vocab_size > _LARGEST_VOCABULARY:
        raise TrainingError(f"--vocab-size {vocab_size} is too large: ids have 31 bits")
    if not 0.98 <= character_coverage <= 1:
        raise TrainingError(f"--character-coverage {character_coverage} is not between 0.98 and 1")
    if eos == UNK or re.fullmatch("<0x[0-9A-F]{2}>", eos):
        raise TrainingError(f"--eos {eos!r} is a piece that the model itself needs; choose another name")
    if len(eos) < 2 or eos.strip() != eos or _RESERVED.search(eos):
        raise TrainingError(
            f"--eos {eos!r} cannot be the token that ends a document: it has at least two characters, no "
            f"white space around it and none of the characters NUL, line end, U+2581, U+2585"
        )


def _advice(error: str, vocab_size: int, character_coverage: float) -> str:
    """What a failure of sentencepiece means for the person who chose the settings."""
    if found := re.search(r"too high \(\d+\).*<= (\d+)", error):
        most = int(found[1])
        smaller = f"--vocab-size {most}, or less" if most > 258 else "another text"
        return (
            f"cannot train {vocab_size} pieces: this text gives at most {most}; give more text, or choose "
            f"{smaller}"
        )
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", error):
        lower = (
            f", or a --character-coverage below {character_coverage} (0.98 at least; rarer characters are "
            f"then written as bytes)"
            if character_coverage > 0.98
            else ""
        )
        return (
            f"this text has more different characters than --vocab-size {vocab_size} has room for: choose "
            f"--vocab-size {int(found[1]) + 1} or more{lower}"
        )
    if "sentences_.empty()" in error:
        return "the inputs hold no text to train on, only white space or reserved characters"
    return f"sentencepiece cannot train {vocab_size} pieces on this text: {error}"


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in _RESERVED.split(text):
            for start in range(0, len(line), _LONGEST_LINE):
                yield line[start : start + _LONGEST_LINE]


def wrap(model: bytes, eos: str) -> Any:
    """The transformers tokenizer with the model's ids, special tokens EOS (also padding) and unk."""
    import sentencepiece
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = processor.vocab_size()
    pieces = [processor.id_to_piece(i) for i in range(size)]
    vocabulary: dict[str, int] = {}
    learned: dict[str, int] = {}
    for number, piece in enumerate(pieces):
        if processor.is_control(number) or processor.is_unknown(number) or processor.is_byte(number):
            vocabulary[piece] = number
        else:
            learned[piece.replace(_SPACE, " ")] = number
    vocabulary.update(learned)
    # sentencepiece joins whichever neighbours make the earliest piece; as ranked merges these are all ways
    # to cut each piece into two pieces, in the order of the pieces.
    merges = [
        (piece[:cut], piece[cut:])
        for piece, _ in sorted(learned.items(), key=lambda entry: entry[1])
        for cut in range(1, len(piece))
        if piece[:cut] in learned and piece[cut:] in learned
    ]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=UNK, byte_fallback=True, fuse_unk=False)
    )
    # No piece has a space behind another character, so text may be cut there: the same ids, found in a cache.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" *[^ ]+| +"), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=eos,
        pad_token=eos,
        unk_token=UNK,
        clean_up_tokenization_spaces=False,
    )


def check_output(folder: Path) -> None:
    """Raise TrainingError if there is something at `folder` that saving would overwrite."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrainingError(f"{folder} exists; choose another --output, or remove it first")


def save(tokenizer: Any, model: bytes, folder: Path, sample: list[str]) -> dict[str, float]:
    """Save to the new folder `folder`, load it as a user would, and compare; returns measures of the sample.

    The folder appears under its name when it is complete and was found right. Raises TrainingError when ids
    differ after loading, a text does not come back, or `folder` holds something already.
    """
    check_output(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = files.temporary(folder)
    part.mkdir()
    try:
        _write(tokenizer, part)
        for path in part.iterdir():  # written again, so that a full disk is an error and not a short file
            files.write_synced(path, path.read_bytes())
        files.write_synced(part / "sentencepiece.model", model)
        measures = _compare(tokenizer, part, folder, sample)
        os.replace(part, folder)
        files.sync_directory(folder.parent)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return measures


def _write(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the library `tokenizers` reports a full disk as a bare Exception
        raise TrainingError(f"cannot write the tokenizer: {error}") from error


def _compare(tokenizer: Any, saved: Path, folder: Path, sample: list[str]) -> dict[str, float]:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(saved, trust_remote_code=False)
    tokens = 0
    texts = [*_ROUND_TRIPS, *sample]
    for text in texts:
        before = tokenizer(text, add_special_tokens=False)["input_ids"]
        after = loaded(text, add_special_tokens=False)["input_ids"]
        if before != after:
            raise TrainingError(f"ids of {text[:60]!r} differ after saving and loading {folder}")
        if text != UNK and loaded.decode(after) != text:
            raise TrainingError(f"{text[:60]!r} comes back as {loaded.decode(after)[:60]!r} from {folder}")
        tokens += len(after)
    size = sum(len(text.encode()) for text in texts)
    return {"vocab_size": len(loaded), "sample_bytes": size, "bytes_per_token": size / max(tokens, 1)}
