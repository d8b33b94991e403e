"""The run directory: what it is made with, and whether a later start means the same run."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from wm_ds.config import load as configuration
from wm_ds.config.schema import Config, ConfigError
from wm_ds.distributed.process_group import World
from wm_ds.files import write_atomically, write_json

# What makes a run the run that it is: a start that differs here would continue something else.
IDENTITY = ("model", "data.train", "run.seed", "batch.global_batch")
# What only says where and how often, and may change without a word.
QUIET = ("run.dir", "run.timeout_minutes", "run.time_limit_minutes", "log", "checkpoint", "evaluate")


def prepare(config: Config, deepspeed: dict[str, Any], world: World) -> list[str]:
    """Create the run's directory, or check that the one there holds this run; rank 0 only.

    Returns what changed since the last start, one line each. Raises ConfigError naming what differs where the
    directory holds another run, or is not one of ours.
    """
    folder = Path(config.run.dir)
    notes: list[str] = []
    known = folder / "config.yaml"
    if known.is_file():
        before = configuration.load(known)
        changes = _differences(before.model_dump(mode="json"), config.model_dump(mode="json"))
        fatal = [c for c in changes if _under(c[0], IDENTITY)]
        if fatal:
            raise ConfigError(
                f"{folder} holds another run: "
                + "; ".join(f"{key} is {old!r} there and {new!r} here" for key, old, new in fatal)
                + "; give another run.dir, or remove the directory"
            )
        notes = [f"{k}: {old!r} -> {new!r}" for k, old, new in changes if not _under(k, QUIET)]
    elif folder.exists() and any(not p.name.startswith((".", "attempts", "logs")) for p in folder.iterdir()):
        raise ConfigError(f"{folder} exists and is no run directory (no config.yaml): give another run.dir")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(known, configuration.dump(config))
        write_json(folder / "ds_config.json", deepspeed, indent=2)
        write_json(folder / "environment.json", environment(world), indent=2)
    except OSError as error:
        raise ConfigError(f"run.dir = {folder} cannot be written: {error.strerror}") from None
    return notes


def environment(world: World) -> dict[str, Any]:
    """Versions, machine and code state, for the record."""
    packages = {}
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
