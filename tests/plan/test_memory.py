"""The planner's states and traffic against sums by hand."""

from __future__ import annotations

import pytest

from tests.plan.test_storage_tracker import whitematter
from tests.support.settings import MODEL
from wm_ds.config import load as configuration
from wm_ds.model import WhiteMatterConfig
from wm_ds.optim.param_rules import parameter_table
from wm_ds.plan.activations import Body, body
from wm_ds.plan.memory import GIB, plan
from wm_ds.plan.way import Run, Way


def run(**more: object) -> configuration.Config:
    model = MODEL | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    raw = {
        "run": {"dir": "unused"},
        "model": model,
        "data": {"train": "unused"},
        "batch": {"global_batch": 64, "micro_batch": 1},
        "optim": {"lr": 1e-3, "clip_rule": "global"},
        "precision": "bf16",
        "steps": 10,
    }
    return configuration.parse(raw | more)


def planned(stage: int, entries_on_host: bool = False, optim: dict | None = None, **more: object):
    """The plan of a way to run on 8 GPUs, and the model's parameters."""
    lm = whitematter((2, 64, 64), 2)
    rows = parameter_table([(n, tuple(p.shape)) for n, p in lm.named_parameters()])
    config = run(entries_on_host=entries_on_host, **({"optim": optim} if optim else {}))
    settings = {"gather": "step" if stage == 3 else None, "recompute": "group", "micro_batch": 2}
    way = Way(Run(config, lm.config, rows, 64, 8), stage, **(settings | more))
    return plan(way, Body(5e6, 2e7, 1e7, 3e6)), sum(p.numel() for p in lm.parameters())


def test_entries_on_the_host_leave_the_gpu() -> None:
    here, _ = planned(2)
    there, _ = planned(2, entries_on_host=True)
    assert here.parts["pool"] - there.parts["pool"] == 2 * 3e6
    assert there.host - here.host == 2 * 3e6
    assert here.parts["activations"] == there.parts["activations"]


def test_states_by_hand() -> None:
    """bf16 weights and gradients, fp32 masters, 4 or 8 bytes of optimizer state, over 8 ranks."""
    zero0, total = planned(0)
    zero1, _ = planned(1)
    zero3, _ = planned(3)
    assert zero0.parts["parameters"] == zero1.parts["parameters"] == 2 * total
    assert zero3.parts["parameters"] == 2 * total / 8
    assert zero3.parts["gathered parameters"] == 2 * total
    assert zero0.parts["optimizer"] == 8 * zero1.parts["optimizer"]
    assert 8 * total < zero0.parts["optimizer"] < 12 * total
    # Every group uses every weight, so a whole gradient exists at stage 3, too. Four micro-batches are summed
    # in fp32: of the whole gradient by the engine, of the own part by DeepSpeed.
    assert zero0.parts["gradients"] == zero1.parts["gradients"] == (2 + 4) * total
    assert zero3.parts["gradients"] == 2 * total + 4 * total / 8
    once, _ = planned(3, micro_batch=8)
    assert once.parts["gradients"] == 2 * total + 2 * total / 8


def test_activations_grow_with_the_micro_batch_and_nothing_else_does() -> None:
    two, _ = planned(3)
    four, _ = planned(3, micro_batch=4)
    assert four.parts["activations"] == 2 * two.parts["activations"]
    assert four.parts["pool"] == 2 * two.parts["pool"]
    assert four.parts["optimizer"] == two.parts["optimizer"]
    assert (two.way.accumulation, four.way.accumulation) == (4, 2)


def test_offload_moves_the_optimizer_to_the_host() -> None:
    kept, _ = planned(3)
    moved, _ = planned(3, offload=True)
    assert moved.parts["optimizer"] == 0
    assert moved.host >= kept.parts["optimizer"]
    weights, _ = planned(3, offload=True, offload_weights=True)
    assert weights.parts["parameters"] == 0
    assert weights.host == moved.host + kept.parts["parameters"]


def test_traffic_by_hand() -> None:
    once, total = planned(3)
    again, _ = planned(3, gather="traversal", recompute="group+layer")
    ring = 2 * total * 7 / 8
    assert once.traffic["gathered weights"] == pytest.approx(ring * once.way.accumulation)
    # 24 traversals forward; 16 of them again for the group, once more for each layer, and backward.
    assert again.traffic["gathered weights"] == pytest.approx(ring * (24 + 16 * 3) * again.way.accumulation)


def test_the_local_rule_reduces_once_a_step() -> None:
    each, _ = planned(2)
    once, _ = planned(2, optim={"lr": 1e-3, "clip_rule": "local"})
    assert each.way.accumulation == once.way.accumulation == 4
    assert once.traffic["gradients"] == pytest.approx(each.traffic["gradients"] / 4)
    assert "optim.clip_rule = local" in once.notes[0]


def test_a_seven_billion_model_takes_seconds_and_little_memory() -> None:
    """The predicted order of magnitude of a model that no test could hold: 36 layers of width 4096."""
    big = WhiteMatterConfig(
        vocab_size=1000,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        num_kv_channels=2,
    )
    found = body(big, 4096, "bf16", "group+layer")
    assert 0.5 * GIB < found.peak < 20 * GIB
