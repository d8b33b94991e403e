"""The tokenizer of an export: the one that packed the data, as transformers loads it.

It must agree with the data on the special ids, and give the packer's ids for any text.
"""

import json
import random
import shutil
import string
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from wm_ds.errors import WmError
from wm_ds.packing.tokenizer import TokenizerSpec, make_encoder, open_tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


class ExportError(WmError, RuntimeError):
    """The export cannot be made or failed its check; the text says what is wrong and what to do."""


def agree_on_ids(config: Any, tokenizer_dir: Path, eos_id: int, sha256: str | None) -> int:
    """Set the configuration's special ids; the tokenizer must agree with what the data was packed with.

    Returns the tokenizer's size: ids from there to vocab_size are padding of the vocabulary.
    """
    tokenizer = _load(tokenizer_dir)
    size = max(tokenizer.get_vocab().values()) + 1  # len(tokenizer), unless it leaves out ids
    if size > config.vocab_size:
        raise ExportError(
            f"the tokenizer {tokenizer_dir} has {size} tokens, more than the model's vocab_size "
            f"{config.vocab_size}; it is not the tokenizer this model was trained with"
        )
    if sha256 is not None and _packer(tokenizer_dir).sha256 != sha256:
        raise ExportError(
            f"the tokenizer {tokenizer_dir} is not the one that packed the data (its sha256 differs); "
            "give the right folder with --tokenizer DIR"
        )
    if tokenizer.eos_token_id != eos_id:
        raise ExportError(
            f"the data was packed with EOS id {eos_id}, the tokenizer {tokenizer_dir} says "
            f"{tokenizer.eos_token_id}"
        )
    config.eos_token_id = eos_id
    config.pad_token_id = eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    # What text without a prompt starts from. The packer writes no BOS, also where the tokenizer has one: EOS
    # alone marks where documents begin and end.
    config.bos_token_id = eos_id
    return size


def _load(folder: Path) -> Any:
    """The folder's tokenizer. It needs no code of its own: transformers is not to ask whether to run any."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _packer(tokenizer_dir: Path) -> TokenizerSpec:
    """The folder's tokenizer as the packer opens it: a sentencepiece model if it has no tokenizer.json."""
    if (tokenizer_dir / "tokenizer.json").is_file():
        return open_tokenizer(str(tokenizer_dir))
    return open_tokenizer(str(tokenizer_dir / "tokenizer.model"))


def copy_tokenizer(tokenizer_dir: Path, folder: Path, max_length: int) -> None:
    """The tokenizer's files, with a tokenizer.json where there is none, checked to give the packer's ids."""
    copied = [name for name in TOKENIZER_FILES if (tokenizer_dir / name).is_file()]
    for name in copied:
        shutil.copyfile(tokenizer_dir / name, folder / name)
    if "tokenizer.json" not in copied:
        _load(tokenizer_dir).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    settings["model_max_length"] = max_length
    settings["padding_side"] = "left"  # right of it, generation would continue the padding of short rows
    if settings.get("pad_token") is None:
        # Left unset, every batched use would stop to ask for one; EOS is what such models pad with.
        settings["pad_token"] = settings.get("eos_token") or _load(tokenizer_dir).eos_token
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
    texts = _random_texts(1000)
    ids, offsets = make_encoder(_packer(tokenizer_dir)).encode(texts)
    theirs = _load(folder)(texts, add_special_tokens=False)["input_ids"]
    for text, start, stop, found in zip(texts, offsets, offsets[1:], theirs):
        if ids[start:stop].tolist() != found:
            raise ExportError(
                f"transformers reads the tokenizer {tokenizer_dir} otherwise than the packer: {text!r} is "
                f"{found[:8]} and not {ids[start:stop].tolist()[:8]}; convert it to a tokenizer.json, check "
                "that, and pack the data with it"
            )


def _random_texts(count: int) -> list[str]:
    """Strings of letters, blanks, line ends, accents and Chinese, always the same."""
    rng = random.Random(0)
    characters = "etaoinshrdlu" * 3 + string.printable[:95] + "    \n\n\t" + "éßñ中文字"
    return ["".join(rng.choices(characters, k=rng.randint(1, 40))) for _ in range(count)]
