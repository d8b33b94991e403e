"""Reading documents out of a piece of an input.

A text is data: it is never stripped, normalised or re-encoded. Only the byte order mark at the beginning of a
file goes, and of line ends only those between records. What is no document is a record with a `problem`; what
happens to it is the caller's policy.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import zstandard

from wm_ds.packing.inputs import DATASET_PREFIX, Input, InputError, Piece, load_dataset_stream

BLANK = "blank_line"  # not a bad record: reported so that it can be counted
_BLOCK = 1 << 20
_COMPRESSED_BLOCK = 1 << 14  # small, since a block can grow a thousandfold


class Record(NamedTuple):
    """One document (`text`), or why there is none (`problem`: a reason, `detail`: words for people).

    `where` counts records' lines or rows from 0 at the beginning of the piece.
    """

    text: str | None
    problem: str | None
    where: int
    detail: str = ""


@dataclass(frozen=True)
class Reading:
    """How documents are found: the field of a record, and what separates documents in a .txt file."""

    text_field: str = "text"
    txt_split: str = "file"  # or "blank-lines"


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
        size = _BLOCK if self._item.compression is None else _COMPRESSED_BLOCK
        with open(self._item.name, "rb") as file:
            file.seek(self._piece.start)
            while remaining and (block := file.read(min(size, remaining))):
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
        number, begin = -1, 0
        document: list[bytes] = []
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
        data = load_dataset_stream(
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
