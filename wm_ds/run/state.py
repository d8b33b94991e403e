"""The state of a run, told from its directory alone, while it trains or long after. Imports nothing heavy.

Nothing is asked of the run itself, of SLURM or of other machines, so this works on any file system that holds
the directory; what a node has written shows as late as the file system shows it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from wm_ds.errors import WmError, describe
from wm_ds.run.claim import Attempt, attempts, read_note
from wm_ds.run.metrics_file import tail

SILENT_S = 300.0
"""An attempt whose ranks have not shown themselves for so many seconds is not running any more. They touch a
file every few seconds; a network file system shows that up to a minute late."""
STATES = ("running", "stopped", "done", "failed", "stale", "new")
_STEP = re.compile(r"step_(\d+)")
# What is in a run, and never a run itself.
_INSIDE = {"checkpoints", "attempts", "tensorboard", "profiles", "export", "wandb", ".git", ".venv"}


class StateError(WmError):
    """A run's directory cannot be read."""


@dataclass(frozen=True)
class State:
    """What is known of a run.

    Attributes:
        path: its directory.
        state: running; stopped (gracefully; starts again where it was); done; failed (its last attempt ended
            with an error); stale (its last attempt ended without a word: killed, or its machine is gone);
            new (nothing has been started, or nothing has come of it yet).
        reason: of the end, in a few words.
        step, total: taken, and the run's length.
        loss: of the last step. tokens: seen so far. tokens_per_s: over the last steps.
        checkpoint: step of the newest one.
        attempts: how often the run was started.
        age_s: seconds since it last wrote anything.
    """

    path: str
    state: str
    reason: str | None = None
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    tokens: int | None = None
    tokens_per_s: float | None = None
    checkpoint: int | None = None
    attempts: int = 0
    age_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def is_run(folder: Path) -> bool:
    """Whether a run has lived in `folder`, or is about to."""
    if not (folder / "config.yaml").is_file():
        return False
    return any((folder / name).exists() for name in ("attempts", "history.json", "metrics.jsonl"))


def runs_below(folder: Path) -> Iterator[Path]:
    """The runs in `folder` and below it, in the order of their names. Links are not followed, hidden folders
    and what cannot be read are passed over; `folder` itself may be a run, or a link to one."""
    if is_run(folder):
        yield folder
        return
    try:
        inside = sorted(folder.iterdir())
    except OSError:
        return
    for path in inside:
        if path.name.startswith(".") or path.name in _INSIDE or path.is_symlink() or not path.is_dir():
            continue
        yield from runs_below(path)


def state_of(run_dir: Path, now: float | None = None) -> State:
    """The state of the run in `run_dir`. `now`: the time, in seconds of the clock that stamps files.

    Raises StateError where the directory cannot be read.
    """
    now = time.time() if now is None else now
    _check_record(run_dir / "config.yaml")
    started = attempts(run_dir)
    rows = tail(run_dir / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    last = steps[-1] if steps else {}
    state, reason = _state(run_dir, started, now)
    done = read_note(run_dir / state) if state in ("done", "stopped") else None
    step = last.get("step") if done is None else done.get("step", last.get("step"))
    return State(
        path=str(run_dir),
        state=state,
        reason=reason,
        step=step if isinstance(step, int) else None,
        total=_total(run_dir),
        loss=_number(last.get("loss")),
        tokens=last.get("tokens"),
        tokens_per_s=_number(last.get("tokens_per_s")),
        checkpoint=newest_checkpoint(run_dir),
        attempts=len(started),
        age_s=_age(run_dir, started, now),
    )


def _check_record(path: Path) -> None:
    """A directory that cannot be read, or whose record is damaged, is no new run."""
    try:
        said = yaml.load(path.read_bytes(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise StateError(describe(error)) from None
    except (yaml.YAMLError, ValueError):
        said = None
    if not isinstance(said, dict) or "model" not in said:
        raise StateError(f"{path} is damaged, or no run's")


def newest_checkpoint(run_dir: Path) -> int | None:
    """Step of the newest published checkpoint; None without one."""
    try:
        names = [path.name for path in (run_dir / "checkpoints").iterdir()]
    except OSError:
        return None
    return max((int(match[1]) for name in names if (match := _STEP.fullmatch(name))), default=None)


def _state(run_dir: Path, started: list[Attempt], now: float) -> tuple[str, str | None]:
    if not started:
        return "new", None
    newest = started[-1]
    end = read_note(newest.path("end"))
    if end is not None:
        return _ended(run_dir, newest, end)
    failure = newest.failure()
    if failure is not None:
        return "failed", _why(failure)
    seen = _stamp(newest.path("alive")) or _stamp(newest.path("json")) or 0.0
    if now - seen <= SILENT_S:
        return "running", None
    if read_note(run_dir / "done") is not None:
        return "done", None
    return "stale", "its last attempt ended without a word"


def _ended(run_dir: Path, newest: Attempt, end: dict[str, Any]) -> tuple[str, str | None]:
    result = end.get("result")
    if result == "done":
        return "done", None
    if result == "stopped":
        return "stopped", end.get("reason")
    return "failed", _why((newest.failure() or {}) | end)


def _why(what: dict[str, Any]) -> str:
    words = [f"at step {what['step']}"] if what.get("step") is not None else []
    text = next((str(what[key]) for key in ("error", "reason") if what.get(key)), None)
    if text is None and what.get("exit_code") is not None:
        kind = f"{what['kind']}, " if what.get("kind") else ""
        text = f"{kind}exit code {what['exit_code']}"
    return ": ".join([*words, text] if text else words) or "see its log"


def _total(run_dir: Path) -> int | None:
    """The run's length in steps, as its record has it."""
    try:
        last = json.loads((run_dir / "history.json").read_text())["stages"][-1]["last"]
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    return last if isinstance(last, int) else None


def _age(run_dir: Path, started: list[Attempt], now: float) -> float | None:
    paths = [run_dir / "metrics.jsonl", run_dir / "config.yaml"]
    paths += [started[-1].path(name) for name in ("json", "alive", "end")] if started else []
    stamps = [stamp for path in paths if (stamp := _stamp(path)) is not None]
    return max(0.0, now - max(stamps)) if stamps else None


def _stamp(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
