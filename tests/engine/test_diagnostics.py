"""Residuals of the passes and statistics of the routers against their definitions."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from tests.support import reference, tiny
from wm_ds.distributed.process_group import World
from wm_ds.engine.compile import compile_blocks
from wm_ds.engine.diagnostics import observe
from wm_ds.model import Schedule
from wm_ds.model.gain import small_change

LENGTH, GROUPS, PASSES = 13, 3, 3


class Engine:
    """The model as observe sees it through the engine: one rank, evaluation with the trained schedule."""

    def __init__(self, lm: torch.nn.Module) -> None:
        self.lm, self.world = lm, World(0, 0, 1, torch.device("cpu"), "gloo")

    def evaluate(self, micro_batches: list[dict[str, Tensor]]) -> None:
        (batch,) = micro_batches
        assert batch["input_ids"].shape[0] == 1, "one row is enough"
        with torch.no_grad():
            self.lm.model(**batch, schedule=Schedule.cyclic(GROUPS, PASSES), use_cache=False)


@pytest.fixture(scope="module")
def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, tiny.VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "document_ids": torch.zeros(2, LENGTH, dtype=torch.int32)}


def observed(lm: torch.nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
    return observe(Engine(lm.eval()), batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("relaxation", [1.0, [0.7, 0.4]])
def test_residuals_are_how_far_each_pass_moved_the_pool(batch, relaxation):
    lm = tiny.build(k=3, relaxation=relaxation).eval()
    found = observed(lm, batch)["residuals"]
    assert len(found) == PASSES
    pools = []
    for passes in range(1, PASSES + 1):
        cache = lm.model(
            batch["input_ids"][:1], schedule=Schedule.cyclic(GROUPS, passes), use_cache=True
        ).past_key_values
        pools.append(torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers]))
    for number in range(1, PASSES):
        new, old = pools[number], pools[number - 1]
        if relaxation == 1.0:
            assert found[number] == pytest.approx(float((new - old).norm() / new.norm()), abs=2e-5)
    assert found[0] > found[1] > found[2] > 0


def one_pass_by_hand(lm, flat: Tensor, ids: list[int], groups: int) -> Tensor:
    """The pool after one cyclic pass from another pool, both as one vector: the formulas, token by token."""
    p, s = tiny.parameters(lm), tiny.settings(lm)
    entries = []
    for keys, values in flat.view(len(ids), 2, s.channels, s.kv_heads, s.head_dim):
        entries.append(([[*heads] for heads in keys], [[*heads] for heads in values]))
    for group in range(groups):
        written = {}
        for i in range(group, len(ids), groups):
            x = p["model.embed_tokens.weight"][ids[i]]
            states, _ = reference.layer_stack(p, s, x, i, [reference.dummy(p, s), *entries[:i]])
            written[i] = reference.pool(p, s, states, i)
        for i, entry in written.items():
            entries[i] = entry
    keys, values = reference.stack_entries(entries)
    return torch.stack((keys, values), dim=1).flatten()


def test_the_gain_is_that_of_the_pass_s_derivative():
    """At the fixed point of a tiny model, where the second pass has the same derivative as the first."""
    lm = tiny.build(k=1, layers=2).eval()
    ids, groups = tiny.tokens(1, 6), 2
    with torch.no_grad():
        cache = lm(ids, prefill="exact", use_cache=True).past_key_values
        # [1, 1, G, T, d] each; as a vector: token, key or value, channel, head, d
        entries = tuple(getattr(cache.layers[0], side)[None] for side in ("keys", "values"))
        at, change = (
            torch.stack(pair).permute(4, 0, 1, 2, 3, 5).flatten()
            for pair in (entries, small_change(entries, None))
        )
        assert (one_pass_by_hand(lm, at, ids[0].tolist(), groups) - at).abs().max() < 1e-10

        def pushed(direction: Tensor) -> Tensor:
            ends = [one_pass_by_hand(lm, at + h * direction, ids[0].tolist(), groups) for h in (1e-5, -1e-5)]
            return (ends[0] - ends[1]) / 2e-5

        first = pushed(change / change.norm())
        second = pushed(first / first.norm())
        lm.model.measure_gain = True
        lm.model(ids, schedule=Schedule.cyclic(groups, 3), use_cache=False)
    want = [float(first.norm()), float(second.norm())]
    assert min(want) > 1e-2
    assert lm.model.gain.tolist() == pytest.approx(want, rel=1e-2)


def test_the_gain_is_reported_and_nothing_stays_behind(batch):
    lm = tiny.build(k=3)
    found = observed(lm, batch)["gain"]
    assert len(found) == 2
    assert all(0 < gain < 100 for gain in found)
    assert not lm.model.measure_gain


def test_a_small_change_is_as_large_everywhere_and_none_at_filler():
    entries = [torch.randn(2, 3, 2, 5, 8, dtype=torch.float64) * scale for scale in (1.0, 100.0)]
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 0, -1, 1, -1], [-1] * 5])
    first, second = small_change(entries, documents), small_change(entries, documents)
    for change, again, entry in zip(first, second, entries):
        assert torch.equal(change, again)
        assert (change.abs().sum((0, 2, 4)) == 0).equal(documents < 0)
        size = change[:, 0].norm() / entry[:, 0].norm()
        assert 0.5e-3 < size < 2e-3


def test_router_statistics_by_hand(batch):
    """With router weights of zero the mixing weights are the bias, whatever the token."""
    layers, k = 4, 3
    lm = tiny.build(k=k, layers=layers)
    biases = {"key": lm.model.pool.key.router_bias, "value": lm.model.pool.value.router_bias}
    with torch.no_grad():
        for branch in (lm.model.pool.key, lm.model.pool.value):
            branch.router_weight.zero_()
    found = observed(lm, batch)
    for name, bias in biases.items():
        for channel, alpha in enumerate(bias.detach().view(k, layers).tolist()):
            total = sum(abs(a) for a in alpha)
            shares = [abs(a) / total for a in alpha]
            entropy = -sum(s * math.log(s) for s in shares)
            assert found["router_entropy"][name][channel] == pytest.approx(entropy, abs=2e-5)
            assert found["router_share"][name][channel] == pytest.approx(shares, abs=1e-4)
            # Layer l reads channel l mod k; what it gets from states of layers above its own is feedback.
            readers = [reader for reader in range(layers) if reader % k == channel]
            deeper = [sum(s for source, s in enumerate(shares) if source > reader) for reader in readers]
            assert found["feedback_share"][name][channel] == pytest.approx(
                sum(deeper) / len(readers), abs=2e-5
            )


def test_statistics_follow_the_tokens_and_leave_no_trace(batch):
    lm = tiny.build(k=3)
    first = observed(lm, batch)
    other = observed(lm, {**batch, "input_ids": (batch["input_ids"] + 1) % tiny.VOCABULARY})
    assert first["router_entropy"] != other["router_entropy"]
    assert observed(lm, batch) | {"peak_memory_gib": 0} == first | {"peak_memory_gib": 0}
    assert not lm.model.measure_residuals
    assert "mixing_weights" not in vars(lm.model.pool.key)


def test_other_models_report_memory_alone(batch):
    lm = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(model_type="qwen3")))
    assert [*observe(Engine(lm), batch)] == ["peak_memory_gib"]  # type: ignore[arg-type]


def test_compiled_blocks_are_not_compiled_again(batch):
    """Watching a compiled pool once cost eight compilations, after which dynamo ran it uncompiled."""
    plain = observed(tiny.build(k=3, dtype=torch.float32), batch)
    lm = tiny.build(k=3, dtype=torch.float32).eval()
    torch._dynamo.reset()
    compile_blocks(lm, backend="eager")
    counters.clear()

    def forward() -> int:
        with torch.no_grad():
            lm.model(**batch, schedule=Schedule.cyclic(GROUPS, PASSES))
        return counters["stats"]["unique_graphs"]

    before = forward()
    assert before > 0
    for found in (observed(lm, batch), observed(lm, batch)):
        for name, entropies in plain["router_entropy"].items():
            assert found["router_entropy"][name] == pytest.approx(entropies, abs=1e-4)
    assert forward() == before
