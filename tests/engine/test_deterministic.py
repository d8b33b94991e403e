"""`run.deterministic`: two runs of the trainer on two ranks are equal bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import toy_corpus
from tests.support.checkpoint_launch import metric_rows, step, train_run
from tests.support.settings import ROOT, trainable
from wm_ds.checkpoint.manager import load_weights

pytestmark = pytest.mark.alone

STEPS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_corpus.packed(tmp_path_factory.mktemp("data"), 200, "--seq-len", 24, "--holdout", 4)


def train(folder: Path, data: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """(rows of metrics, final weights) of a run in bf16 autocast, with accumulation and recomputation."""
    raw = trainable(
        data,
        run={"deterministic": True, "timeout_minutes": 2.0},
        batch={"global_batch": 8, "micro_batch": 2},
        optim={"lr": 1e-2, "warmup": 2, "clip": 0.5},
        precision="autocast",
        recompute="group",
        deepspeed=f"{ROOT}/ds_configs/zero3.json",
        steps=STEPS,
        log__details_every=2,
    )
    folder.mkdir()
    train_run(folder, raw, "run", 2, timeout_s=300)
    return metric_rows(folder / "run"), dict(load_weights(step(folder / "run", STEPS)))


def computed(rows: list[dict[str, Any]]) -> list[tuple]:
    """What a run computed, without what it took."""
    same = ("step", "loss", "grad_norm", "lr", "tokens", "residuals", "router_entropy", "holdout_loss")
    return [tuple(row.get(name) for name in same) for row in rows]


@pytest.mark.long
def test_two_runs_on_two_ranks_are_equal_bit_for_bit(tmp_path, data):
    (rows, weights), (again, weights_again) = (train(tmp_path / name, data) for name in ("one", "two"))
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert len({row["loss"] for row in steps}) == len({row["grad_norm"] for row in steps}) == STEPS
    assert computed(rows) == computed(again)
    assert weights.keys() == weights_again.keys()
    for name, weight in weights.items():
        assert torch.equal(weight.view(torch.int32), weights_again[name].view(torch.int32)), name
