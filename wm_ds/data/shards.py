"""The packed-shard format: raw tokens, document ends, a manifest.

    DIR/manifest.json                 written last; a folder without it is not a data set
    DIR/shard-000000/tokens.bin       little-endian uint16 or uint32, chosen by the vocabulary
    DIR/shard-000000/ends.bin         int64: where each document stops (after its EOS)
    DIR/shard-000000/shard.json       counts and sha256 of the two files above

A shard is a *stream*: document, EOS, filler up to a multiple of `align`, next document, ... so every
document starts at a multiple of `align` and document i starts at `align_up(ends[i-1])`. The corpus is the
concatenation of all shards' streams, and training sequence i is positions [i*T, (i+1)*T) of that
concatenation. Packing is therefore a view: a shard does not depend on what stands before it, which is why
any number of workers or tasks writes the same bytes.

A shard appears under its name by one rename of its folder, after its checksums were written into it and
everything was flushed to disk; a half-written shard has another name and is never read.

Positions, counts and sizes are 64-bit throughout. Positions are in tokens, never in bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from wm_ds import files
from wm_ds.errors import WmError

FORMAT = "wm_ds.shards"
VERSION = 1
HOLDOUT_VERSION = 2  # held out by document: older code would show held-out documents to training
MANIFEST = "manifest.json"
_ENDS_DTYPE = np.dtype("<i8")


class ShardError(WmError, ValueError):
    """Packed data is missing, damaged or does not fit what was asked of it."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Smallest of uint16 and uint32 that holds the ids 0 .. vocab_size-1."""
    if not 1 <= vocab_size <= 2**32:
        raise ShardError(f"vocab_size {vocab_size} is outside 1 .. 2^32: no token type holds its ids")
    return np.dtype("<u2") if vocab_size <= 2**16 else np.dtype("<u4")


def align_up(position: Any, align: int) -> Any:
    """`position` (int or array) rounded up to a multiple of `align`."""
    return -(-position // align) * align


def content(manifest: dict[str, Any]) -> str:
    """sha256 of what training reads: the rows, their order and their split, wherever the folder lies.

    Two folders have the same one where every batch of every run would be the same.
    """
    names = (
        "seq_len",
        "align",
        "tail",
        "shuffle_seed",
        "sequences",
        "holdout",
        "eos_id",
        "filler_id",
        "dtype",
    )
    rows = [
        [record[name] for name in ("length", "sha256_tokens", "sha256_ends")] for record in manifest["shards"]
    ]
    said = {name: manifest[name] for name in names} | {"shards": rows}
    said["holdout_by"] = manifest.get("holdout_by", "row")
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def shard_name(index: int) -> str:
    """Folder of a shard."""
    return f"shard-{index:06d}"


# ---------------------------------------------------------------------------------------------- writing


def remove(path: Path) -> None:
    """Remove a file or folder; what is gone already is fine."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` to `path` as all JSON of packed data is written: whole, indented by one, ASCII."""
    files.write_json(path, value, indent=1)


class _HashedFile:
    """A file that is hashed while it is written, so that its checksum costs no second read."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        self._hash = hashlib.sha256()

    def write(self, array: np.ndarray) -> None:
        view = memoryview(np.ascontiguousarray(array)).cast("B")
        self._hash.update(view)
        while view:  # an unbuffered write may be short, and writes at most 2 GiB at a time
            view = view[self._file.write(view) :]

    def close(self) -> str:
        os.fsync(self._file.fileno())
        self._file.close()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        self._file.close()


class ShardWriter:
    """Writes one shard into a temporary folder and publishes it by rename.

    Use as a context manager; leaving it without `publish` removes what was written.
    """

    def __init__(
        self, root: Path, index: int, *, vocab_size: int, eos_id: int, filler_id: int, align: int
    ) -> None:
        self.name = shard_name(index)
        self.tokens = 0  # data tokens, EOS included, filler not
        self.length = 0  # positions in the stream, filler included
        self.documents = 0
        self._root = root
        self._folder = files.temporary(root / self.name)
        self._dtype = token_dtype(vocab_size)
        self._vocab_size, self._eos_id, self._filler_id, self._align = vocab_size, eos_id, filler_id, align
        self._folder.mkdir(parents=True)
        self._files = {name: _HashedFile(self._folder / f"{name}.bin") for name in ("tokens", "ends")}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.abandon()
        shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, ids: np.ndarray, offsets: np.ndarray) -> None:
        """Append documents: document i is `ids[offsets[i]:offsets[i+1]]`, without EOS and not empty.

        Raises ShardError if an id does not fit the vocabulary.
        """
        lengths = np.diff(offsets).astype(np.int64)
        if not lengths.size:
            return
        if lengths.min() < 1:
            raise ShardError("an empty document has no place in a shard; leave it out and count it")
        largest = int(ids.max())
        if largest >= self._vocab_size:
            raise ShardError(
                f"the tokenizer produced id {largest}, but its vocabulary ends at {self._vocab_size - 1}"
            )
        room = align_up(lengths + 1, self._align)
        starts = np.cumsum(room) - room
        stream = np.full(int(room.sum()), self._filler_id, dtype=self._dtype)
        stream[np.arange(ids.size, dtype=np.int64) + np.repeat(starts - offsets[:-1], lengths)] = ids
        stream[starts + lengths] = self._eos_id
        self._files["tokens"].write(stream)
        self._files["ends"].write((self.length + starts + lengths + 1).astype(_ENDS_DTYPE))
        self.tokens += int(lengths.sum()) + lengths.size
        self.length += stream.size
        self.documents += lengths.size

    def publish(self, extra: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
        """Write checksums, flush, rename into place; returns the shard's record.

        `extra` joins the record in shard.json; `source` says what was read and goes to source.json, apart
        because it holds times of this machine's files while shard.json depends on the content alone.
        """
        record = {
            "name": self.name,
            "length": self.length,
            "tokens": self.tokens,
            "documents": self.documents,
            **{f"sha256_{name}": file.close() for name, file in self._files.items()},
            **extra,
        }
        write_json(self._folder / "source.json", source)
        write_json(self._folder / "shard.json", record)
        try:
            os.rename(self._folder, self._root / self.name)
        except OSError:
            # Another attempt of the same task (a requeued job's twin) was faster. The bytes are a function
            # of inputs and settings, so its shard is ours; anything else in that place is an error.
            published = read_record(self._root, self.name)
            if published != record:
                raise
            return published
        files.sync_directory(self._root)
        return record


def read_record(root: Path, name: str) -> dict[str, Any] | None:
    """The published shard's record, or None if no shard of that name is published."""
    path = root / name / "shard.json"
    if not path.parent.is_dir():
        return None
    remedy = f"remove the folder {path.parent}, then run the same pack_data command again"
    return read_json(path, ("name", "length", "tokens", "documents"), remedy)


def read_json(path: Path, keys: Iterable[str], remedy: str) -> dict[str, Any]:
    """The JSON object in a file of packed data.

    Raises ShardError, with `remedy`, if the file is missing, is no JSON object, or lacks one of `keys`.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ShardError(f"{path} is missing: {remedy}") from None
    except ValueError as error:
        raise ShardError(f"{path} is damaged, it is not JSON ({error}): {remedy}") from None
    if not isinstance(value, dict):
        raise ShardError(f"{path} is damaged, it holds no JSON object: {remedy}")
    if missing := [key for key in keys if key not in value]:
        raise ShardError(f"{path} is damaged, it lacks {missing[0]!r}: {remedy}")
    return value


# ---------------------------------------------------------------------------------------------- reading


def open_array(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    """Memory-map `count` values; raises ShardError if the file's size says otherwise."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise ShardError(f"{path} is missing; the manifest names it") from None
    if size != count * dtype.itemsize:
        raise ShardError(
            f"{path} has {size} bytes; the manifest says {count} values of {dtype.itemsize} bytes: "
            f"the file was cut or overwritten, pack it again"
        )
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))


