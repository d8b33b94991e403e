"""Finding inputs and cutting them into pieces.

An *input* is one file (or one Hugging Face dataset). A *piece* is a part of an input that can be read on its
own and that holds whole documents: a byte range of a plain file, cut where a record ends; a whole
compressed file; some row groups of a parquet file; one shard of a dataset. A *unit* is a list of pieces of
about a wanted size. Where the cuts fall depends on the inputs and that size only.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wm_ds.errors import WmError

SUFFIXES = {
    ".jsonl": ("jsonl", None),
    ".jsonl.gz": ("jsonl", "gz"),
    ".jsonl.zst": ("jsonl", "zst"),
    ".parquet": ("parquet", None),
    ".txt": ("txt", None),
    ".txt.gz": ("txt", "gz"),
    ".txt.zst": ("txt", "zst"),
}
DATASET_PREFIX = "hf:"
_BLOCK = 1 << 20
_BLANK_LINES = re.compile(rb"\n[ \t\r]*\n")


class InputError(WmError, ValueError):
    """An input does not exist, cannot be read, or is of no kind that we read."""


@dataclass(frozen=True)
class Input:
    """name: as the user wrote it. kind: jsonl, txt, parquet or dataset. size: bytes (0: not known)."""

    name: str
    kind: str
    compression: str | None
    size: int
    # dataset only: everything that says which data it is (revision, files, split); part of the key
    identity: dict[str, Any] | None = None


@dataclass(frozen=True)
class Piece:
    """Part `start` .. `stop` of input number `input`: bytes, row groups or dataset shards by its kind."""

    input: int
    start: int
    stop: int
    size: int  # bytes of input, for balance and progress


# ------------------------------------------------------------------------------------------ finding inputs


def find_inputs(
    names: list[str], *, dataset_split: str = "train", dataset_config: str | None = None
) -> list[Input]:
    """Expand files, folders, globs and `hf:NAME[@REVISION]` into inputs, in a stable order.

    Folders are searched in depth; files and folders whose name begins with a dot are passed over. Raises
    InputError for a name that matches nothing, a file of an unknown kind, and a file named twice.
    """
    inputs: list[Input] = []
    seen: dict[str, str] = {}
    for name in names:
        if name.startswith(DATASET_PREFIX):
            inputs.append(_dataset_input(name, dataset_split, dataset_config))
            continue
        for path in _expand(name):
            real = os.path.realpath(path)
            if real in seen:
                raise InputError(
                    f"{path} is the same file as {seen[real]}: its documents would be packed twice; "
                    f"name it once"
                )
            seen[real] = path
            kind, compression = _kind(path)
            inputs.append(Input(path, kind, compression, os.path.getsize(path)))
    return inputs


def _expand(name: str) -> list[str]:
    if os.path.isdir(name):
        found = []
        for folder, folders, files in os.walk(name, followlinks=True):
            folders[:] = sorted(entry for entry in folders if not entry.startswith("."))
            found += [os.path.join(folder, entry) for entry in files if not entry.startswith(".")]
        found.sort()
        if not found:
            raise InputError(f"{name} is a folder without files")
        return found
    if os.path.exists(name):
        return [name]
    if glob.has_magic(name):
        found = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
        if found:
            return found
        raise InputError(f"no file matches {name!r}")
    raise InputError(
        f"{name} does not exist; give a file, a folder, a glob in quotes, or {DATASET_PREFIX}NAME for a "
        f"Hugging Face dataset"
    )


def _kind(path: str) -> tuple[str, str | None]:
    base = os.path.basename(path).lower()
    for suffix, kind in SUFFIXES.items():
        if base.endswith(suffix):
            return kind
    suffix = Path(base).suffix
    raise InputError(
        f"{path} has {f'the suffix {suffix!r}' if suffix else 'no suffix'}, which is none of "
        f"{', '.join(SUFFIXES)}; rename it, or choose files by a glob such as 'FOLDER/*.jsonl'"
    )


def _dataset_input(name: str, split: str, config: str | None) -> Input:
    from datasets import load_dataset_builder

    repository, _, revision = name[len(DATASET_PREFIX) :].partition("@")
    try:
        if not os.path.isdir(repository):
            # Pin the commit now: tasks of an array and later attempts must read the same data.
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(repository, revision=revision or None).sha
        builder = load_dataset_builder(repository, config, revision=revision or None)
        files = builder.config.data_files
        origin = [
            [Path(file).name, *((s.st_size, s.st_mtime_ns) if (s := _stat(file)) else ())]
            for file in (files[split] if files and split in files else [])
        ]
        shards = load_dataset_stream(repository, config, split, revision or None).num_shards
    except Exception as error:  # the hub, the network, the loader: all are one fact for the user
        raise InputError(f"cannot open the dataset {repository!r}, split {split!r}: {error}") from error
    identity = {
        "revision": revision or None,
        "config": config,
        "split": split,
        "shards": shards,
        "files": origin,
    }
    return Input(DATASET_PREFIX + repository, "dataset", None, 0, identity)


def _stat(file: str) -> os.stat_result | None:
    """Size and time of a local file of a dataset; a hub's files are known by the commit instead."""
    return os.stat(file) if os.path.isfile(file) else None


