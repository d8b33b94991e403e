"""`run.deterministic`: two runs of the trainer on two ranks are equal bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import toy_corpus
from tests.support.checkpoint_launch import train_run
from wm_ds.checkpoint.manager import load_weights

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
STEPS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_corpus.packed(tmp_path_factory.mktemp("data"), 200, "--seq-len", 24, "--holdout", 4)


def train(folder: Path, data: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """(rows of metrics, final weights) of a run in bf16 autocast, with accumulation and recomputation."""
    raw = {
        "run": {"deterministic": True, "timeout_minutes": 2.0},
        "model": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_groups": 4,
        },
        "data": {"train": str(data)},
        "batch": {"global_batch": 8, "micro_batch": 2},
        "optim": {"lr": 1e-2, "warmup": 2, "clip": 0.5},
        "recompute": "group",
        "deepspeed": str(ROOT / "ds_configs/zero3.json"),
        "steps": STEPS,
        "evaluate": {"every": 2, "sequences": 4},
        "log": {"details_every": 2, "tensorboard": False},
    }
    folder.mkdir()
    train_run(folder, raw, "run", 2, timeout_s=300)
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    weights = dict(load_weights(folder / "run" / "checkpoints" / f"step_{STEPS:08d}"))
    return rows, weights


def computed(rows: list[dict[str, Any]]) -> list[tuple]:
    """What a run computed, without what it took."""
    same = ("step", "loss", "grad_norm", "lr", "tokens", "residuals", "router_entropy", "holdout_loss")
    return [tuple(row.get(name) for name in same) for row in rows]


def test_two_runs_on_two_ranks_are_equal_bit_for_bit(tmp_path, data):
    (rows, weights), (again, weights_again) = (train(tmp_path / name, data) for name in ("one", "two"))
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert len({row["loss"] for row in steps}) == len({row["grad_norm"] for row in steps}) == STEPS
    assert computed(rows) == computed(again)
    assert weights.keys() == weights_again.keys()
    for name, weight in weights.items():
        assert torch.equal(weight.view(torch.int32), weights_again[name].view(torch.int32)), name
