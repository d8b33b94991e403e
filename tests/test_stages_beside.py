"""Stages beside what else a run may have: each gives the run that plain training on one rank gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import toy_corpus
from tests.support.checkpoint_launch import step, train_run
from tests.support.settings import ROOT, trainable
from wm_ds import trained
from wm_ds.checkpoint.format import load_weights
from wm_ds.export.holdout import check_holdout
from wm_ds.run.metrics_file import read_metrics

pytestmark = [pytest.mark.alone, pytest.mark.slow]

FROZEN = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict[str, Any]:
    """Two steps from the embedding, two from a layerwise start with frozen embeddings."""
    data = toy_corpus.packed(tmp_path_factory.mktemp("data"), 100, "--seq-len", 32, "--holdout", 4)
    return trainable(
        data,
        stages=[{"until": 2}, {"passes": {"start": "layerwise", "grad_passes": 1}, "freeze": ["*embed*"]}],
        steps=4,
        model__num_attention_heads=4,
        model__num_key_value_heads=2,
        model__head_dim=8,
        batch={"global_batch": 4, "micro_batch": 2},
        evaluate__every=None,
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory, config) -> Path:
    base = tmp_path_factory.mktemp("plain")
    train_run(base, config, "run", 1)
    return base / "run"


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def weights(run: Path, number: int) -> dict[str, torch.Tensor]:
    return dict(load_weights(step(run, number)))


def test_a_layerwise_stage_is_what_its_checkpoint_says_and_starts_from(plain):
    for number, start in ((2, "embedding"), (4, "layerwise")):
        found = trained.find(plain, number)
        assert found.hf_config().start == start
        assert check_holdout(found, torch.float32) is not None
    assert torch.equal(weights(plain, 2)[FROZEN], weights(plain, 4)[FROZEN])


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, [f"deepspeed={ROOT}/ds_configs/zero2_offload.json"]),
        (2, ["sequence_parallel=2"]),
    ],
    ids=["offload", "sequence parallel"],
)
def test_stages_are_the_same_beside(tmp_path, config, plain, world, settings):
    train_run(tmp_path, config, "run", world, *settings, timeout_s=200)
    assert losses(tmp_path / "run") == pytest.approx(losses(plain), rel=2e-5)
    found, wanted = weights(tmp_path / "run", 4), weights(plain, 4)
    assert torch.equal(found[FROZEN], weights(tmp_path / "run", 2)[FROZEN])
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4, msg=name)
