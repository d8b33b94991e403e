"""The run directory: what it is made with, and whether a later start means the same run."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from wm_ds.config import load as configuration
from wm_ds.config.schema import Config, ConfigError, Source
from wm_ds.distributed.process_group import World
from wm_ds.files import write_atomically, write_json
from wm_ds.run.ancestry import HISTORY

# What makes a run the run that it is: a start that differs here would continue something else.
IDENTITY = ("model", "run.seed", "run.branch_from", "batch.global_batch")
# What of these a branch may choose for itself: how the passes run, which no weight depends on.
OF_A_BRANCH = (
    "run.branch_from",
    *(f"model.{name}" for name in ("schedule", "chunk_size", "relaxation", "num_groups", "attention")),
    *(f"model.{name}" for name in ("no_grad_passes", "grad_passes", "prefill_passes", "prefill_groups")),
)
# What only says where and how often, and may change without a word. The data is compared by its content.
QUIET = ("run.dir", "run.timeout_minutes", "run.time_limit_minutes", "log", "checkpoint", "evaluate", "data")
CONFIG = "config.yaml"

# The content of the packed data at a path, as a checksum; None where there is none.
Content = Callable[[str], str | None]


def check(config: Config, content: Content) -> list[str]:
    """Check that the run's directory is new or holds this run; changes nothing. Rank 0 only.

    Returns what changed since the last start, one line each. Raises ConfigError naming what differs where the
    directory holds another run, or is not one of ours.
    """
    folder = Path(config.run.dir)
    before = recorded(folder)
    if before is None:
        if folder.exists() and any(_is_foreign(path) for path in folder.iterdir()):
            raise ConfigError(
                f"{folder} exists and is no run directory (no config.yaml): give another run.dir"
            )
        return []
    fatal, notes = _compare(before, config, IDENTITY)
    fatal += _other_data(before, config, history(folder), content)
    if fatal:
        raise ConfigError(
            f"{folder} holds another run: {'; '.join(fatal)}; give another run.dir, or remove the directory"
        )
    return notes


def check_branch(ancestor: Path, config: Config, content: Content) -> list[str]:
    """Check that a run can begin with a checkpoint of the run in `ancestor`; changes nothing. Rank 0 only.

    Returns what the branch does otherwise, one line each. Raises ConfigError naming what differs where it is
    another model, or another order of the data.
    """
    before = recorded(ancestor)
    if before is None:
        raise ConfigError(
            f"run.branch_from = {config.run.branch_from}: {ancestor} is no run directory (no {CONFIG})"
        )
    fatal, notes = _compare(before, config, IDENTITY, OF_A_BRANCH)
    fatal += _other_data(before, config, history(ancestor), content)
    if fatal:
        raise ConfigError(
            f"run.branch_from = {config.run.branch_from}: {'; '.join(fatal)}; a branch has the model, the "
            "seed and the data of the run that it begins with"
        )
    return notes


def _compare(
    before: Config, config: Config, fixed: tuple[str, ...], free: tuple[str, ...] = ()
) -> tuple[list[str], list[str]]:
    """What differs and must not, and what differs and is worth a line, each in words."""
    fatal, notes = [], []
    for key, old, new in _differences(before.model_dump(mode="json"), config.model_dump(mode="json")):
        if key == "run.branch_from" and _same_point(before, config):
            continue
        if _under(key, fixed) and not _under(key, free):
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
    return not path.name.startswith((".", "attempts", "logs"))


def _other_data(before: Config, config: Config, known: dict[str, Any], content: Content) -> list[str]:
    """Training data that is not what the run was trained on so far, by content, each in words."""
    old, new = before.data.sources(), config.data.sources()
    if [s.weight for s in old] != [s.weight for s in new]:
        return [f"data.train is {_shown(old)} there and {_shown(new)} here"]
    found = []
    # A run from before contents were recorded: what lies at its paths now is all that can be known.
    contents = known.get("data") or [content(source.path) for source in old]
    for source, there, here in zip(old, contents, new, strict=True):
        if there is None and os.path.realpath(source.path) == os.path.realpath(here.path):
            continue
        if there != content(here.path):
            again = f" (from {source.path})" if source.path != here.path else " (it was packed again since)"
            found.append(
                f"data.train: {here.path} holds other rows than the run was trained on so far{again}"
            )
    return found


def _shown(sources: list[Source]) -> str:
    return ", ".join(f"{source.path} x {source.weight:g}" for source in sources)


def recorded(folder: str | Path) -> Config | None:
    """The run's configuration at its last start, None for a directory that is no run's."""
    known = Path(folder) / CONFIG
    return configuration.load_record(known) if known.is_file() else None


def history(folder: str | Path) -> dict[str, Any]:
    """What the run was trained with so far: `data`, the contents of its sources, `rates`, its learning-rate
    schedules, each with the step `from` which it held, and `ancestry`, the runs that it descends from
    (ancestry.py). Empty where nothing is recorded."""
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
