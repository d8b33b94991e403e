"""Texts out of parquet and Arrow files: which column types are text, and which failures are damage."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from wm_ds.errors import WmError
from wm_ds.packing.file_kinds import HEAD, InputError, refuse_other_content

# pyarrow has one exception for "damaged" and for "sound, but not by me"; only its words tell them apart.
_REFUSAL = re.compile(
    r"not (currently )?(supported|implemented|built)|unsupported|encrypt|decrypt|too much memory",
    re.IGNORECASE,
)


class DamagedColumnsError(WmError):
    """The file cannot be read further. args: an explanation."""


def is_refusal(error: BaseException) -> bool:
    """Whether a library says that it cannot read sound data (and not that the data is damaged)."""
    return isinstance(error, NotImplementedError) or bool(_REFUSAL.search(str(error)))


@contextmanager
def reading(name: str, kind: str) -> Iterator[None]:
    """Translate pyarrow's exceptions about file `name` of `kind` ("parquet" or "arrow").

    Raises DamagedColumnsError for damage; InputError for a sound file that pyarrow refuses (encrypted, an
    unknown codec or type, another format than the name says); an OSError of the system as it is.
    """
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if re.search("encrypt|decrypt", reason, re.IGNORECASE):
            raise InputError(f"{name} is encrypted; decrypt it first") from error
        if is_refusal(error):
            raise InputError(
                f"{name} cannot be read by pyarrow {pa.__version__} ({reason}); write it again with another "
                f"codec or column type, or use a newer pyarrow"
            ) from error
        with open(name, "rb") as file:
            refuse_other_content(name, kind, file.read(HEAD))
        raise DamagedColumnsError(f"not a readable {kind} file: {reason}") from error


def row_group_sizes(name: str) -> list[int]:
    """Compressed bytes of each row group of a parquet file.

    Raises as `reading` does. Where columns are encrypted their sizes are not to be had (pyarrow ends the
    process when asked), and the uncompressed sizes take their place.
    """
    import pyarrow.parquet as pq

    with reading(name, "parquet"):
        metadata = pq.read_metadata(name)
        if metadata.serialized_size != _footer_size(name):  # a signature follows: encryption is in use
            return [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
        return [
            sum(metadata.row_group(g).column(c).total_compressed_size for c in range(metadata.num_columns))
            for g in range(metadata.num_row_groups)
        ]
    raise AssertionError


def _footer_size(name: str) -> int:
    with open(name, "rb") as file:
        file.seek(-8, 2)
        return int.from_bytes(file.read(4), "little")


def values(column: Any) -> list[Any]:
    """A column's values, those of any text or binary type as bytes.

    Decoding is left to the caller, so that one bad row is one bad record. Strings and binary values of every
    layout count as text, behind dictionaries, run-ends and extension types (JSON, for example), too.
    """
    import pyarrow as pa

    types = pa.types
    if isinstance(column, pa.ExtensionArray):
        return values(column.storage)
    if types.is_dictionary(column.type):
        words = values(column.dictionary)
        return [None if index is None else words[index] for index in column.indices.to_pylist()]
    if types.is_run_end_encoded(column.type):
        runs = values(column.values)
        places = np.arange(len(column)) + column.offset
        return [runs[run] for run in np.searchsorted(np.asarray(column.run_ends), places, side="right")]
    for is_string, binary in (
        (types.is_string, pa.binary()),
        (types.is_large_string, pa.large_binary()),
        (types.is_string_view, pa.binary_view()),
    ):
        if is_string(column.type):
            column = column.cast(binary)
    return column.to_pylist()


def arrow_batches(name: str, field: str) -> Iterator[Any]:
    """(rows, column `field` or None if there is none) of each record batch of an Arrow stream or file."""
    import pyarrow as pa
    from pyarrow import ipc

    with open(name, "rb") as file:
        is_file = file.read(6) == b"ARROW1"
    with pa.memory_map(name) as source:
        reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            names = batch.schema.names
            yield batch.num_rows, batch.column(names.index(field)) if field in names else None
