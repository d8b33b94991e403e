"""Training a small tokenizer with sentencepiece and wrapping it for transformers.

sentencepiece learns BPE pieces with byte fallback and without any normalisation. The wrapper is a plain
tokenizer.json of the `tokenizers` library, so `AutoTokenizer` loads the folder without remote code. Spaces
are written as spaces instead of sentencepiece's U+2581, hence that character, too, survives a round trip, and
so do leading spaces, line ends and NUL: decode(encode(text)) == text for every text.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from wm_ds.errors import WmError

_SPACE = "\u2581"
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
    "<0x41>",
    UNK,
    "é\U0001f600\u2028",
]


class TrainingError(WmError, ValueError):
    """No tokenizer came out of the training text, or one that does not give back its text."""


def train(texts: Iterable[str], vocab_size: int, eos: str) -> bytes:
    """Train a BPE model of exactly `vocab_size` pieces; returns the sentencepiece .model file's bytes.

    Raises TrainingError when the text is too small for the vocabulary.
    """
    import sentencepiece

    if vocab_size < 2 + 256 + 1:
        raise TrainingError(f"--vocab-size {vocab_size} is too small: 256 bytes, EOS and unk alone take 258")
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
            character_coverage=0.9995,
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
        raise TrainingError(
            f"sentencepiece cannot train {vocab_size} pieces on this text: {error}; give more text or a "
            f"smaller --vocab-size"
        ) from error
    return model.getvalue()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.replace("\0", "\n").split("\n"):
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


def save(tokenizer: Any, model: bytes, folder: Path, sample: list[str]) -> dict[str, float]:
    """Save to `folder`, load it back as a user would, and compare; returns measures of the sample.

    Raises TrainingError when ids differ after loading or a text does not come back.
    """
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(folder)
    (folder / "sentencepiece.model").write_bytes(model)
    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
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
