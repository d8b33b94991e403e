"""Which runs a run descends from: it began with a checkpoint of another one, and that one perhaps, too.

RUN/history.json has the chain under `ancestry`, oldest first. Standard library only: tools that draw curves
read it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HISTORY = "history.json"


@dataclass(frozen=True)
class Ancestor:
    """A run, and the step of it that its descendant began with."""

    run: str
    step: int


def chain(run_dir: str | Path) -> list[Ancestor]:
    """The ancestors of the run in this directory, oldest first; none where none are recorded."""
    try:
        known = json.loads((Path(run_dir) / HISTORY).read_text())
        return [Ancestor(str(one["run"]), int(one["step"])) for one in known.get("ancestry", [])]
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return []


def descended(run_dir: str | Path, step: int) -> list[dict[str, Any]]:
    """The `ancestry` of a run that begins with `step` of the run in `run_dir`, for its history."""
    own = Ancestor(os.path.realpath(run_dir), step)
    return [asdict(one) for one in (*chain(run_dir), own)]


def located(ancestor: Ancestor, descendant: str | Path) -> Path:
    """The ancestor's directory: where it was, or, if runs were moved together, beside its descendant."""
    there = Path(ancestor.run)
    beside = Path(os.path.realpath(descendant)).parent / there.name
    return beside if not there.is_dir() and beside.is_dir() else there
