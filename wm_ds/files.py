"""Files that a reader finds whole or not at all: the one way in which this project replaces a file.

New content is written to a hidden file beside the old one, flushed to the disk, and takes the name by one
rename; then the folder is flushed, so that the rename, too, survives a power loss. A kill at any moment
leaves the old content or the new one under the name, and perhaps a hidden `.NAME.tmp-…` that nobody reads.
An error, a full disk say, leaves the old content and nothing else.

Modes are what the umask makes them. Only the standard library is used: the batch script's Python has no more.
"""

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# What file systems answer that cannot flush a folder; those that can do it without being asked.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)


def temporary(path: Path) -> Path:
    """A hidden name beside `path` that no other process uses; what has such a name is unfinished."""
    return path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")


def sync_directory(path: Path) -> None:
    """Make renames and new files in the folder `path` survive a power loss."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(handle)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and flush it to the disk, in a folder that nobody reads yet (no rename)."""
    with naming(path), open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of the file system that name no file, as that of a full disk, the name `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise


def write_atomically(path: str | Path, data: bytes | str) -> None:
    """Put `data` (text as UTF-8) at `path`: a reader sees the old file or the whole new one.

    Raises OSError, with the old file untouched and nothing left beside it.
    """
    path = Path(path)
    part = temporary(path)
    try:
        write_synced(part, data.encode() if isinstance(data, str) else data)
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        if error.filename == str(part):
            error.filename = str(path)  # the name that the person at the terminal has given
        elif error.filename is None:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(
    path: str | Path, content: Any, *, indent: int | None = None, sort_keys: bool = False, ascii: bool = True
) -> None:
    """`content` as JSON and a line end, by `write_atomically`. Raises TypeError for what JSON cannot hold."""
    text = json.dumps(content, indent=indent, sort_keys=sort_keys, ensure_ascii=ascii)
    write_atomically(path, text + "\n")


def create(path: Path, data: bytes | str) -> bool:
    """Write a file that must not exist yet; False where it does. Exclusive on network file systems, too.

    A kill in the midst can leave it short, so that who claims a name must not depend on the content.
    """
    try:
        file = open(path, "xb")  # noqa: SIM115 - closed below, and removed where its content does not fit
    except FileExistsError:
        return False
    try:
        with file:
            file.write(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return True


def give_usual_mode(path: Path) -> None:
    """Give a file the mode that new files have here: some libraries keep what they write to its owner."""
    probe = temporary(path)
    try:
        probe.touch()
        path.chmod(stat.S_IMODE(probe.stat().st_mode))
    finally:
        probe.unlink(missing_ok=True)
