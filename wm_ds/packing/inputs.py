"""Finding inputs and cutting them into pieces.

An *input* is one file (or one Hugging Face dataset). A *piece* is a part of an input that can be read on its
own and that holds whole documents: a byte range of a plain file, cut where a record ends; a whole
compressed file; some row groups of a parquet file; one shard of a dataset. A *unit* is a list of pieces of
about a wanted size. Where the cuts fall depends on the inputs and that size only.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wm_ds.packing import columns, hf_datasets
from wm_ds.packing.file_kinds import InputError, kind_of
from wm_ds.packing.hf_datasets import DATASET_PREFIX

_BLOCK = 1 << 20
_BLANK_LINES = re.compile(rb"\n[ \t\r]*\n")


@dataclass(frozen=True)
class Input:
    """name: as the user wrote it. kind: jsonl, txt, parquet, arrow or dataset. size: bytes (0: not known)."""

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

    What exists under a name is meant by it, whatever characters it holds; only then it is taken for `hf:` or
    a glob. Folders are searched in depth; files and folders whose name begins with a dot are passed over. A
    folder that `Dataset.save_to_disk` wrote is its data files (of split `dataset_split`, if it has splits).
    Raises InputError for a name that matches nothing, a file of an unknown kind, and a file named twice.
    """
    inputs: list[Input] = []
    seen: dict[str, str] = {}
    for name in names:
        if name.startswith(DATASET_PREFIX) and not os.path.exists(name):
            folder = name.removeprefix(DATASET_PREFIX)
            if not os.path.isdir(folder) or _saved_files(folder, dataset_split) is None:
                repository, identity = hf_datasets.identify(folder, dataset_split, dataset_config)
                inputs.append(Input(DATASET_PREFIX + repository, "dataset", None, 0, identity))
                continue
            name = folder
        for path in _expand(name, dataset_split):
            real = os.path.realpath(path)
            if real in seen:
                raise InputError(
                    f"{path} is the same file as {seen[real]}: its documents would be packed twice; "
                    f"name it once"
                )
            seen[real] = path
            if not os.path.isfile(path):
                raise InputError(f"{path} {_what(path)}")
            kind, compression = kind_of(path)
            inputs.append(Input(path, kind, compression, os.path.getsize(path)))
    return inputs


def _what(path: str) -> str:
    """Why something that is no file cannot be read, in words."""
    if not os.path.exists(path):
        return "is a link to nothing: remove it, or name the files that are meant"
    # Several workers read it at several places, and a later run looks at it again.
    return "is no file but a pipe or a device: write its text into a file first"


def _expand(name: str, split: str) -> list[str]:
    if os.path.isdir(name):
        found = _files_below(name, split)
        if not found:
            raise InputError(f"{name} is a folder without files")
        return found
    if os.path.exists(name):
        return [name]
    if glob.has_magic(name):
        if found := _matches(name):
            return found
        raise InputError(f"no file matches {name!r}")
    if os.path.islink(name):
        raise InputError(f"{name} {_what(name)}")
    raise InputError(
        f"{name} does not exist; give a file, a folder, a glob in quotes, or {DATASET_PREFIX}NAME for a "
        f"Hugging Face dataset"
    )


def _files_below(root: str, split: str) -> list[str]:
    groups: list[list[str]] = []  # files that belong together stay together
    for folder, folders, files in os.walk(root, followlinks=True):
        saved = _saved_files(folder, split)
        if saved is not None:
            folders.clear()
            groups.append(saved)
            continue
        folders[:] = sorted(entry for entry in folders if not entry.startswith("."))
        groups += [[os.path.join(folder, entry)] for entry in files if not entry.startswith(".")]
    return [path for group in sorted(groups) for path in group]


def _saved_files(folder: str, split: str) -> list[str] | None:
    """Data files of a folder that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote, else None."""
    splits, state = os.path.join(folder, "dataset_dict.json"), os.path.join(folder, "state.json")
    try:
        if os.path.isfile(splits):
            names = json.loads(Path(splits).read_text(encoding="utf-8"))["splits"]
            if split not in names:
                raise InputError(
                    f"{folder} has no split {split!r}; name one of {', '.join(names)} with --dataset-split"
                )
            return _saved_files(os.path.join(folder, split), split)
        if not os.path.isfile(state):
            return None
        found = json.loads(Path(state).read_text(encoding="utf-8"))
        if not isinstance(found, dict) or "_data_files" not in found:
            return None  # another program's
        return [os.path.join(folder, file["filename"]) for file in found["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"the saved dataset {folder} is damaged: its list of files cannot be read") from None


def _matches(pattern: str) -> list[str]:
    """Files that match a glob. A leading folder that exists is meant by its name, also one like `a[1]`."""
    slashes = [place for place, character in enumerate(pattern) if character == "/"]
    existing = next((place for place in reversed(slashes) if os.path.isdir(pattern[:place])), 0)
    for attempt in (glob.escape(pattern[:existing]) + pattern[existing:], pattern):
        found = sorted(path for path in glob.glob(attempt, recursive=True) if os.path.isfile(path))
        if found:
            return found
    return []


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
    elif item.size <= size or _is_one_piece(item, txt_split):
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


def _is_one_piece(item: Input, txt_split: str) -> bool:
    """Whether a file cannot be entered in the middle."""
    return item.kind == "arrow" or bool(item.compression) or (item.kind == "txt" and txt_split == "file")


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
    try:
        groups = columns.row_group_sizes(item.name)
    except columns.DamagedColumnsError:
        yield Piece(number, 0, 0, item.size)  # reading it reports the damage under the bad-record policy
        return
    start = filled = 0
    for group, group_size in enumerate(groups):
        filled += group_size
        if filled >= size or group == len(groups) - 1:
            yield Piece(number, start, group + 1, filled)
            start, filled = group + 1, 0
