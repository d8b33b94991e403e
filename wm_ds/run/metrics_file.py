"""Reading a run's metrics.jsonl, which every attempt appends to. Standard library only."""

import json
import os
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that stand: of a step that was run twice, those of the later time.

    A step is run twice by a later attempt, or after a rollback (a row `rollback`, whose step is the one that
    the run went back to). A line that is no row is dropped: half of one, as a kill leaves it.
    """
    if not path.is_file():
        return []
    rows = [row for line in path.read_bytes().splitlines() if (row := _row(line)) is not None]
    kept: list[dict[str, Any]] = []
    first_later: dict[Any, int] = {}
    went_back = 0  # how often after the row at hand
    for row in reversed(rows):
        # A row stands unless a later attempt passed its step again, or this one did after a rollback.
        stretch, step = (row.get("attempt", 0), went_back), row.get("step", 0)
        later = [s for other, s in first_later.items() if other != stretch]
        void = bool(later) and step >= min(later)
        if "rollback" in row:
            went_back += 1
            step += 1  # the first that is taken again
        if not void:
            first_later[stretch] = min(step, first_later.get(stretch, step))
            kept.append(row)
    return kept[::-1]


def tail(path: Path, size: int = 8192) -> list[dict[str, Any]]:
    """The rows in the last `size` bytes of a metrics.jsonl that is being written; none without one."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            lines = file.read().splitlines()
    except OSError:
        return []
    return [row for line in lines if (row := _row(line)) is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    """A line's row; None for half a line and for what is no row."""
    try:
        row = json.loads(line.decode())
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