def load_manifest(root: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check a data set's manifest.

    Raises ShardError for a folder without one (packing unfinished, or not a data set), an unknown format
    version, and a token type that does not belong to the vocabulary.
    """
    path = Path(root) / MANIFEST
    command = f"python tools/pack_data.py merge {shlex.quote(str(root))}"
    if not path.is_file():
        if any(Path(root).glob("shard-*")):
            raise ShardError(
                f"{path} is missing: packing {root} has not finished. Run the same pack_data command again, "
                f"or `{command}` if it was packed by an array of tasks"
            )
        raise ShardError(f"{path} is missing: {root} is not a packed data set")
    remedy = f"remove it and write it again: {command}"
    manifest = read_json(path, (), remedy)
    if manifest.get("format") != FORMAT or manifest.get("version") not in (VERSION, HOLDOUT_VERSION):
        raise ShardError(
            f"{path} has format {manifest.get('format')!r} version {manifest.get('version')!r}; "
            f"this code reads {FORMAT!r} version {VERSION} and {HOLDOUT_VERSION}"
        )
    read_json(path, ("vocab_size", "dtype"), remedy)
    needed = token_dtype(manifest["vocab_size"])
    if manifest["dtype"] != needed.name:
        raise ShardError(
            f"{path} says dtype {manifest['dtype']!r}, but a vocabulary of {manifest['vocab_size']} is "
            f"stored as {needed.name!r}: the manifest was edited or damaged, pack the data again"
        )
    return manifest


def open_shard(root: Path, record: dict[str, Any], dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Memory-mapped (tokens [length], document ends [documents]) of one shard."""
    folder = root / record["name"]
    tokens = open_array(folder / "tokens.bin", dtype, record["length"])
    ends = open_array(folder / "ends.bin", _ENDS_DTYPE, record["documents"])
    return tokens, ends


def document_spans(ends: np.ndarray, start: int, stop: int, align: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents' (starts, stops) inside positions [start, stop) of a shard, clipped to that range.

    Only documents with at least one token in the range are listed; what lies between them is filler.
    """
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left"))
    stops = np.array(ends[first : last + 1], dtype=np.int64)
    starts = np.empty_like(stops)
    if stops.size:
        starts[0] = align_up(int(ends[first - 1]), align) if first else 0
        starts[1:] = align_up(stops[:-1], align)
    inside = starts < stop
    return np.maximum(starts[inside], start), np.minimum(stops[inside], stop)


def verify_shard(root: Path, record: dict[str, Any], progress: Callable[[int], None] | None = None) -> None:
    """Read one shard back and compare sizes and sha256; raises ShardError naming the damaged file."""
    for name in ("tokens", "ends"):
        path = root / record["name"] / f"{name}.bin"
        digest = hashlib.sha256()
        try:
            with open(path, "rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
                    if progress is not None:
                        progress(len(block))
        except FileNotFoundError:
            raise ShardError(f"{path} is missing; the manifest names it") from None
        if digest.hexdigest() != record[f"sha256_{name}"]:
            raise ShardError(
                f"{path} is damaged: its sha256 is {digest.hexdigest()[:12]}..., "
                f"{record[f'sha256_{name}'][:12]}... was written. Remove the folder {record['name']} and "
                f"manifest.json, then run the same pack_data command again"
            )
