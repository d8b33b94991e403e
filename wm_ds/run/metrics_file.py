"""Reading a run's metrics.jsonl, which every attempt appends to. Standard library only."""

import json
import os
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that stand: of a step that was run twice, the later attempt's.

    A line that is no row is dropped: half of one, as a kill leaves it.
    """
    if not path.is_file():
        return []
    rows = [row for line in path.read_bytes().splitlines() if (row := _row(line)) is not None]
    kept: list[dict[str, Any]] = []
    first_later: dict[Any, int] = {}
    for row in reversed(rows):
        # A row stands unless a later attempt passed its step again.
        attempt, step = row.get("attempt", 0), row.get("step", 0)
        later = [s for a, s in first_later.items() if a != attempt]
        if later and step >= min(later):
            continue
        first_later[attempt] = step
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
