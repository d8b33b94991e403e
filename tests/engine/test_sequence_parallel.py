"""Sequence parallelism against one rank: states, gradients, training; all-to-alls counted; refusals."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from tests.engine.test_numerics import Reference, difference
from tests.support import checkpoint_launch, numerics, tiny
from tests.support.sequence_worker import (
    GROUPS,
    LAYERS,
    LENGTH,
    ROWS,
    bare_batch,
    bare_model,
    engine_batch,
    engine_model,
    engine_settings,
    main,
)
from tests.support.sequence_worker import case as engine_case
from wm_ds.config import load as configuration
from wm_ds.config import validate
from wm_ds.config.schema import ConfigError
from wm_ds.model import Schedule
from wm_ds.model.shard import Shard
from wm_ds.plan.traffic import sequence_bytes

pytestmark = pytest.mark.alone

EXACT = 1e-10  # relative, in float64


def bare(ranks: int, recompute: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "bare", "ranks": ranks, "recompute": recompute, "groups": GROUPS, "fields": fields}


BARE = {
    "4 ranks": bare(4, "none"),
    "4 ranks, layer": bare(4, "layer"),
    "4 ranks, group": bare(4, "group"),
    "4 ranks, group+layer": bare(4, "group+layer"),
    "2 x 2 ranks": bare(2, "none"),
    "2 x 2 ranks, group": bare(2, "group"),
    "no detached pass": bare(2, "group", no_grad_passes=0),
    "two detached passes": bare(4, "group+layer", no_grad_passes=2, grad_passes=1),
    "relaxed": bare(2, "group", relaxation=0.7),
    "Jacobi, one channel": bare(4, "group+layer", num_groups=1, num_kv_channels=1),
    "layerwise start": bare(4, "none", start="layerwise", no_grad_passes=0, grad_passes=1),
    "layerwise start, group": bare(2, "group", start="layerwise", start_missing="embedding"),
    "graded start": bare(2, "layer", start="layerwise", start_grad=True, no_grad_passes=0, grad_passes=1),
    "graded start, group+layer": bare(
        4, "group+layer", start="layerwise", start_grad=True, no_grad_passes=0, grad_passes=1
    ),
}
SWEPT = [name for name in BARE if "start" in name]
SLOW_BARE = {"flex": bare(2, "group+layer", attention="flex")}


def engine(zero: dict[str, Any], ranks: int, **more: Any) -> dict[str, Any]:
    plan = {"kind": "engine", "zero": zero, "ranks": ranks, "recompute": "group", "steps": 3}
    return plan | {"clip_rule": "global", "precision": "fp32"} | more


ENGINE = {
    "zero 2, 2 x 2": engine({"stage": 2}, 2),
    "zero 3, 4": engine({"stage": 3}, 4, recompute="group+layer", steps=2),
    "zero 1, 2 x 2, local clip": engine({"stage": 1}, 2, recompute="layer", clip_rule="local"),
}
SLOW = {
    "zero 0, 2 x 2": engine({"stage": 0}, 2, recompute="none"),
    "zero 3, 4, longer": engine({"stage": 3}, 4, recompute="group+layer", steps=4),
    "zero 3, 2 x 2": engine({"stage": 3}, 2, recompute="layer"),
    "zero 3, 2 x 2, local clip": engine({"stage": 3}, 2, clip_rule="local"),
    "zero 0, 4, local clip": engine({"stage": 0}, 4, clip_rule="local"),
    "zero 2, 4, autocast": engine({"stage": 2}, 4, precision="autocast", steps=1),
}


@pytest.fixture(scope="module")
def results() -> dict[str, list[dict]]:
    return run(BARE | ENGINE)


@pytest.fixture(scope="module")
def slow_results() -> dict[str, list[dict]]:
    return run(SLOW | SLOW_BARE)


def run(plans: dict[str, dict[str, Any]]) -> dict[str, list[dict]]:
    """What each of four ranks answers to each plan."""
    with tempfile.TemporaryDirectory(prefix="sequence-") as name:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(list(plans.values())))
        codes = checkpoint_launch.finish(checkpoint_launch.fork(main, [(folder,)] * 4, folder), 300)
        assert codes == [0] * 4, f"{codes}\n{checkpoint_launch.logs(folder)}"
        ranks = [torch.load(folder / f"answer_{rank}.pt", weights_only=False) for rank in range(4)]
    return {name: [answers[i] for answers in ranks] for i, name in enumerate(plans)}


# The model alone


def alone(plan: dict[str, Any], group: int) -> dict[str, Any]:
    lm = bare_model(plan)
    lm.model.recompute, lm.config.attention = "none", "sdpa"
    lm.model.measure_residuals = True
    ids, documents, weight = bare_batch(plan, group)
    hidden = lm.model(input_ids=ids, document_ids=documents).last_hidden_state
    residuals = lm.model.residuals
    (hidden * weight).sum().backward()
    lm.eval()
    with torch.no_grad():
        start = lm.config.prefill_schedule().start
        evaluated = tiny.hidden(lm, ids, documents, Schedule.cyclic(plan["groups"], 5, start=start))
    return {
        "hidden": hidden.detach(),
        "evaluated": evaluated,
        "residuals": residuals,
        "gradients": {name: p.grad for name, p in lm.named_parameters() if p.grad is not None},
    }


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp_min(1e-30))


@pytest.mark.parametrize("name", list(BARE))
def test_states_and_gradients_are_those_of_one_rank(name: str, results: dict) -> None:
    check_bare(BARE[name], results[name])


@pytest.mark.slow
def test_flex_is_that_of_one_rank_and_sdpa(slow_results: dict) -> None:
    check_bare(SLOW_BARE["flex"], slow_results["flex"])


def check_bare(plan: dict[str, Any], answers: list[dict[str, Any]]) -> None:
    size = plan["ranks"]
    for group in range(4 // size):
        expected = alone(plan, group)
        members = answers[group * size : (group + 1) * size]
        for what in ("hidden", "evaluated"):
            assert distance(torch.cat([m[what] for m in members], dim=1), expected[what]) < EXACT, what
        for member in members:
            assert distance(member["residuals"], expected["residuals"]) < 1e-6
            assert member["gradients"].keys() == expected["gradients"].keys()
            for parameter, gradient in expected["gradients"].items():
                assert distance(member["gradients"][parameter], gradient) < EXACT, parameter
            assert float(expected["gradients"]["model.dummy_key"].norm(dim=(0, 2)).min()) > 0


def kinds(shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    """(all-to-alls of pool entries, all-to-alls of queries and outputs), told apart by their dimensions."""
    return sum(len(s) == 7 for s in shapes), sum(len(s) == 5 for s in shapes)


def test_new_entries_travel_once_a_step_and_not_once_a_layer(results: dict) -> None:
    """g = 3, 1 + 2 passes: the start is pooled in g pieces; the last pass's last group writes nothing, as no
    later step reads it."""
    writes = GROUPS + 2 * GROUPS + (GROUPS - 1)
    for answer in results["4 ranks"]:
        entries, queries = kinds(answer["forward"])
        assert entries == writes
        last_layer = GROUPS  # runs in the last pass only
        assert queries == 2 * ((LAYERS - 1) * 3 * GROUPS + last_layer)
        assert len(answer["forward"]) == entries + queries
        # Backward: entries written with gradient return once (the last detached pass's, too).
        entries, queries = kinds(answer["backward"])
        assert entries == GROUPS + GROUPS + (GROUPS - 1)
        assert queries == 2 * ((LAYERS - 1) * 2 * GROUPS + last_layer)
    for answer in results["4 ranks, group"]:
        entries, queries = kinds(answer["backward"])
        assert entries == GROUPS + GROUPS + (GROUPS - 1), "recomputation sends no entries again"


@pytest.mark.parametrize(
    "name", ["4 ranks", "4 ranks, layer", "2 x 2 ranks, group", "4 ranks, group+layer", *SWEPT]
)
def test_bytes_sent_are_those_of_the_plan(name: str, results: dict) -> None:
    """Each rank keeps its own share of what it exchanges."""
    plan, answer = BARE[name], results[name][0]
    n = plan["ranks"]
    sent = sum(8 * math.prod(s) * (n - 1) / n for s in answer["forward"] + answer["backward"])
    expected = sequence_bytes(bare_model(plan).config, ROWS, LENGTH, 8, n, plan["recompute"])
    assert sent == pytest.approx(expected)


# Through the engine


@pytest.mark.parametrize("name", list(ENGINE))
def test_training_is_that_of_plain_torch(name: str, results: dict) -> None:
    check(ENGINE[name], results[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SLOW))
def test_training_is_that_of_plain_torch_in_more_cases(name: str, slow_results: dict) -> None:
    check(SLOW[name], slow_results[name])


def check(plan: dict[str, Any], answers: list[dict[str, Any]]) -> None:
    """First gradient, losses, norms, held-out loss and weights, against the whole batch in one process
    without DeepSpeed. The local rule clips each group's own gradient and averages then."""
    case = engine_case(plan)
    groups = 4 // plan["ranks"] if plan["clip_rule"] == "local" else 1
    lm = engine_model(plan)
    lm.model.recompute = "none"
    optimizer = Reference(case, lm)
    exact = plan["precision"] == "fp32"
    for step in range(plan["steps"]):
        loss, gradient, norm, tokens = reference(plan, lm, step, groups)
        for answer in answers:
            assert answer["tokens"][step] == tokens
            assert answer["losses"][step] == pytest.approx(loss, rel=1e-5 if exact else 1e-2)
            near = 2e-2 if not exact else 1e-6 if step == 0 else 1e-4
            assert answer["norms"][step] == pytest.approx(norm, rel=near)
        if step == 0:
            got = numerics.assemble([answer["gradients"] for answer in answers])
            if exact:
                error, parameter = difference(got, gradient)
                assert error < 2e-6, parameter
            else:  # far nearer to one rank in bf16 than that is to fp32
                wide = reference(plan | {"precision": "fp32"}, lm, 0, groups)[1]
                for name in gradient:
                    rounding = distance(gradient[name], wide[name])
                    assert distance(got[name], gradient[name]) < 0.5 * rounding < 0.1, name
        optimizer.step(step + 1, gradient)
    for answer in answers:
        assert sorted(answer["samples"]) == list(range(8)), "every sample is told once"
    if exact:
        weights = numerics.assemble([answer["weights"] for answer in answers])
        error, parameter = difference(weights, {name: p.detach() for name, p in lm.named_parameters()})
        assert error < 1e-5, parameter
        lm.eval()
        with torch.no_grad():
            loss, _, _, tokens = reference(plan, lm, 99, 1)
        for answer in answers:
            assert answer["evaluation"] == (pytest.approx(loss, rel=1e-5), tokens)


