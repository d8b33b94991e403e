"""What an input file is: by its name, and by the bytes it begins with where the two disagree."""

from __future__ import annotations

import os
from pathlib import Path

from wm_ds.errors import WmError

SUFFIXES = {
    ".jsonl": ("jsonl", None),
    ".jsonl.gz": ("jsonl", "gz"),
    ".jsonl.zst": ("jsonl", "zst"),
    ".json": ("jsonl", None),
    ".json.gz": ("jsonl", "gz"),
    ".json.zst": ("jsonl", "zst"),
    ".parquet": ("parquet", None),
    ".arrow": ("arrow", None),
    ".txt": ("txt", None),
    ".txt.gz": ("txt", "gz"),
    ".txt.zst": ("txt", "zst"),
}
HEAD = 18  # bytes that tell a file's kind; also the longest header of a zstandard frame

# What a file begins with -> what it then is, and what to do with it.
_RENAME = "give it the suffix of what it holds"
_MAGIC = (
    (b"\x1f\x8b", "gzip data", _RENAME),
    (b"\x28\xb5\x2f\xfd", "zstandard data", _RENAME),
    *((bytes([first]) + b"\x2a\x4d\x18", "zstandard data", _RENAME) for first in range(0x50, 0x60)),
    *(
        (bytes([first]) + b"\xb5\x2f\xfd", "zstandard data of a version before 0.8", "compress it again")
        for first in range(0x22, 0x28)
    ),
    (b"PAR1", "a parquet file", _RENAME),
    (b"PARE", "an encrypted parquet file", "decrypt it first"),
    (b"ARROW1\0\0", "an Arrow file", _RENAME),
    (b"\xfd7zXZ\0", "xz data", "decompress it first"),
    (b"BZh", "bzip2 data", "decompress it first"),
    (b"PK\x03\x04", "a zip archive", "unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it first"),
    (b"\x04\x22\x4d\x18", "lz4 data", "decompress it first"),
    (b"\x1f\x9d", "data of the program compress", "decompress it first"),
    (b"ORC", "an ORC file", "convert it to parquet first"),
    (b"Obj\x01", "an Avro file", "convert it to parquet first"),
    (b"\xff\xfe\0\0", "text in UTF-32", "convert it with iconv -t UTF-8 first"),
    (b"\xff\xfe", "text in UTF-16", "convert it with iconv -t UTF-8 first"),
    (b"\xfe\xff", "text in UTF-16", "convert it with iconv -t UTF-8 first"),
)
_HOLDS = {"gz": "gzip data", "zst": "zstandard data", "parquet": "a parquet file", "arrow": "an Arrow file"}
_TEXT_MAY_BEGIN = (b"BZh", b"ORC", b"Obj\x01", b"PAR1", b"PARE")


class InputError(WmError, ValueError):
    """An input does not exist, is of a kind that is not read, or cannot be read by the installed libraries.

    It is never a bad record: the input may be sound, so no policy leaves it out.
    """


def kind_of(path: str) -> tuple[str, str | None]:
    """(kind, compression) by the file's name; raises InputError for a suffix that is not read."""
    base = os.path.basename(path).lower()
    for suffix, kind in SUFFIXES.items():
        if base.endswith(suffix):
            return kind
    suffix = Path(base).suffix
    raise InputError(
        f"{path} has {f'the suffix {suffix!r}' if suffix else 'no suffix'}, which is none of "
        f"{', '.join(SUFFIXES)}; rename it, or choose files by a glob such as 'FOLDER/*.jsonl'"
    )


def refuse_other_content(name: str, expected: str, head: bytes) -> None:
    """Raise InputError if the first bytes `head` of file `name` are another known kind's.

    expected: "gz", "zst", "parquet", "arrow", or "text" for plain lines and texts.
    """
    for magic, holds, remedy in _MAGIC:
        if not head.startswith(magic) or _HOLDS.get(expected) == holds:
            continue
        if expected == "text" and magic in _TEXT_MAY_BEGIN and _is_text(head):
            continue
        raise InputError(f"{name} holds {holds}, which its name does not say: {remedy}")


def _is_text(head: bytes) -> bool:
    return all(byte >= 0x20 or byte in b"\t\r\n\f" for byte in head)
