"""Reading a run's metrics.jsonl, which every attempt appends to. Standard library only."""

import json
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl that stand: of a step that was run twice, the later attempt's.

    A line that is no row is dropped: half of one, as a kill leaves it.
    """
    if not path.is_file():
        return []
    rows: list[dict[str, Any]] = []
    for line in path.read_bytes().splitlines():
        try:
            row = json.loads(line.decode())
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
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