def reference(
    plan: dict[str, Any], lm: torch.nn.Module, step: int, groups: int
) -> tuple[float, dict[str, Tensor], float, int]:
    """(loss, clipped gradient, raw norm, tokens) of a step's batch; mean over groups that clip apart."""
    total: dict[str, Tensor] = {}
    loss, norms = 0.0, []
    tokens = sum(int((mb["labels"] >= 0).sum()) for mb in engine_batch(plan, step, 0, 1))
    for group in range(groups):
        lm.zero_grad()
        for mb in engine_batch(plan, step, group, groups):
            with torch.autocast("cpu", torch.bfloat16, enabled=plan["precision"] == "autocast"):
                hidden = lm.model(
                    input_ids=mb["input_ids"], document_ids=mb["document_ids"]
                ).last_hidden_state
                logits = lm.lm_head(hidden)
            part = (
                cross_entropy(
                    logits.flatten(0, 1).float(), mb["labels"].flatten(), ignore_index=-100, reduction="sum"
                )
                / tokens
            )
            loss += float(part.detach())
            if torch.is_grad_enabled():
                (part * groups).backward()
        own = {name: p.grad for name, p in lm.named_parameters() if p.grad is not None}
        norms.append(float(torch.stack([g.norm() for g in own.values()]).norm()) if own else 0.0)
        for name, gradient in own.items():
            total[name] = total.get(name, 0) + gradient * min(1.0, 0.5 / (norms[-1] + 1e-6)) / groups
    return loss, total, sum(norms) / groups, tokens


