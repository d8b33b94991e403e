"""The run directory: what it is made with, and whether a later start means the same run."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from wm_ds.config import load as configuration
from wm_ds.config.schema import PASSES, Config, ConfigError
from wm_ds.config.stages import Plan
from wm_ds.config.stages import plan as plan_of
from wm_ds.distributed.process_group import World
from wm_ds.files import write_atomically, write_json
from wm_ds.run.ancestry import HISTORY
from wm_ds.run.trained_with import OF_DATA, Content, Record, changes, refusals
from wm_ds.run.trained_with import record as record_of

# What makes a run the run that it is, at every step: a start that differs here would continue something else.
IDENTITY = ("model", "run.seed", "run.branch_from")
# What of these may change with a stage, and is compared for the steps that have been taken (trained_with.py).
STAGED = tuple(f"model.{name}" for name in PASSES)
# What of these a branch may choose for itself: how the passes run, which no weight depends on.
OF_A_BRANCH = ("run.branch_from", "model.attention", "model.prefill_passes", "model.prefill_groups")
# What only says where and how often, and may change without a word, or is said in other words.
QUIET = (
    *("run.dir", "run.timeout_minutes", "run.time_limit_minutes"),
    *("log", "checkpoint", "evaluate", "data", "stages", "watch", "profile"),
)
CONFIG = "config.yaml"


def check(plan: Plan, step: int, content: Content) -> list[str]:
    """Check that the run's directory is new or holds this run, at `step`; changes nothing. Rank 0 only.

    Returns what changed since the last start, one line each. Raises ConfigError naming what differs where the
    directory holds another run, where steps that it has taken would be others now, or where it is not one of
    ours.
    """
    config = plan.config
    folder = Path(config.run.dir)
    before = recorded(folder)
    if before is None:
        if folder.exists() and any(_is_foreign(path) for path in folder.iterdir()):
            raise ConfigError(
                f"{folder} exists and is no run directory (no config.yaml): give another run.dir"
            )
        return []
    fatal, notes = _compare(before, config)
    known, now = trained(folder, plan, content), record_of(plan, content)
    # A run that has begun has begun its first stage, whether or not a checkpoint has been saved.
    fatal += refusals(known, now, max(step, 1))
    if fatal:
        remedy = "give another run.dir, or remove the directory"
        if step > 0 and (plan.staged or before.stages):
            remedy = f"what is past stays as it was: change only what comes after step {step}, or {remedy}"
        raise ConfigError(f"{folder} holds another run: {'; '.join(fatal)}; {remedy}")
    return notes + [line for line in changes(known, now, step) if plan.staged or before.stages]


def check_branch(ancestor: Path, plan: Plan, step: int, content: Content) -> list[str]:
    """Check that a run can begin with the checkpoint of `step` of the run in `ancestor`; changes nothing.

    Returns what the branch does otherwise, one line each. Raises ConfigError naming what differs where it is
    another model, or where the steps up to the branch have had other data: its place in the data follows from
    them.
    """
    said = f"run.branch_from = {plan.config.run.branch_from}"
    before = recorded(ancestor)
    if before is None:
        raise ConfigError(f"{said}: {ancestor} is no run directory (no {CONFIG})")
    fatal, notes = _compare(before, plan.config, OF_A_BRANCH)
    known, now = trained(ancestor, plan, content), record_of(plan, content)
    fatal += refusals(known, now, step, OF_DATA)
    if fatal:
        raise ConfigError(
            f"{said}: {'; '.join(fatal)}; a branch has the model, the seed and, up to its first step, the "
            "data of the run that it begins with"
        )
    return notes + [line for line in changes(known, now, step) if plan.staged or before.stages]


def _compare(before: Config, config: Config, free: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
    """What differs and must not, and what differs and is worth a line, each in words."""
    fatal, notes = [], []
    for key, old, new in _differences(before.model_dump(mode="json"), config.model_dump(mode="json")):
        if key == "run.branch_from" and _same_point(before, config):
            continue
        if _under(key, IDENTITY) and not _under(key, (*STAGED, *free)):
            fatal.append(f"{key} is {old!r} there and {new!r} here")
        elif not _under(key, (*QUIET, "run.branch_from")):
            notes.append(f"{key}: {old!r} -> {new!r}")
    return fatal, notes


def _same_point(before: Config, config: Config) -> bool:
    """Whether both begin with the same checkpoint, however its path is written."""
    old, new = before.run.branch_point, config.run.branch_point
    if old is None or new is None:
        return old is new
    return old[1] == new[1] and os.path.realpath(old[0]) == os.path.realpath(new[0])


def _is_foreign(path: Path) -> bool:
    """Whether something in a folder without config.yaml is not what a start leaves that was not accepted."""
    if path.name == "checkpoints":
        return not path.is_dir() or any(path.iterdir())
    return not path.name.startswith((".", "attempts", "logs", "fetched"))


def recorded(folder: str | Path) -> Config | None:
    """The run's configuration at its last start, None for a directory that is no run's."""
    known = Path(folder) / CONFIG
    return configuration.load_record(known) if known.is_file() else None


def history(folder: str | Path) -> dict[str, Any]:
    """What the run was trained with so far: `stages`, as trained_with.py has them, of all its steps as they
    were planned last; `changes` of them, each with the attempt that made it; `data`, the contents of the
    run's own sources; `rates`, its learning-rate schedules, each with the step `from` which it held; and
    `ancestry`, the runs that it descends from (ancestry.py). Empty where nothing is recorded."""
    path = Path(folder) / HISTORY
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(
            f"{path} is damaged ({error}); remove it, and the run's config.yaml counts instead"
        ) from None
    return found if isinstance(found, dict) else {}


def trained(folder: str | Path, plan: Plan, content: Content) -> Record:
    """What the run in `folder` was trained with, and would have been, as of its last start; [] for no run.

    A run from before stages were recorded had one, as its configuration says.
    """
    known, before = history(folder), recorded(folder)
    if before is None:
        return []
    if "stages" in known:
        return known["stages"]
    return record_of(plan_of(before, plan.packed), content, known.get("data"))


def record(config: Config, deepspeed: dict[str, Any], world: World, known: dict[str, Any]) -> None:
    """Write down what the run is trained with from here on, once its start is accepted; rank 0 only.

    `known`: what `history` returns at the next start. Raises ConfigError where nothing can be written.
    """
    folder = Path(config.run.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / HISTORY, known, indent=1)
        write_atomically(folder / CONFIG, configuration.dump(config))
        write_json(folder / "ds_config.json", deepspeed, indent=2)
        write_json(folder / "environment.json", environment(world), indent=2)
    except OSError as error:
        raise ConfigError(f"run.dir = {folder} cannot be written: {error.strerror}") from None


def amend(folder: str | Path, **entries: Any) -> None:
    """Put entries into the run's history, on the disk before this returns; rank 0 only. Raises OSError."""
    write_json(Path(folder) / HISTORY, history(folder) | entries, indent=1)


def environment(world: World) -> dict[str, Any]:
    """Versions, machine and code state, for the record."""
    packages: dict[str, str | None] = {}
    for name in ("torch", "deepspeed", "transformers", "numpy", "safetensors", "tokenizers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    return {
        "python": sys.version.split()[0],
        "packages": packages,
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "device": str(world.device),
        "backend": world.backend,
        "world_size": world.size,
        "command": sys.argv,
        "code": _git_state(),
        "variables": {
            k: v for k, v in os.environ.items() if k.startswith(("SLURM_JOB", "NCCL_", "OMP_", "WM_"))
        },
    }


def _git_state() -> dict[str, Any] | None:
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10
        )
        status = subprocess.run(
            ["git", "-C", here, "status", "--porcelain"], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode:
        return None
    return {"commit": commit.stdout.strip(), "modified": bool(status.stdout.strip())}


def _differences(old: Any, new: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [d for k in keys for d in _differences(old.get(k), new.get(k), f"{path}.{k}" if path else k)]
    return [] if old == new else [(path, old, new)]


def _under(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == p or key.startswith(f"{p}.") for p in prefixes)
