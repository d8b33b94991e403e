"""ZeRO-3 with layers that run many times a step: all-gathers counted on two ranks, traces, hooks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.support import numerics
from wm_ds.config import load as configuration
from wm_ds.engine.deepspeed_config import deepspeed_config
from wm_ds.engine.zero3 import limits, node_partition, parameter_shapes
from wm_ds.families import model_class, model_config

pytestmark = pytest.mark.alone

LAYERS, GROUPS = 4, 8
MODEL = {"num_hidden_layers": LAYERS, "num_kv_channels": 2, "num_groups": GROUPS, "no_grad_passes": 1}
LENGTH = 19  # no multiple of 8: the last groups are shorter


def plan(gather: str, recompute: str, **more) -> dict:
    return {"gather": gather, "recompute": recompute, "model": MODEL, "length": LENGTH, "steps": 4} | more


PLANS = {
    "step": plan("step", "group", evaluate=True),
    "step, whole": plan("step", "none", evaluate=False),
    "pass": plan("pass", "group+layer", evaluate=True),
    "traversal": plan("traversal", "group+layer", evaluate=True),
    "defaults of others": plan("traversal", "layer", evaluate=False),
}


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict]]:
    answers = numerics.run(2, list(PLANS.values()), worker="tests.support.zero3_worker")
    return dict(zip(PLANS, answers))


@pytest.mark.parametrize("name", ["step", "step, whole"])
def test_gathering_once_a_step(name: str, results: dict) -> None:
    for rank in results[name]:
        steady = rank["gathers"][2:]  # the first step records, the second may still follow no trace
        assert max(steady) <= LAYERS + 4, rank["gathers"]
        assert min(steady) >= 1, "nothing was gathered at all: the count does not see the collectives"


def test_gathering_at_every_traversal_is_hundreds(results: dict) -> None:
    """What the other two settings save; also the proof that the counter counts."""
    for rank in results["traversal"]:
        assert min(rank["gathers"][2:]) > 3 * GROUPS * LAYERS, rank["gathers"]


def test_gathering_once_a_pass(results: dict) -> None:
    """Every parameter at most once for each of three passes, forward and backward, and far from hundreds."""
    for rank in results["pass"]:
        assert max(rank["gathers"][2:]) <= 3 * len(rank["parameters"]), rank["gathers"]
        assert max(rank["gathers"][2:]) < min(results["traversal"][0]["gathers"][2:]) / 4


@pytest.mark.parametrize("name", list(PLANS))
def test_the_trace_holds_from_the_second_step_on(name: str, results: dict) -> None:
    """Also with evaluations between the steps, one of them with twice the passes, and ragged groups."""
    for rank in results[name]:
        assert rank["invalidations"] == [0] * 4
        assert rank["gathers"][2] == rank["gathers"][3]
        assert rank["evaluation_invalidations"] == 0


@pytest.mark.parametrize("name", list(PLANS))
def test_every_parameter_is_reduced_once_a_backward(name: str, results: dict) -> None:
    for rank in results[name]:
        for hooks in rank["hooks"]:
            assert hooks == dict.fromkeys(rank["parameters"], 1)


def test_how_parameters_are_gathered_changes_no_number(results: dict) -> None:
    for (_, a), (_, b) in itertools.pairwise(results.items()):
        assert a[0]["losses"] == pytest.approx(b[0]["losses"], rel=1e-5)


# Models that no test can hold: arithmetic, and their shapes on the meta device


def big(gather: str) -> tuple[dict, list]:
    settings = numerics.settings(numerics.Case(family="whitematter", recompute="group+layer"), 1)
    settings["model"] |= {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_kv_channels": 8,
        "num_groups": GROUPS,
        "vocab_size": 151_936,
    }
    settings["zero3"] = {"gather": gather}
    config = configuration.parse(settings)
    hf = model_config(config.model, vocab_size=151_936, seq_len=4096, eos_id=0)
    with torch.device("meta"):
        shapes = parameter_shapes(model_class(hf)(hf))
    json = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": "auto"}}
    return deepspeed_config(config, json, 1, shapes, 64)["zero_optimization"], shapes


def test_limits_of_a_model_beyond_a_billion_parameters() -> None:
    """DeepSpeed's 1e9 would release a 7 B model's parameters after every layer."""
    zero, shapes = big("step")
    total = sum(math.prod(shape) for _, shape in shapes)
    assert total > 6e9
    for key in ("stage3_max_reuse_distance", "stage3_max_live_parameters"):
        assert zero[key] > total, key
    assert 50_000_000 < zero["stage3_prefetch_bucket_size"] < total / 8, "a few large gathers, not one"

    zero, _ = big("traversal")
    layer = sum(math.prod(shape) for name, shape in shapes if ".layers.3." in name)
    assert zero["stage3_max_reuse_distance"] == 0
    assert layer <= zero["stage3_max_live_parameters"] < 1e9 * 2
    assert zero["stage3_max_live_parameters"] < total / 4


def test_limits_are_never_left_to_deepspeed() -> None:
    for gather in ("step", "pass", "traversal"):
        for key in ("stage3_max_reuse_distance", "stage3_max_live_parameters", "stage3_prefetch_bucket_size"):
            assert key in limits(gather, [("model.layers.0.a", (3, 4))])
    settings = numerics.settings(numerics.Case(family="whitematter"), 1)
    config = configuration.parse(settings)
    zero = deepspeed_config(config, {"zero_optimization": {"stage": 3}}, 1, [("model.layers.0.a", (3, 4))])
    assert zero["zero_optimization"]["stage3_max_reuse_distance"] == 25
    given = {"zero_optimization": {"stage": 3, "stage3_max_reuse_distance": 7}}
    kept = deepspeed_config(config, given, 1, [("model.layers.0.a", (3, 4))])
    assert kept["zero_optimization"]["stage3_max_reuse_distance"] == 7, "a number in the file is the user's"


def test_a_second_copy_inside_each_node_where_layers_are_gathered_again(monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert node_partition("traversal", 64) == 8
    assert node_partition("traversal", 8) == 1, "one node: every gather stays inside anyhow"
    assert node_partition("step", 64) == 1, "gathered once: nothing is gathered again"


def test_traversal_needs_recomputed_layers() -> None:
    settings = numerics.settings(numerics.Case(family="whitematter", recompute="group"), 1)
    with pytest.raises(configuration.ConfigError, match=r"zero3\.gather = traversal.*group\+layer"):
        configuration.parse(settings | {"zero3": {"gather": "traversal"}})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bucket_sizes_come_from_the_model_where_the_json_has_none(stage: int) -> None:
    """DeepSpeed allocates whole buckets: its 500 million numbers are 2 GB for a model of any size."""
    config = configuration.parse(numerics.settings(numerics.Case(family="whitematter"), 1))

    def sizes(given: dict, shape: tuple[int, ...]) -> tuple[int, int]:
        json = {"zero_optimization": {"stage": stage} | given}
        zero = deepspeed_config(config, json, 1, [("a", shape)])["zero_optimization"]
        return zero["reduce_bucket_size"], zero["allgather_bucket_size"]

    assert sizes({}, (3, 5)) == (16, 16), "an odd bucket of gathering is refused by DeepSpeed"
    assert sizes({}, (1000, 1_000_000)) == (50_000_000, 50_000_000)
    assert sizes({"reduce_bucket_size": 700}, (3, 5)) == (700, 16), "a number in the file is the user's"
    assert sizes({"allgather_bucket_size": 900}, (3, 5)) == (16, 900)