# Refusals


def settings(**changes: Any) -> dict[str, Any]:
    raw = engine_settings(ENGINE["zero 2, 2 x 2"], 4)
    for key, value in changes.items():
        section, _, field = key.rpartition("__")
        (raw[section] if section else raw)[field] = value
    return raw


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sequence_parallel": 8}, "does not divide model.num_key_value_heads = 4.*use one of 1, 2, 4"),
        ({"model__num_attention_heads": 9, "model__num_key_value_heads": 3}, "model.num_attention_heads = 9"),
        ({"model__schedule": "wavefront", "model__chunk_size": 6}, "model.schedule = wavefront"),
        ({"model__schedule": "exact"}, "model.schedule = exact"),
        ({"model__feedback": False}, "model.feedback = false has none"),
    ],
)
def test_refused_by_the_configuration(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configuration.parse(settings(**changes))


@pytest.mark.parametrize("family", ["vanilla", "lckv"])
def test_refused_for_models_without_one_pool(family: str) -> None:
    raw = numerics.settings(numerics.Case(family=family), 1) | {"sequence_parallel": 2}
    with pytest.raises(ConfigError, match=f"sequence_parallel = 2 .*model.family = {family}"):
        configuration.parse(raw)


def test_refused_where_ranks_rows_or_batches_do_not_divide() -> None:
    config = configuration.parse(settings())
    assert config.data_ranks(4) == 2
    assert config.accumulation(4) == 2
    with pytest.raises(ConfigError, match="sequence_parallel = 2 does not divide 3 ranks"):
        config.accumulation(3)
    with pytest.raises(ConfigError, match="over 3 sequence groups of 2 ranks x micro_batch 2"):
        config.accumulation(6)
    validate.check_against_data(config, vocab_size=40, seq_len=24, sequences=100, num_groups=3)
    with pytest.raises(ConfigError, match=r"2 x model\.num_groups = 3 does not divide .* rows of 20 tokens"):
        validate.check_against_data(config, vocab_size=40, seq_len=20, sequences=100, num_groups=3)


class Half(Shard):
    """Rank 1 of 2, alone: for what is refused before anything travels."""

    rank, ranks = 1, 2


def test_refused_by_the_model() -> None:
    lm = bare_model(BARE["2 x 2 ranks"])
    lm.model.shard = Half()
    ids, documents, _ = bare_batch(BARE["2 x 2 ranks"], 0)
    for arguments, message in (
        ({"schedule": Schedule.wavefront(6, 3, 2)}, "not spread over the whole row"),
        ({"use_cache": True}, "a cache holds whole rows"),
        ({"attention_mask": (documents >= 0).long(), "document_ids": None}, "padding moves tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.model(**{"input_ids": ids, "document_ids": documents} | arguments)
    with pytest.raises(ValueError, match="23 positions or heads cannot be cut into 2"):
        lm.model(input_ids=ids[:, :23], document_ids=documents[:, :23])
    with pytest.raises(ValueError, match="22 positions are no multiple of 2 ranks x 3 groups"):
        lm.model(input_ids=ids[:, :22], document_ids=documents[:, :22])


def test_a_rank_s_positions_of_a_step() -> None:
    shard = Half()
    assert shard.local(range(1, 24, 3), 12) == range(1, 12, 3)
    assert list(shard.local(range(0, 24, 1), 12)) == list(range(12))
    assert Shard().local(range(1, 24, 3), 24) == range(1, 24, 3)
