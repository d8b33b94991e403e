"""A tiny sweep on toy data, as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import toy_corpus

BASE: dict[str, Any] = {
    "run": {"dir": "unused"},
    "model": {
        "family": "vanilla",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    },
    "batch": {"global_batch": 4, "micro_batch": 4},
    "optim": {"lr": 1e-2, "warmup": 1},
    "precision": "fp32",
    "deepspeed": "ds_configs/zero0.json",
    "steps": 4,
    "evaluate": {"every": None, "sequences": 2, "double_passes": False},
    "checkpoint": {"every": 2, "keep_last": 1},
    "log": {"tensorboard": False},
}
POOL = {"model.family": "whitematter", "model.num_kv_channels": 1, "model.num_groups": 2}
MEASURE = {"sequences": 4, "some": 4, "passes": 2, "converge_sequences": 2, "converge_passes": 4, "batch": 4}


@pytest.fixture(scope="session")
def toy_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24-token rows, eight of them held out."""
    return toy_corpus.packed(tmp_path_factory.mktemp("sweep-data"), 120, "--seq-len", 24, "--holdout", 8)


@pytest.fixture
def write(tmp_path: Path, toy_data: Path) -> Callable[..., Path]:
    """Writes base.yaml and sweep.yaml; returns the sweep's path. Arguments replace parts of the sweep."""
    return lambda **changes: write_sweep(tmp_path, toy_data, **changes)


def write_sweep(folder: Path, data: Path, base: Any = None, **changes: Any) -> Path:
    """The two files in `folder`; `base` replaces sections or keys of the base, or is another file's name."""
    run = {**BASE, "data": {"train": str(data)}, **(base if isinstance(base, dict) else {})}
    (folder / "base.yaml").write_text(yaml.safe_dump(run, sort_keys=False))
    sweep = {
        "title": "a toy",
        "base": base if isinstance(base, str) else str(folder / "base.yaml"),
        "runs": str(folder / "runs"),
        "results": str(folder / "results" / "toy.json"),
        "seeds": [0],
        "arms": {"vanilla": {}, "pool": {"set": POOL}},
        "measure": MEASURE,
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({**sweep, **changes}, sort_keys=False))
    return path
