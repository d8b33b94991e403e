"""The closed form against the paper's unit of work and against counting on the model as built."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config

from tools import count_flops
from wm_ds.families import build_model
from wm_ds.model import CLAConfig, FusedKVConfig, LCKVConfig, WhiteMatterConfig, YOCOConfig
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


@pytest.mark.parametrize(("k", "pool"), [(16, 24), (8, 12)])
@pytest.mark.parametrize("grad", [False, True])
def test_a_layerwise_start_in_units(k, pool, grad):
    """0 + 1 passes behind it. A channel is two routers of L rows and S' + 1 blocks of D columns, S' of
    the S = 8 sources known; two mixtures of L states; two projections."""
    config = WhiteMatterConfig(
        **PAPER,
        num_kv_channels=k,
        no_grad_passes=0,
        grad_passes=1,
        start="layerwise",
        start_grad=grad,
    )
    known = [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]  # of layers 1, 3, … 15, before each of 15 layers
    channels = sum(2 * (2 * 16 * (s + 1) * 512 + 2 * 16 * 512 + 2 * 288 * 512) for s in known) / UNIT
    assert 15 * 1 < channels < 15 * 24 / 16, "less than a sixteenth of k = 16's pool before every layer"
    units = 15 * 14 + channels + 16 * 14 + 1.875 * pool
    units += 16 * 30 + 2 * 1.875 * pool + grad * (15 * 30 + 2 * channels)
    found = training(config, 2048)
    assert found.model == pytest.approx(units * UNIT + HEAD, rel=1e-12)
    if not grad:
        assert found.model < 1.43 * (16 * 47 * UNIT) + HEAD, "1.33 and 1.42 times vanilla"


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


SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    "config",
    [
        WhiteMatterConfig(**SMALL, num_hidden_layers=3, num_kv_channels=2, router_stride=2, num_groups=4),
        WhiteMatterConfig(**SMALL, num_hidden_layers=3, num_kv_channels=1, num_groups=4, routing="softmax"),
        WhiteMatterConfig(
            **SMALL, num_hidden_layers=4, num_kv_channels=4, router_stride=3, feedback=False,
            no_grad_passes=0, grad_passes=1,
        ),
        LCKVConfig(**SMALL, num_hidden_layers=6, warmup_layers=3),
        CLAConfig(**SMALL, num_hidden_layers=4),
        YOCOConfig(**SMALL, num_hidden_layers=4, own_kv_layers=1),
        FusedKVConfig(**SMALL, num_hidden_layers=4),
        Qwen3Config(**SMALL, num_hidden_layers=3),
    ],
    ids=["whitematter", "softmax", "no feedback", "lckv", "cla", "yoco", "fusedkv", "vanilla"],
)  # fmt: skip
def test_the_closed_form_is_what_is_counted_on_the_model(config):
    """Forward and backward on meta tensors, every product by torch's formulas, without the head."""
    length = 32
    with torch.device("meta"):
        lm = build_model(config, seed=0)
    counted = sum(count_flops.train(lm, length)) / length
    head = 6 * config.hidden_size * config.vocab_size
    assert training(config, length).model - head == pytest.approx(counted, rel=1e-9)
