"""A run's settings as plain dictionaries, as they would be read from its file; small ones."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def with_changes(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with other values: `optim__lr=1` is the key optim.lr."""
    raw = copy.deepcopy(settings)
    for key, value in changes.items():
        *path, last = key.split("__")
        at = raw
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return raw


def trainable(data: Path, **changes: Any) -> dict[str, Any]:
    """A run of seconds: 8 steps of 12 rows in micro-batches of 3, saved and evaluated every 2 steps."""
    settings = {
        "run": {"dir": "", "seed": 3, "timeout_minutes": 1.0},
        "model": MODEL | {"num_kv_channels": 2, "num_groups": 4},
        "data": {"train": str(data)},
        "batch": {"global_batch": 12, "micro_batch": 3},
        "optim": {"lr": 3e-3, "ns_dtype": "float32"},
        "precision": "fp32",
        "deepspeed": str(ROOT / "ds_configs/zero2.json"),
        "steps": 8,
        "checkpoint": {"every": 2, "keep_last": 10},
        "evaluate": {"every": 2, "sequences": 4},
        "log": {"every": 1, "details_every": 100, "tensorboard": False},
    }
    return with_changes(settings, **changes)


def repeatable(data: Path, **changes: Any) -> dict[str, Any]:
    """A run of seconds whose every number comes again: steps of 4 rows in micro-batches of 2."""
    settings = {
        "run": {"dir": "", "deterministic": True},
        "model": MODEL | {"vocab_size": 320, "num_groups": 4},
        "data": {"train": str(data)},
        "batch": {"global_batch": 4, "micro_batch": 2},
        "optim": {"lr": 1e-2, "warmup": 1, "schedule": "constant"},
        "precision": "fp32",
        "checkpoint": {"keep_last": 10},
        "evaluate": {"every": None, "sequences": 2, "double_passes": False},
        "log": {"tensorboard": False},
    }
    return with_changes(settings, **changes)
