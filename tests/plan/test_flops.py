"""The closed form against the paper's unit of work and against counting on the model as built."""

from __future__ import annotations

import pytest
from transformers import Qwen3Config

from wm_ds.model import CLAConfig, FusedKVConfig, WhiteMatterConfig, YOCOConfig
from wm_ds.plan.flops import training

UNIT = 589_824  # FLOPs: at these sizes a block is 10 units of products and 4 of causal attention
PAPER = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 16,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 96,
}
HEAD = 6 * 512 * 1000


@pytest.mark.parametrize(("k", "pool"), [(16, 24), (8, 12)])
def test_whitematter_training_in_units(k, pool):
    found = training(WhiteMatterConfig(**PAPER, num_kv_channels=k, router_stride=2), 2048)
    # Nobody reads the start's entries of the last eight tokens.
    units = 46 * 14 + 31 * 30 + (3.875 - 8 / 2048 + 2 * 2.875) * pool
    assert found.model == pytest.approx(units * UNIT + HEAD, rel=1e-12)
    assert found.hardware == found.model


def test_vanilla_training_is_the_papers_number():
    found = training(Qwen3Config(**PAPER), 2048)
    assert (found.model - HEAD) / 1e9 == pytest.approx(0.444, abs=5e-4)


@pytest.mark.parametrize(
    ("config", "kvs"), [(CLAConfig(**PAPER), 8), (YOCOConfig(**PAPER), 9), (FusedKVConfig(**PAPER), 8)]
)
def test_shared_kv_is_projected_once(config, kvs):
    """A block is 10 products and 4 of attention; a KV one product."""
    found = training(config, 2048, "layer")
    assert found.model == pytest.approx((16 * (3 * 10 + 3.5 * 4) + 3 * kvs) * UNIT + HEAD, rel=1e-12)
    assert found.hardware - found.model == pytest.approx((16 * 14 + kvs) * UNIT)


def test_recomputation_adds_what_it_runs_again():
    config = WhiteMatterConfig(**PAPER, num_kv_channels=8, router_stride=2)
    costs = [training(config, 2048, r).hardware for r in ("none", "layer", "group", "group+layer")]
    assert costs == sorted(costs)
    assert (costs[1] - costs[0]) / UNIT == pytest.approx(31 * 14)
    assert (costs[2] - costs[1]) / UNIT == pytest.approx(15 * 14 + 3.875 * 12)
