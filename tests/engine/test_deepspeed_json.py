"""Every key that DeepSpeed's JSON may have leaves a run of two ranks as it is without the key, bit for bit.

And the other way round: a key that does not, forced past the list, is found out before the first step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support import numerics
from tests.support.numerics import Case, assemble
from wm_ds.config.deepspeed_json import ALLOWED, STAGES, Bool

pytestmark = pytest.mark.alone

# Small enough that the model has several buckets, groups, persistent and cut parameters.
SMALL = {"reduce_bucket_size": 2000, "allgather_bucket_size": 1000}
OFF = {"device": "cpu", "pin_memory": False}
OTHERWISE: list[tuple[int, dict[str, Any]]] = [
    *((stage, {"contiguous_gradients": False}) for stage in (1, 2, 3)),
    *((stage, {"overlap_comm": stage != 3}) for stage in (1, 2, 3)),
    *((stage, {"reduce_scatter": False}) for stage in (1, 2, 3)),
    *((stage, {"use_multi_rank_bucket_allreduce": False}) for stage in (1, 2)),
    *((stage, SMALL) for stage in (1, 2)),
    (3, {"reduce_bucket_size": 2000}),
    (1, {"offload_optimizer": OFF}),
    (2, {"offload_optimizer": OFF, **SMALL}),
    (3, {"offload_param": OFF}),
    (3, {"offload_optimizer": OFF, "offload_param": OFF, "sub_group_size": 1500}),
    (3, {"sub_group_size": 1500}),
    (3, {"stage3_param_persistence_threshold": 0}),
    (3, {"stage3_param_persistence_threshold": 700, "stage3_model_persistence_threshold": 800}),
    (3, {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}),
    (3, {"stage3_prefetch_bucket_size": 900, "stage3_max_live_parameters": 5000}),
    (3, {"zero_hpz_partition_size": 2}),
]
PRINTS = {
    "steps_per_print": 1,
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "dump_state": True,
    "comms_logger": {"enabled": True, "verbose": True, "prof_all": True, "prof_ops": [], "debug": True},
}


def case(stage: int, keys: dict[str, Any], **more: Any) -> Case:
    return Case(zero={"stage": stage, **keys}, family="whitematter", accumulation=2, steps=3, **more)


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], what: str) -> None:
    assert [r["layout"] for r in ours] == [None, None], what
    assert ours[0]["losses"] == theirs[0]["losses"], what
    a, b = (assemble([r["weights"] for r in results]) for results in (ours, theirs))
    assert a.keys() == b.keys()
    assert [n for n in b if not torch.equal(a[n], b[n])] == [], what


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [{}, pytest.param({"precision": "bf16", "clip": 0.5, "clip_rule": "local"}, marks=pytest.mark.slow)],
    ids=["fp32", "bf16 local"],
)
def test_allowed_keys_change_nothing(more):
    plain = [case(stage, {}, **more) for stage in (1, 2, 3)]
    other = [case(stage, keys, **more) for stage, keys in OTHERWISE]
    results = numerics.run(2, plain + other)
    for (stage, keys), found in zip(OTHERWISE, results[3:], strict=True):
        same(found, results[stage - 1], f"{keys} at stage {stage}")


@pytest.mark.long
def test_keys_that_print_change_nothing():
    plain, other = numerics.run(2, [case(2, {}), case(2, {}, json=PRINTS)])
    same(other, plain, "keys that print")


def test_no_allowed_key_is_untested():
    tested = {(stage, key) for stage, keys in OTHERWISE for key in keys}
    allowed = {(stage, key) for key, stages in STAGES.items() for stage in stages}
    assert tested == {(stage, key) for stage, key in allowed if key != "stage"}
    assert set(PRINTS) | {"zero_optimization"} == set(ALLOWED)
    assert set(PRINTS["comms_logger"]) == set(ALLOWED["comms_logger"])
    off = {k: kind for k, kind in ALLOWED["zero_optimization"].items() if isinstance(kind, Bool)}
    assert all(any(k in keys for _, keys in OTHERWISE) for k in off)


def test_a_key_that_moves_weights_is_found_out_before_the_first_step():
    """round_robin_gradients, past the list: at stages 1 and 2 with Muon, AdamW, bf16 and offload."""
    spoiled = {"round_robin_gradients": True}
    cases = [
        case(1, spoiled),
        case(2, spoiled),
        case(1, spoiled, precision="bf16", optimizer="adamw"),
        case(2, spoiled | {"offload_optimizer": OFF}),
    ]
    for found in numerics.run(2, cases):
        for rank in found:
            assert rank["layout"].startswith(
                "before the first step: weights are not where they are looked for"
            )
            assert "first step: rank 0: model." in rank["layout"]
            assert "differ from the fp32 weights that the optimizer keeps for them" in rank["layout"]
            assert rank["losses"] == []
