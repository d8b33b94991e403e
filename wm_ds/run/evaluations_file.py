"""The files of downstream tasks on the way (`evaluate.tasks`). Standard library only.

RUN/evaluations.jsonl              a row an evaluation: step, tasks (task -> metric -> value), checkpoint,
                                   seconds; or step and error
RUN/evaluations/wanted.json        the checkpoint that is to be evaluated next; a newer one takes its place
RUN/evaluations/running.json       the one that is being evaluated
RUN/evaluations/log.txt            what the evaluating process said
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROWS, FOLDER = "evaluations.jsonl", "evaluations"
WANTED, RUNNING = f"{FOLDER}/wanted.json", f"{FOLDER}/running.json"


def read_evaluations(run_dir: str | Path) -> list[dict[str, Any]]:
    """The rows that stand, by step; of two for one step, the later one. Half lines are left out.

    A row {"rollback", "to"}, without a step, says that the run went back: rows of later steps before it are
    void.
    """
    try:
        lines = (Path(run_dir) / ROWS).read_bytes().splitlines()
    except OSError:
        return []
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        try:
            row = json.loads(line.decode())
        except ValueError:
            continue
        if not isinstance(row, dict):
            continue
        if isinstance(row.get("to"), int):
            found = {step: kept for step, kept in found.items() if step <= row["to"]}
        elif type(row.get("step")) is int:
            found[row["step"]] = row
    return [found[step] for step in sorted(found)]


def append_row(run_dir: str | Path, row: dict[str, Any]) -> None:
    """Add a row, in one write. Raises OSError."""
    with open(Path(run_dir) / ROWS, "ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\n")


def read_request(path: Path) -> dict[str, Any] | None:
    """What wanted.json or running.json says; None where there is none, or it is damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and type(found.get("step")) is int else None
