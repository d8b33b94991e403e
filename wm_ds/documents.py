"""Documents out of files: what is an input, how it is cut into pieces, and reading a piece.

An *input* is one file (or one Hugging Face dataset). A *piece* is a part of an input that can be read on its
own and that holds whole documents: a byte range of a plain file, cut where a record ends; a whole compressed
file; some row groups of a parquet file; one shard of a dataset. Where the cuts fall depends on the inputs
and the wanted size only.

Reading a piece yields `Record`s. A text is data: it is never stripped, normalised or re-encoded. Only the
byte order mark at the beginning of a file goes, and of line ends only those between records.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import zstandard

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
BLANK = "blank_line"  # not a bad record: reported so that it can be counted
_BLOCK = 1 << 20
_BLANK_LINES = re.compile(rb"\n[ \t\r]*\n")


class InputError(ValueError):
    """An input does not exist, cannot be read, or is of no kind that we read."""


class Record(NamedTuple):
    """One document (`text`), or why there is none (`problem`: a reason, `detail`: words for people).

    `where` counts records' lines or rows from 0 at the beginning of the piece.
    """

    text: str | None
    problem: str | None
    where: int
    detail: str = ""


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


@dataclass(frozen=True)
class Reading:
    """How documents are found: the field of a record, and what separates documents in a .txt file."""

    text_field: str = "text"
    txt_split: str = "file"  # or "blank-lines"


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
            [str(Path(file).name), os.path.getsize(file) if os.path.isfile(file) else 0]
            for file in (files[split] if files and split in files else [])
        ]
        shards = _load_dataset(repository, config, split, revision or None).num_shards
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


def _load_dataset(repository: str, config: str | None, split: str, revision: str | None) -> Any:
    from datasets import load_dataset

    return load_dataset(repository, config, split=split, revision=revision, streaming=True)


# ------------------------------------------------------------------------------------------ cutting inputs


def cut(inputs: list[Input], size: int, reading: Reading) -> list[list[Piece]]:
    """Group the inputs into units of about `size` bytes, in order; each unit becomes one shard."""
    units: list[list[Piece]] = []
    unit: list[Piece] = []
    filled = 0
    for number, item in enumerate(inputs):
        for piece in _pieces(number, item, size, reading):
            unit.append(piece)
            filled += piece.size
            if filled >= size or item.kind == "dataset":
                units.append(unit)
                unit, filled = [], 0
    if unit:
        units.append(unit)
    return units


def _pieces(number: int, item: Input, size: int, reading: Reading) -> Iterator[Piece]:
    if item.kind == "dataset":
        assert item.identity is not None
        for shard in range(item.identity["shards"]):
            yield Piece(number, shard, shard + 1, 0)
    elif item.kind == "parquet":
        yield from _parquet_pieces(number, item, size)
    elif item.compression or (item.kind == "txt" and reading.txt_split == "file") or item.size <= size:
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
    """First position >= `position` at which a line (jsonl) or a run of text (txt, after a blank line) begins."""
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


# ------------------------------------------------------------------------------------------ reading pieces


class _Broken(Exception):
    """The rest of a file cannot be read; args: reason, words for people."""


class PieceReader:
    """Iterates over a piece's records. `digest()` afterwards is the sha256 of what was read.

    `progress(bytes)` is called as input is consumed.
    """

    def __init__(self, item: Input, piece: Piece, reading: Reading, progress: Callable[[int], None]) -> None:
        self._item, self._piece, self._reading, self._progress = item, piece, reading, progress
        self._hash = hashlib.sha256()

    def digest(self) -> str:
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[Record]:
        item = self._item
        if item.kind == "parquet":
            return self._parquet()
        if item.kind == "dataset":
            return self._dataset()
        if item.kind == "jsonl":
            return self._jsonl()
        return self._txt_file() if self._reading.txt_split == "file" else self._txt_blank_lines()

    # -- bytes

    def _raw(self) -> Iterator[bytes]:
        remaining = self._piece.stop - self._piece.start
        with open(self._item.name, "rb") as file:
            file.seek(self._piece.start)
            while remaining and (block := file.read(min(_BLOCK, remaining))):
                remaining -= len(block)
                self._hash.update(block)
                self._progress(len(block))
                yield block
        if remaining:
            raise InputError(f"{self._item.name} became {remaining} bytes shorter while it was read")

    def _blocks(self) -> Iterator[bytes]:
        """Decompressed blocks; raises _Broken after everything readable was yielded."""
        compression = self._item.compression
        if compression is None:
            yield from self._raw()
            return
        # Both formats may hold several members or frames one after another; a decompressor stops at each.
        make = {
            "gz": lambda: zlib.decompressobj(wbits=31),
            "zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
        }[compression]
        decompressor = None
        for raw in self._raw():
            while raw:
                if decompressor is None:
                    if compression == "gz":
                        raw = raw.lstrip(b"\0")  # tape padding between members, as gzip allows it
                        if not raw:
                            break
                    decompressor = make()
                try:
                    block = decompressor.decompress(raw)
                except (zlib.error, zstandard.ZstdError) as error:
                    raise _Broken(
                        "corrupt_compression", f"the {compression} data is damaged: {error}"
                    ) from None
                if block:
                    yield block
                raw = b""
                if decompressor.eof:
                    raw, decompressor = decompressor.unused_data, None
        if decompressor is not None:
            raise _Broken("truncated", f"the {compression} data ends before its end mark")

    def _lines(self) -> Iterator[bytes]:
        """Lines without their line feed. An incomplete line before a _Broken is not a line."""
        first = self._piece.start == 0
        rest: list[bytes] = []
        for block in self._blocks():
            parts = block.split(b"\n")
            if len(parts) == 1:
                rest.append(block)
                continue
            rest.append(parts[0])
            parts[0] = b"".join(rest)
            rest = [parts.pop()]
            if first:
                parts[0], first = _without_bom(parts[0]), False
            yield from parts
        last = b"".join(rest)
        if first:
            last = _without_bom(last)
        if last:
            yield last

    # -- records

    def _jsonl(self) -> Iterator[Record]:
        number = -1
        try:
            for number, line in enumerate(self._lines()):
                yield _json_record(line, self._reading.text_field, number)
        except _Broken as broken:
            yield Record(
                None, broken.args[0], number + 1, f"{broken.args[1]}; {number + 1} lines came before"
            )

    def _txt_file(self) -> Iterator[Record]:
        try:
            data = _without_bom(b"".join(self._blocks()))
        except _Broken as broken:
            yield Record(None, broken.args[0], 0, broken.args[1])
            return
        yield _text_record(data, 0)

    def _txt_blank_lines(self) -> Iterator[Record]:
        number, begin, document = -1, 0, []
        try:
            for number, line in enumerate(self._lines()):
                if line.strip(b" \t\r"):
                    if not document:
                        begin = number
                    document.append(line)
                elif document:
                    yield _text_record(_joined(document), begin)
                    document = []
        except _Broken as broken:  # the document that was cut is not a document
            yield Record(
                None, broken.args[0], number + 1, f"{broken.args[1]}; {number + 1} lines came before"
            )
            return
        if document:
            yield _text_record(_joined(document), begin)

    def _parquet(self) -> Iterator[Record]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        field, row = self._reading.text_field, 0
        try:
            with pq.ParquetFile(self._item.name) as file:
                if field not in file.schema_arrow.names:
                    rows = sum(file.metadata.row_group(g).num_rows for g in self._groups())
                    for row in range(rows):
                        yield Record(None, "missing_field", row, f"no column {field!r}")
                    return
                for group in self._groups():
                    share = self._piece.size // max(1, len(self._groups()))
                    for batch in file.iter_batches(256, row_groups=[group], columns=[field]):
                        for value in _bytes_or_values(batch.column(0)):
                            yield self._parquet_record(value, row)
                            row += 1
                    self._progress(share)
                if not self._groups() and file.metadata.num_row_groups:
                    raise InputError(f"{self._item.name} changed while it was read")
        except (pa.ArrowInvalid, OSError) as error:
            yield Record(None, "corrupt_file", row, f"not a readable parquet file: {error}")

    def _groups(self) -> range:
        return range(self._piece.start, self._piece.stop)

    def _parquet_record(self, value: Any, row: int) -> Record:
        if value is None:
            return Record(None, "missing_value", row, "null")
        if not isinstance(value, bytes):
            return Record(None, "not_a_string", row, f"a {type(value).__name__}")
        self._hash.update(value)
        return _text_record(value, row)

    def _dataset(self) -> Iterator[Record]:
        identity = self._item.identity
        assert identity is not None
        data = _load_dataset(
            self._item.name[len(DATASET_PREFIX) :],
            identity["config"],
            identity["split"],
            identity["revision"],
        ).shard(num_shards=identity["shards"], index=self._piece.start)
        for row, record in enumerate(data):
            result = _field_record(record, self._reading.text_field, row)
            if result.text is not None:
                encoded = result.text.encode()
                self._hash.update(encoded)
                self._progress(len(encoded))
            yield result


def _bytes_or_values(column: Any) -> list[Any]:
    """A column's values with strings as bytes: decoding is ours, so that one bad row is one bad record."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type):
        column = column.cast(pa.binary())
    elif pa.types.is_large_string(column.type):
        column = column.cast(pa.large_binary())
    return column.to_pylist()