def load_dataset_stream(repository: str, config: str | None, split: str, revision: str | None) -> Any:
    from datasets import load_dataset

    return load_dataset(repository, config, split=split, revision=revision, streaming=True)


# ------------------------------------------------------------------------------------------ cutting inputs


def cut(inputs: list[Input], size: int, txt_split: str) -> list[list[Piece]]:
    """Group the inputs into units of about `size` bytes, in order; each unit becomes one shard."""
    units: list[list[Piece]] = []
    unit: list[Piece] = []
    filled = 0
    for number, item in enumerate(inputs):
        for piece in _pieces(number, item, size, txt_split):
            unit.append(piece)
            filled += piece.size
            if filled >= size or item.kind == "dataset":
                units.append(unit)
                unit, filled = [], 0
    if unit:
        units.append(unit)
    return units


def _pieces(number: int, item: Input, size: int, txt_split: str) -> Iterator[Piece]:
    if item.kind == "dataset":
        assert item.identity is not None
        for shard in range(item.identity["shards"]):
            yield Piece(number, shard, shard + 1, 0)
    elif item.kind == "parquet":
        yield from _parquet_pieces(number, item, size)
    elif item.compression or (item.kind == "txt" and txt_split == "file") or item.size <= size:
        yield Piece(number, 0, item.size, item.size)
    else:
        start = 0
        with open(item.name, "rb") as file:
            while start < item.size:
                stop = min(item.size, start + size)
                if stop < item.size:
                    stop = _record_boundary(file, stop, item.size, item.kind)
                yield Piece(number, start, stop, stop - start)
                start = stop


def _record_boundary(file: Any, position: int, size: int, kind: str) -> int:
    """First position >= `position` at which a line (jsonl) or, after a blank line, a text (txt) begins."""
    file.seek(position - 1)
    window = b""
    while block := file.read(_BLOCK):
        window += block
        if kind == "jsonl":
            if (found := window.find(b"\n")) >= 0:
                return position + found
        elif match := _BLANK_LINES.search(window):
            return position - 1 + match.end()
    return size


def _parquet_pieces(number: int, item: Input, size: int) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_metadata(item.name)
    except (pa.ArrowInvalid, OSError):
        yield Piece(number, 0, 0, item.size)  # reading it reports the damage under the bad-record policy
        return
    # Compressed sizes, scaled so that a file's pieces add up to its size.
    groups = [
        sum(metadata.row_group(g).column(c).total_compressed_size for c in range(metadata.num_columns))
        for g in range(metadata.num_row_groups)
    ]
    start = filled = 0
    for group, group_size in enumerate(groups):
        filled += group_size
        if filled >= size or group == len(groups) - 1:
            yield Piece(number, start, group + 1, filled)
            start, filled = group + 1, 0
