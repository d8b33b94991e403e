"""Common to a run's two files, its YAML and DeepSpeed's JSON: how they are read, and misspelt keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from wm_ds.config.schema import ConfigError


def read_text(path: str | Path) -> str:
    """The text of a file, UTF-8. Raises ConfigError in one line that names it."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, FileNotFoundError) and not Path(path).is_absolute():
            reason += (
                f" in {Path.cwd()}, from where relative paths are taken: start in the repository's folder, "
                "or give an absolute path"
            )
        raise ConfigError(f"{path}: {reason}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a text file (byte {error.start} is no UTF-8)") from None


def nearest(name: str, known: Iterable[str], prefix: str = "", allowed: Iterable[str] | None = None) -> str:
    """`; did you mean X?` with the most similar known name, or else all names, or those `allowed`."""
    known = list(known)
    match = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if match:
        return f"; did you mean {prefix}{match[0]}?"
    what, names = ("known", known) if allowed is None else ("allowed", allowed)
    return f"; {what} here: {', '.join(sorted(names))}"