def _without_bom(data: bytes) -> bytes:
    return data[3:] if data.startswith(codecs.BOM_UTF8) else data


def _joined(lines: list[bytes]) -> bytes:
    """A document's lines; the line end before its separator belongs to the separator."""
    return b"\n".join(lines).removesuffix(b"\r")


def _text_record(data: bytes, where: int) -> Record:
    try:
        return Record(data.decode("utf-8"), None, where)
    except UnicodeDecodeError as error:
        return Record(None, "invalid_utf8", where, f"byte {error.start} of the text: {error.reason}")


def _json_record(line: bytes, field: str, where: int) -> Record:
    if not line.strip(b" \t\r"):
        return Record(None, BLANK, where)
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Record(None, "invalid_utf8", where, f"byte {error.start} of the line: {error.reason}")
    except (ValueError, RecursionError) as error:
        return Record(None, "invalid_json", where, str(error))
    if not isinstance(record, dict):
        return Record(None, "not_an_object", where, f"a {type(record).__name__}")
    return _field_record(record, field, where)


def _field_record(record: dict[str, Any], field: str, where: int) -> Record:
    if field not in record:
        return Record(None, "missing_field", where, f"no field {field!r}; it has {sorted(record)[:8]}")
    text = record[field]
    if text is None:
        return Record(None, "missing_value", where, f"field {field!r} is null")
    if not isinstance(text, str):
        return Record(None, "not_a_string", where, f"field {field!r} is a {type(text).__name__}")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return Record(
                None, "lone_surrogate", where, f"character {error.start} of the text: {error.reason}"
            )
    return Record(text, None, where)


def lines_before(item: Input, piece: Piece) -> int:
    """Lines of the file in front of a piece, so that a record's line can be named. Reads that part."""
    if item.kind not in ("jsonl", "txt") or piece.start == 0:
        return 0
    count, remaining = 0, piece.start
    with open(item.name, "rb") as file:
        while remaining and (block := file.read(min(_BLOCK, remaining))):
            remaining -= len(block)
            count += block.count(b"\n")
    return count
