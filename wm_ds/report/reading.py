"""What the report shows of a run, read from its directory: rows, state, settings, attempts, scores, samples.
Its series and borders are also those of tools/plot_run.py.

Nothing is asked of the run itself, so a run may be at work meanwhile. What is missing is empty; what is
damaged is left out line by line.
"""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from wm_ds.errors import WmError, describe
from wm_ds.run.claim import attempts, read_note
from wm_ds.run.evaluations_file import read_evaluations
from wm_ds.run.metrics_file import read_metrics
from wm_ds.run.state import State, state_of

Rows = list[dict[str, Any]]
Point = tuple[float, float]
SAMPLES = "samples.jsonl"


class ReportError(WmError):
    """A folder that is no run, or that cannot be read."""


@dataclass(frozen=True)
class Run:
    """A run, as the page shows it.

    Attributes:
        name: unique on the page.
        rows: metrics.jsonl without what was taken again (run/metrics_file.py).
        settings: the resolved configuration as `section.key: value`.
        attempts: one object a start: number, when, where, and how it ended.
        evaluations: rows of downstream scores, by step. samples: rows of generated texts, by step.
    """

    name: str
    path: Path
    state: State
    rows: Rows
    settings: dict[str, Any]
    attempts: Rows
    evaluations: Rows
    samples: Rows

    @cached_property
    def steps(self) -> Rows:
        """The rows of training steps."""
        return [row for row in self.rows if "loss" in row]


def read_runs(folders: list[Path]) -> list[Run]:
    """All runs, with names that tell them apart. Raises ReportError, naming the folder, for what is none."""
    short = [os.path.basename(os.path.realpath(folder)) for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    if len(set(names)) < len(names):
        raise ReportError(f"{next(n for n in names if names.count(n) > 1)} is named twice")
    return [read_run(folder, name) for folder, name in zip(folders, names, strict=True)]


def read_run(folder: Path, name: str) -> Run:
    """One run. Raises ReportError where the folder is none, or cannot be read."""
    if not folder.is_dir():
        raise ReportError(f"{folder} is no run: there is no such folder")
    if not (folder / "config.yaml").is_file():
        raise ReportError(f"{folder} is no run: it has no config.yaml")
    try:
        return Run(
            name=name,
            path=folder,
            state=state_of(folder),
            rows=read_metrics(folder / "metrics.jsonl"),
            settings=flat(yaml.safe_load((folder / "config.yaml").read_bytes())),
            attempts=_attempts(folder),
            evaluations=read_evaluations(folder),
            samples=_latest(folder / SAMPLES),
        )
    except OSError as error:
        raise ReportError(describe(error)) from None


def flat(said: Any, before: str = "") -> dict[str, Any]:
    """A nested mapping as `section.key: value`; lists are values."""
    found: dict[str, Any] = {}
    for key, value in said.items():
        name = f"{before}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def differences(runs: list[Run]) -> dict[str, list[Any]]:
    """The settings in which runs differ, with each run's value (None where it has no such key)."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = {key: [run.settings.get(key) for run in runs] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row[1:])}


def series(rows: Rows, key: str, x: str = "step") -> list[Point]:
    """(x, value) where both are finite numbers."""
    found = [(row.get(x), row.get(key)) for row in rows]
    return [(float(a), float(b)) for a, b in found if _is_number(a) and _is_number(b)]


def nested(rows: Rows, key: str, x: str = "step") -> dict[str, list[Point]]:
    """One series for each entry of a list of numbers: `1`, `2`, …"""
    found: dict[str, list[Point]] = {}
    for row in rows:
        values = row.get(key)
        for number, value in enumerate(values if isinstance(values, list) else [], start=1):
            if _is_number(value) and _is_number(row.get(x)):
                found.setdefault(str(number), []).append((float(row[x]), float(value)))
    return found


def scores(run: Run) -> dict[str, list[Point]]:
    """Downstream scores, one series for each task and metric (errors of measurement left out)."""
    found: dict[str, list[Point]] = {}
    for row in run.evaluations:
        tasks = row.get("tasks")
        for task, metrics in (tasks if isinstance(tasks, dict) else {}).items():
            for metric, value in (metrics if isinstance(metrics, dict) else {}).items():
                if _is_number(value) and "stderr" not in metric:
                    found.setdefault(f"{task}, {metric}", []).append((float(row["step"]), float(value)))
    return found


def borders(rows: Rows, x: str = "step") -> list[float]:
    """Where stages end: the last steps of those that are over."""
    return _before_changes(rows, "stage", 0, x)


def resumes(rows: Rows, x: str = "step") -> list[float]:
    """The steps after which another attempt took over."""
    return _before_changes(rows, "attempt", None, x)


def _before_changes(rows: Rows, key: str, default: Any, x: str) -> list[float]:
    steps = [row for row in rows if "loss" in row and _is_number(row.get(x))]
    return [float(a[x]) for a, b in pairwise(steps) if a.get(key, default) != b.get(key, default)]


def _attempts(folder: Path) -> Rows:
    found = []
    for attempt in attempts(folder):
        claim, end = read_note(attempt.path("json")) or {}, read_note(attempt.path("end")) or {}
        failure = attempt.failure() or {}
        result = end.get("result") or ("failed" if failure else None)
        why = [failure.get("error") or failure.get("kind"), end.get("reason")]
        step = end.get("step", failure.get("step"))
        found.append(
            {
                "number": attempt.number,
                "time": claim.get("time"),
                "where": claim.get("nodes") or claim.get("host"),
                "job": claim.get("job"),
                "result": result,
                "step": step,
                "reason": "; ".join(str(w) for w in why if w) or None,
            }
        )
    return found


def _latest(path: Path) -> Rows:
    """The rows of a file of JSON lines that have a step, by step; of two for one step, the later one."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found: dict[float, dict[str, Any]] = {}
    for line in lines:
        try:
            row = json.loads(line.decode())
        except ValueError:
            continue
        if isinstance(row, dict) and _is_number(row.get("step")):
            found[row["step"]] = row
    return [found[step] for step in sorted(found)]


def _is_number(value: object) -> TypeGuard[int | float]:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def natural(text: str) -> list[Any]:
    """A key that sorts numbers in names by value."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]
