"""Gradient flows through a cache: what continues cached tokens trains them, and a prefix of given KV."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.model import test_lckv, test_sharing
from tests.support import reference
from tests.support.tiny import build, parameters, settings, tokens
from wm_ds.model import Schedule
from wm_ds.model.cache import CACHE_FIELD

LENGTH, CUT = 8, 5
FAMILIES = {
    "whitematter": build,
    "no feedback": lambda: build(k=4, feedback=False),
    "lckv": test_lckv.build,
    "fusedkv": test_sharing.build,
}


def gradients(lm, loss: Tensor) -> dict[str, Tensor]:
    lm.zero_grad()
    loss.backward()
    return {name: weight.grad.clone() for name, weight in lm.named_parameters() if weight.grad is not None}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert (got[name] - want[name]).abs().max() < 1e-9 * (1 + want[name].abs().max()), name


@pytest.mark.parametrize("policy", ["none", "layer", "group", "group+layer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_parts_have_the_gradients_of_the_whole_row(family: str, policy: str) -> None:
    """The second part's loss alone, exact: every parameter also gets its share through the cached tokens."""
    lm = FAMILIES[family]().eval()
    lm.model.recompute = policy
    row = tokens(2, LENGTH)
    labels = row.clone()
    labels[:, : CUT + 1] = -100
    want = gradients(lm, lm(row, labels=labels, prefill="exact").loss)
    first = lm(row[:, :CUT], prefill="exact", use_cache=True)
    cache = getattr(first, CACHE_FIELD)
    behind = lm(row[:, CUT:], labels=row[:, CUT:], prefill="exact", **{CACHE_FIELD: cache})
    assert_same(gradients(lm, behind.loss), want)


def test_single_tokens_behind_a_cache_carry_gradient_too() -> None:
    lm = build().eval()
    row = tokens(2, 4)
    want = gradients(lm, lm(row, prefill="exact").logits[:, -1].square().sum())
    cache = None
    for i in range(4):
        out = lm(row[:, i : i + 1], use_cache=True, **{CACHE_FIELD: cache})
        cache = getattr(out, CACHE_FIELD)
    assert_same(gradients(lm, out.logits[:, -1].square().sum()), want)


def prefix(lm, rows: int, length: int) -> tuple[DynamicCache, list[Tensor]]:
    """A cache as prefix tuning makes it: trainable keys and values of tokens that do not exist."""
    c = lm.config
    shape = (2, c.num_kv_channels, rows, c.num_key_value_heads, length, c.head_dim)
    leaf = torch.randn(shape, dtype=lm.dtype, generator=torch.Generator().manual_seed(5)).requires_grad_()
    cache = DynamicCache()
    for channel in range(c.num_kv_channels):
        cache.update(leaf[0, channel], leaf[1, channel], channel)
    return cache, leaf


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_prefix_gets_its_gradient_from_frozen_weights(family: str) -> None:
    """By finite differences, under the training schedule without detached passes."""
    lm = FAMILIES[family]()
    lm.config.no_grad_passes = 0
    lm.train().requires_grad_(False)
    row = tokens(2, 4)

    def loss(cache: DynamicCache) -> Tensor:
        return lm(row, **{CACHE_FIELD: cache}).logits.square().mean()  # transformers' loss is float32

    cache, leaf = prefix(lm, 2, 3)
    loss(cache).backward()
    direction = torch.randn(leaf.shape, dtype=leaf.dtype, generator=torch.Generator().manual_seed(6))
    ends = []
    for step in (1e-5, -1e-5):
        moved, at = prefix(lm, 2, 3)
        for channel, layer in enumerate(moved.layers):
            layer.keys = (at + step * direction)[0, channel]
            layer.values = (at + step * direction)[1, channel]
        with torch.no_grad():
            ends.append(loss(moved))
    slope = (ends[0] - ends[1]) / 2e-5
    assert slope.abs() > 1e-6
    assert ((leaf.grad * direction).sum() - slope).abs() < 1e-8 + 1e-6 * slope.abs()


def test_the_training_schedule_behind_a_cache_is_the_references() -> None:
    """Against plain autograd: detached passes stay detached, also from the cached entries."""
    lm = build().train()
    row = tokens(1, LENGTH)[0].tolist()
    p, s = parameters(lm, requires_grad=True), settings(lm)
    entries = []
    for i, token in enumerate(row[:CUT]):
        states, _ = reference.layer_stack(
            p, s, p["model.embed_tokens.weight"][token], i, [reference.dummy(p, s), *entries]
        )
        entries.append(reference.pool(p, s, states, i))
    steps = reference.from_position([[(i, 0) for i in range(LENGTH)]], CUT)
    hidden_TD, _ = reference.continue_document(p, s, entries, row[CUT:], steps)
    reference.logits(p, hidden_TD).square().sum().backward()
    first = lm(torch.tensor([row[:CUT]]), schedule=Schedule.exact(), use_cache=True)
    cache = {CACHE_FIELD: getattr(first, CACHE_FIELD)}
    out = lm(torch.tensor([row[CUT:]]), schedule=Schedule.jacobi(1), **cache)
    want = {name: weight.grad for name, weight in p.items()}
    assert_same(gradients(lm, out.logits.square().sum()), want)


def test_backward_leaves_the_cache_as_it_was() -> None:
    """The passes restore overwritten entries during backward; those in the cache are copies."""
    lm = build().eval()
    row = tokens(1, LENGTH)
    out = lm(row)
    cache = getattr(out, CACHE_FIELD)
    before = [layer.keys.detach().clone() for layer in cache.layers]
    out.logits.sum().backward()
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_a_prefix_of_another_number_of_channels_is_refused() -> None:
    lm = build().train()
    cache = DynamicCache()
    for layer in range(lm.config.num_hidden_layers):
        cache.update(*torch.zeros(2, 1, 2, 3, 8, dtype=lm.dtype), layer)
    with pytest.raises(ValueError, match=r"holds 4 channels, this model has 3.*num_layers=3"):
        lm(tokens(1, 4), **{CACHE_FIELD: cache})
