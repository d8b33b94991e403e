"""Reading documents out of a piece of an input.

A text is data: it is never stripped, normalised or re-encoded. Only the byte order mark at the beginning of a
file goes, and of line ends only those between records. What is no document is a record with a `problem`; what
happens to it is the caller's policy.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from wm_ds.packing import columns, hf_datasets
from wm_ds.packing.compression import DamagedError, decompress
from wm_ds.packing.file_kinds import HEAD, InputError, refuse_other_content
from wm_ds.packing.hf_datasets import DATASET_PREFIX
from wm_ds.packing.inputs import Input, Piece

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


class PieceReader:
    """Iterates over a piece's records. `digest()` afterwards is the sha256 of what was read.

    `progress(bytes)` is called as input is consumed.
    """

    def __init__(self, item: Input, piece: Piece, reading: Reading, progress: Callable[[int], None]) -> None:
        self._item, self._piece, self._reading, self._progress = item, piece, reading, progress
        self._hash = hashlib.sha256()

    def digest(self) -> str:
        """sha256 of what was read so far."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[Record]:
        item = self._item
        if item.kind == "parquet":
            return self._parquet()
        if item.kind == "arrow":
            return self._arrow()
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
        """Decompressed blocks; raises DamagedError after everything readable was yielded."""
        item, first = self._item, self._piece.start == 0
        blocks = self._raw()
        if item.compression is not None:
            blocks = decompress(item.name, item.compression, blocks)
        for block in blocks:
            if first:
                refuse_other_content(item.name, "text", block[:HEAD])
                first = False
            yield block

    def _lines(self) -> Iterator[bytes]:
        """Lines without their line feed. A line that damage cuts off is not a line."""
        first = self._piece.start == 0
        rest: list[bytes] = []
        damage: DamagedError | None = None
        try:
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
        except DamagedError as error:
            if not error.complete:
                raise
            damage = error
        last = b"".join(rest)
        if first:
            last = _without_bom(last)
        if last:
            yield last
        if damage is not None:
            raise damage

    # -- records

    def _jsonl(self) -> Iterator[Record]:
        number, first = -1, self._piece.start == 0
        try:
            for number, line in enumerate(self._lines()):
                if first and (beginning := line.strip(b" \t\r")):
                    _refuse_json_over_lines(self._item.name, beginning)
                    first = False
                yield _json_record(line, self._reading.text_field, number)
        except DamagedError as damage:
            yield Record(None, damage.reason, number + 1, f"{damage}; {number + 1} lines came before")

    def _txt_file(self) -> Iterator[Record]:
        blocks: list[bytes] = []
        damage: DamagedError | None = None
        try:
            for block in self._blocks():
                blocks.append(block)
        except DamagedError as error:
            damage = error
        if damage is None or damage.complete:
            yield _text_record(_without_bom(b"".join(blocks)), 0)
        if damage is not None:
            yield Record(None, damage.reason, 0, str(damage))

    def _txt_blank_lines(self) -> Iterator[Record]:
        number, begin = -1, 0
        document: list[bytes] = []
        damage: DamagedError | None = None
        try:
            for number, line in enumerate(self._lines()):
                if line.strip(b" \t\r"):
                    if not document:
                        begin = number
                    document.append(line)
                elif document:
                    yield _text_record(_joined(document), begin)
                    document = []
        except DamagedError as error:
            damage = error
        if document and (damage is None or damage.complete):  # a document that damage cuts off is none
            yield _text_record(_joined(document), begin)
        if damage is not None:
            yield Record(None, damage.reason, number + 1, f"{damage}; {number + 1} lines came before")

    def _parquet(self) -> Iterator[Record]:
        import pyarrow.parquet as pq

        name, field, row = self._item.name, self._reading.text_field, 0
        try:
            with columns.reading(name, "parquet"), pq.ParquetFile(name) as file:
                if field not in file.schema_arrow.names:
                    rows = sum(file.metadata.row_group(g).num_rows for g in self._groups())
                    for row in range(rows):
                        yield Record(None, "missing_field", row, f"no column {field!r}")
                    return
                for group in self._groups():
                    share = self._piece.size // max(1, len(self._groups()))
                    for batch in file.iter_batches(256, row_groups=[group], columns=[field]):
                        yield from self._column_records(batch.column(0), row)
                        row += len(batch)
                    self._progress(share)
                if not self._groups() and file.metadata.num_row_groups:
                    raise InputError(f"{name} changed while it was read")
        except columns.DamagedColumnsError as damage:
            yield Record(None, "corrupt_file", row, f"{damage}; {row} rows came before")

    def _arrow(self) -> Iterator[Record]:
        name, field, row = self._item.name, self._reading.text_field, 0
        try:
            with columns.reading(name, "arrow"):
                for rows, column in columns.arrow_batches(name, field):
                    if column is None:
                        yield from (
                            Record(None, "missing_field", row + i, f"no column {field!r}")
                            for i in range(rows)
                        )
                    else:
                        yield from self._column_records(column, row)
                    row += rows
        except columns.DamagedColumnsError as damage:
            yield Record(None, "corrupt_file", row, f"{damage}; {row} rows came before")
        self._progress(self._piece.size)

    def _column_records(self, column: Any, first_row: int) -> Iterator[Record]:
        kind = column.type
        for row, value in enumerate(columns.values(column), first_row):
            if value is None:
                yield Record(None, "missing_value", row, "null")
            elif not isinstance(value, bytes):
                yield Record(None, "not_a_string", row, f"a value of the column type {kind}")
            else:
                self._hash.update(value)
                yield _text_record(value, row)

    def _groups(self) -> range:
        return range(self._piece.start, self._piece.stop)

    def _dataset(self) -> Iterator[Record]:
        identity, row = self._item.identity, 0
        assert identity is not None
        repository = self._item.name.removeprefix(DATASET_PREFIX)
        try:
            for record in hf_datasets.shard_records(repository, identity, self._piece.start):
                result = _field_record(record, self._reading.text_field, row)
                if result.text is not None:
                    encoded = result.text.encode()
                    self._hash.update(encoded)
                    self._progress(len(encoded))
                yield result
                row += 1
        except hf_datasets.DatasetReadError as error:
            yield Record(None, "unreadable_rest", row, f"{error}; {row} rows came before")


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


def _refuse_json_over_lines(name: str, line: bytes) -> None:
    """Raise InputError if a file's first line begins an array of objects, or an object over several lines."""
    if line == b"{":
        raise InputError(
            f"{name} holds JSON objects over several lines, not one object a line; convert it: "
            f"jq -c . FILE > NEW.jsonl"
        )
    if not line.startswith(b"["):
        return
    try:
        array = json.loads(line)
    except (ValueError, RecursionError):
        array = [{}]
    if isinstance(array, list) and all(isinstance(value, dict) for value in array):
        raise InputError(
            f"{name} holds one JSON array, not one object a line; convert it: jq -c '.[]' FILE > NEW.jsonl"
        )


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
    if isinstance(text, bytes):  # a binary column of a dataset
        return _text_record(text, where)
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
