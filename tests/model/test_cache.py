"""The cache: k channels instead of L layers, real tokens counted, rows handled as in transformers' own."""

import pytest
import torch
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

from tests.support.tiny import build, tokens
from wm_ds.model import WhiteMatterCache
from wm_ds.model.cache import CACHE_FIELD
from wm_ds.plan.storage_tracker import StorageTracker


def fill(lm, input_ids, cache=None, **inputs):
    with torch.no_grad():
        out = lm(input_ids, use_cache=True, prefill="exact", **{CACHE_FIELD: cache}, **inputs)
    return getattr(out, CACHE_FIELD), out.logits


def size(cache: DynamicCache) -> int:
    """Bytes that the cache keeps alive."""
    storages = {}
    for layer in cache.layers:
        for part in (layer.keys, layer.values):
            if part is not None:
                storage = part.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_memory_is_k_of_l_parts_of_a_cache_of_layers(k: int) -> None:
    lm = build(k=k, layers=4, dtype=torch.float32).eval()
    c = lm.config
    vanilla = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=c.vocab_size,
            hidden_size=c.hidden_size,
            intermediate_size=c.intermediate_size,
            num_hidden_layers=4,
            num_attention_heads=c.num_attention_heads,
            num_key_value_heads=c.num_key_value_heads,
            head_dim=c.head_dim,
        )
    ).eval()
    with torch.no_grad():
        theirs = getattr(vanilla(tokens(2, 9), use_cache=True), CACHE_FIELD)
        ours, _ = fill(lm, tokens(2, 9))
        for i in range(3):
            theirs = getattr(
                vanilla(tokens(2, 1, seed=i), use_cache=True, **{CACHE_FIELD: theirs}), CACHE_FIELD
            )
            ours, _ = fill(lm, tokens(2, 1, seed=i), ours)
    assert ours.get_seq_length() == theirs.get_seq_length() == 12
    assert size(ours) * 4 == size(theirs) * k
    assert size(ours) == 2 * k * c.num_key_value_heads * c.head_dim * 4 * 2 * 12


def test_the_dummy_is_not_counted() -> None:
    lm = build().eval()
    cache = WhiteMatterCache()
    assert cache.get_seq_length() == 0
    for n in (1, 4, 2):
        before = cache.get_seq_length()
        cache, _ = fill(lm, tokens(1, n), cache)
        assert cache.get_seq_length() == before + n
    assert len(cache) == lm.config.num_kv_channels


def test_rows_are_selected_repeated_and_reordered() -> None:
    lm = build().eval()
    rows, more = tokens(3, 6), tokens(3, 2, seed=1)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6, [0] * 5 + [1]])
    more_mask = torch.cat((mask, torch.ones(3, 2, dtype=torch.long)), 1)
    for action in ("batch_select_indices", "reorder_cache", "batch_repeat_interleave"):
        if action == "batch_repeat_interleave":
            index, argument = torch.tensor([0, 0, 1, 1, 2, 2]), 2
        else:
            index = argument = torch.tensor([2, 0, 0])
        cache, _ = fill(lm, rows, attention_mask=mask)
        getattr(cache, action)(argument)
        _, got = fill(lm, more[index], cache, attention_mask=more_mask[index])
        cache, _ = fill(lm, rows, attention_mask=mask)
        _, want = fill(lm, more, cache, attention_mask=more_mask)
        assert (got - want[index]).abs().max() < 1e-12, action


def test_a_cropped_cache_continues_as_if_the_rest_had_never_been() -> None:
    lm = build().eval()
    row, other = tokens(1, 9), tokens(1, 3, seed=5)
    cache, _ = fill(lm, row)
    cache.crop(-4)
    assert cache.get_seq_length() == 5
    _, got = fill(lm, other, cache)
    _, want = fill(lm, torch.cat((row[:, :5], other), 1))
    assert (got - want[:, 5:]).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["static", "offloaded", "tuple"])
def test_other_caches_are_refused(kind: str) -> None:
    lm = build().eval()
    if kind == "static":
        cache = StaticCache(config=lm.config, max_cache_len=16)
    else:
        cache = ((torch.zeros(1),) * 2,) * 3
        if kind == "offloaded":
            cache = DynamicCache()
            cache.offloading = True
    with pytest.raises(TypeError, match="cannot hold this model's KV"):
        fill(lm, tokens(1, 4), cache)


def test_no_cache_is_kept_unless_wanted() -> None:
    lm = build().eval()
    with torch.no_grad():
        assert getattr(lm(tokens(1, 4), use_cache=False), CACHE_FIELD) is None
        assert getattr(lm(tokens(1, 4)), CACHE_FIELD).get_seq_length() == 4
    assert getattr(lm.train()(tokens(1, 4)), CACHE_FIELD) is None


def test_a_decoded_token_copies_the_cache_once() -> None:
    """As DynamicCache itself does, channel by channel: nothing else of the context's size is ever made."""
    lm = build(k=4, layers=4, dtype=torch.float32, max_position_embeddings=4096).eval()
    cache, _ = fill(lm, tokens(1, 8))
    for layer in cache.layers:  # what it holds does not matter here
        layer.keys, layer.values = (x.repeat(1, 1, 250, 1) for x in (layer.keys, layer.values))
    total = size(cache)
    tracker = StorageTracker(lm.parameters())
    for layer in cache.layers:
        tracker.note(layer.keys)
        tracker.note(layer.values)
    with torch.no_grad(), tracker:
        tracker.reset_peak()
        lm(tokens(1, 1), use_cache=True, **{CACHE_FIELD: cache})
    # A channel's old keys or values are given up when their copy is made: one of them is there twice.
    assert tracker.peak < total * (1 + 1 / 4)
    assert size(cache) == total // 2000 * 2001


@pytest.mark.parametrize("padded", [False, True])
def test_a_decoded_token_is_the_passes(padded: bool) -> None:
    """The short way behind a cache and the general one give the same numbers and the same cache."""
    lm = build().eval()
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6]) if padded else torch.ones(2, 6, dtype=torch.long)
    results = []
    for short in (True, False):
        cache, _ = fill(lm, tokens(2, 6), attention_mask=mask)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(lm.model), "_decodes", lambda *_, short=short: short)
            for i in range(3):
                more = torch.cat((mask, torch.ones(2, i + 1, dtype=torch.long)), dim=1)
                cache, logits = fill(lm, tokens(2, 1, seed=i), cache, attention_mask=more)
        results.append((logits, cache))
    (got, ours), (want, theirs) = results
    assert (got - want).abs().max() < 1e-12
    for one, other in zip(ours.layers, theirs.layers):
        assert (one.keys - other.keys).abs().max() < 1e-12
        assert (one.values - other.values).abs().max() < 1e-12


def test_a_decoded_token_that_fails_leaves_the_cache_as_it_was() -> None:
    lm = build().eval()
    cache, _ = fill(lm, tokens(1, 5))
    before = [layer.keys.clone() for layer in cache.layers]
    lm.model.layers[2].forward = lambda *_: 1 // 0
    with pytest.raises(ZeroDivisionError):
        fill(lm, tokens(1, 1), cache)
    assert cache.get_seq_length() == 5
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before))
