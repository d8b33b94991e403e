"""Decompressing gzip and zstandard files, and telling damage from data that the libraries refuse to read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import zstandard

from wm_ds.errors import WmError
from wm_ds.packing.file_kinds import HEAD, InputError, refuse_other_content

_LARGEST_WINDOW = 1 << 31  # bytes; more than `zstd --ultra --long=31` uses, and the library's limit
_NAMES = {"gz": "gzip", "zst": "zstandard"}
_MAGIC = {
    "gz": (b"\x1f\x8b",),
    "zst": (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))),
}


class DamagedError(WmError):
    """The rest of a file cannot be read.

    reason: a word for counts. complete: what was read so far is a whole file, with something behind it.
    """

    def __init__(self, reason: str, explanation: str, complete: bool = False) -> None:
        super().__init__(explanation)
        self.reason, self.complete = reason, complete


def decompress(name: str, compression: str, raw_blocks: Iterator[bytes]) -> Iterator[bytes]:
    """Blocks of the decompressed data of file `name`; compression: "gz" or "zst".

    Both formats may hold several members (frames) one after another. Raises DamagedError after everything
    readable was yielded, and InputError for sound data that cannot be read here: another format than the
    name says, a dictionary that is not in the file, a window that is too large.
    """
    decompressor: Any = None
    raw_blocks = iter(raw_blocks)
    head, members = b"", 0  # of the member being read; those that were read to their end
    for raw in raw_blocks:
        while raw:
            if decompressor is None:
                raw = _next_member(compression, members, raw)
                if not raw:
                    break
                decompressor, head = _decompressor(compression), b""
            head += raw[: HEAD - len(head)]
            try:
                block = decompressor.decompress(raw)
            except (zlib.error, zstandard.ZstdError) as error:
                head += next(raw_blocks, b"")[: HEAD - len(head)]
                raise _damage(name, compression, head, members, str(error)) from None
            if block:
                yield block
            raw = b""
            if decompressor.eof:
                raw, decompressor, members = decompressor.unused_data, None, members + 1
    if decompressor is not None:
        if not _begins_a_member(compression, head):
            raise _damage(name, compression, head, members, "it ends early")
        raise DamagedError("truncated", f"the {_NAMES[compression]} data ends before its end mark")


def _next_member(compression: str, members: int, raw: bytes) -> bytes:
    """What follows `members` whole ones, without the tape padding that gzip allows between them."""
    return raw.lstrip(b"\0") if compression == "gz" and members else raw


def _decompressor(compression: str) -> Any:
    if compression == "gz":
        return zlib.decompressobj(wbits=31)
    return zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).decompressobj()


def _begins_a_member(compression: str, head: bytes) -> bool:
    return any(head[: len(magic)] == magic[: len(head)] for magic in _MAGIC[compression])


def _damage(name: str, compression: str, head: bytes, members: int, error: str) -> DamagedError:
    """What a failure means, from the header of the member that failed; raises InputError for a refusal."""
    kind = _NAMES[compression]
    if not _begins_a_member(compression, head):
        if members:
            return DamagedError(
                "trailing_data",
                f"everything up to the end of the {kind} data is intact; what follows it ({head[:8]!r}) is "
                f"no {kind} data",
                complete=True,
            )
        refuse_other_content(name, compression, head)
        return DamagedError(
            "corrupt_compression",
            f"it does not begin as {kind} data does (but with {head[:8]!r}); a file that was already "
            f"decompressed needs a name without .{compression}",
        )
    reason = _gzip_refusal(head) if compression == "gz" else _zstandard_refusal(head, error)
    if reason:
        raise InputError(f"{name} cannot be read: {reason}")
    return DamagedError("corrupt_compression", f"the {kind} data is damaged: {error}")


def _gzip_refusal(head: bytes) -> str | None:
    """RFC 1952: byte 2 is the method (8: deflate), bits 5 to 7 of byte 3 are reserved."""
    if len(head) > 2 and head[2] != 8:
        return (
            f"its gzip data uses compression method {head[2]}, only 8 (deflate) is known; compress it again"
        )
    if len(head) > 3 and head[3] & 0xE0:
        return f"its gzip header has flags {head[3]:#04x} of a later version of the format; compress it again"
    return None


def _zstandard_refusal(head: bytes, error: str) -> str | None:
    """RFC 8878, section 3.1.1.1: descriptor at byte 4, window at byte 5, then the dictionary's id."""
    if len(head) < 6:
        return None
    if head[4] & 0x08:
        return "its zstandard frames use a feature of a later version of the format; compress it again"
    if not head[4] & 0x20:
        window = (1 << (10 + (head[5] >> 3))) // 8 * (8 + (head[5] & 7))
        if window > _LARGEST_WINDOW:
            return (
                f"its zstandard data needs a window of {window / 2**30:,.1f} GiB, at most "
                f"{_LARGEST_WINDOW >> 30} GiB is possible; compress it again with zstd --long=31 or less"
            )
        if "memory" in error.lower():
            return (
                f"its zstandard data needs a window of {window / 2**20:,.0f} MiB for each worker, which this "
                f"machine does not have; use fewer --workers"
            )
    if "dictionary" in error.lower():
        number = zstandard.get_frame_parameters(head).dict_id
        return (
            f"its zstandard data was compressed with a dictionary (number {number}) that is not in the file; "
            f"decompress it first: zstd -d -D DICTIONARY"
        )
    return None
