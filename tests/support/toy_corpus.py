"""Small tokenizers and corpora for the data tests, and the packer called as a function."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from wm_ds.packing.tokenizer import open_decoder

ROOT = Path(__file__).parents[2]
EOS = "<|endoftext|>"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def tool(name: str) -> ModuleType:
    """A program of tools/ as a module."""
    return importlib.import_module(f"tools.{name}")


# Qwen's way to cut text into words.
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_tokenizer(
    folder: Path,
    *,
    eos: str | None = EOS,
    filler_tokens: int = 0,
    template: bool = False,
    words: str | None = None,
) -> Path:
    """Byte-level BPE: 256 bytes, a few merges, <|im_start|>, then filler tokens, EOS last.

    template: a post-processor that adds EOS by itself. eos=None: no EOS is declared. words: a pattern for
    words instead of GPT-2's.
    """
    vocabulary = {byte: i for i, byte in enumerate(BYTES)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("e", "r")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    for i in range(filler_tokens):
        vocabulary[f"filler{i}"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if words:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(words), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", *([eos] if eos else [])])
    tokenizer.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))]
        )
    extra = {"eos_token": eos} if eos else {}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **extra)
    wrapped.save_pretrained(folder)
    return folder


def write_jsonl(path: Path, texts: list[Any], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def lines(folder: Path, *records: bytes, name: str = "in.jsonl") -> Path:
    """A file of these records, one a line."""
    path = folder / name
    path.write_bytes(b"\n".join(records) + b"\n")
    return path


def numbered(count: int, longest: int = 60) -> list[str]:
    """Texts of different lengths, each recognisable."""
    return [f"document {i}: " + "the winter in other rivers " * (i * 7 % 11 % longest) for i in range(count)]


def pack(output: Path, inputs: list[Path | str], tokenizer: Path, *options: Any) -> int:
    """tools/pack_data.py in this process with one worker; returns its exit status."""
    arguments = ["--input", *inputs, "--tokenizer", tokenizer, "--output", output, "--workers", 1, *options]
    return PACK.main([str(argument) for argument in arguments])


def packed(folder: Path, count: int, *options: Any) -> Path:
    """So many numbered texts, packed with a byte tokenizer: FOLDER/packed."""
    tokenizer = byte_tokenizer(folder / "tokenizer")
    source = write_jsonl(folder / "texts.jsonl", numbered(count))
    assert pack(folder / "packed", [source], tokenizer, *options) == 0
    return folder / "packed"


def pack_process(output: Path, inputs: list[Path | str], tokenizer: Path, *options: Any) -> list[str]:
    """The command line of the same, for a process of its own."""
    arguments = ["--input", *inputs, "--tokenizer", tokenizer, "--output", output, *options]
    return [sys.executable, str(ROOT / "tools" / "pack_data.py"), *map(str, arguments)]


def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def packed_bytes(folder: Path) -> dict[str, bytes]:
    """Every data file of a packed folder, by name: what must not depend on how the packing went."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in ("source.json",)
    }


def documents(folder: Path) -> list[list[int]]:
    """Ids of every document, EOS included, read plainly from the files: independent of wm_ds.data."""
    described = manifest(folder)
    align, dtype = described["align"], {"uint16": "<u2", "uint32": "<u4"}[described["dtype"]]
    found: list[list[int]] = []
    for record in described["shards"]:
        tokens = np.fromfile(folder / record["name"] / "tokens.bin", dtype=dtype)
        start = 0
        for end in np.fromfile(folder / record["name"] / "ends.bin", dtype="<i8").tolist():
            found.append(tokens[start:end].tolist())
            start = (end + align - 1) // align * align
    return found


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def texts(folder: Path) -> list[str]:
    """The text of every document of a packed folder."""
    decode = open_decoder(folder / "tokenizer")
    return [decode(ids[:-1]) for ids in documents(folder)]


PACK = tool("pack_data")
