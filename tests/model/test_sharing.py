"""CLA, YOCO's sharing and FusedKV against their definitions, token by token, and against Qwen3."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.model.test_cache import size
from tests.support import reference
from tests.support.tiny import batch, parameters, scramble, settings, tokens
from wm_ds.families import cache_bytes, cached_kvs
from wm_ds.model import (
    CLAConfig,
    CLAForCausalLM,
    FusedKVConfig,
    FusedKVForCausalLM,
    Schedule,
    YOCOConfig,
    YOCOForCausalLM,
)
from wm_ds.model.cache import CACHE_FIELD

SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000.0,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
CLASSES = {
    "cla": (CLAConfig, CLAForCausalLM),
    "yoco": (YOCOConfig, YOCOForCausalLM),
    "fusedkv": (FusedKVConfig, FusedKVForCausalLM),
}
# Name: family, its own field, KVs in the cache.
MODELS: dict[str, tuple[str, dict, int]] = {
    "cla2": ("cla", {}, 3),
    "cla3": ("cla", {"layers_per_kv": 3}, 2),
    "yoco": ("yoco", {}, 4),
    "yoco from the embeddings": ("yoco", {"own_kv_layers": 0}, 1),
    "fusedkv": ("fusedkv", {}, 3),
    "fusedkv of two": ("fusedkv", {"own_kv_layers": 2}, 2),
}
ALL = pytest.mark.parametrize("name", MODELS)


def build(name: str = "fusedkv", dtype: torch.dtype = torch.float64, **fields):
    family, own, _ = MODELS[name]
    config_class, model_class = CLASSES[family]
    torch.manual_seed(0)
    lm = model_class(config_class(**SIZES | own | fields)).to(dtype)
    scramble(lm)
    return lm


# ------------------------------------------------------------------------------------- the second writing


def mixture(p: dict, layer: int, bottom: tuple, middle: tuple) -> tuple[list, list]:
    """One token's keys and values of a layer that mixes, number by number."""
    weight = {
        name: p[f"model.layers.{layer}.self_attn.fusion.{name}"]
        for name in ("key_bottom", "key_middle", "value_bottom", "value_middle")
    }
    keys, values = [], []
    for h, (low, high) in enumerate(zip(bottom[0], middle[0])):
        half = len(low) // 2
        keys.append(
            torch.stack(
                [
                    weight["key_bottom"][h][c % half] * low[c] + weight["key_middle"][h][c % half] * high[c]
                    for c in range(len(low))
                ]
            )
        )
    for h, (low, high) in enumerate(zip(bottom[1], middle[1])):
        values.append(weight["value_bottom"][h] * low + weight["value_middle"][h] * high)
    return keys, values


def definition(p: dict, s: reference.Settings, name: str, row: list, documents: list) -> Tensor:
    """Hidden states [T, D] after the final norm. Every layer: make the KV or take one, then attend."""
    family, own, _ = MODELS[name]
    positions = reference.positions_in_document(documents)
    x_T = [p["model.embed_tokens.weight"][token] for token in row]
    made: list[list] = []
    for layer in range(s.layers):
        if family == "cla":
            makes = layer % own.get("layers_per_kv", 2) == 0
        elif family == "yoco":
            makes = layer <= own.get("own_kv_layers", s.layers // 2)
        else:
            makes = layer < own.get("own_kv_layers", s.layers // 2)
        if makes:
            made.append([reference.own_entry(p, s, layer, x, i) for x, i in zip(x_T, positions)])
        entries = made[-1]
        if family == "fusedkv" and not makes:
            entries = [mixture(p, layer, low, high) for low, high in zip(made[0], made[-1])]
        out = []
        for i, x in enumerate(x_T):
            seen = [entries[j] for j in [*reference.visible(documents, i), i]]
            keys, values = [key for key, _ in seen], [value for _, value in seen]
            out.append(reference.attention_and_mlp(p, s, layer, x, positions[i], keys, values))
        x_T = out
    return torch.stack([reference.hidden(p, s, x) for x in x_T])


# ---------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module")
def wanted() -> Callable[[str], tuple[list[Tensor], dict[str, Tensor]]]:
    """Of a model, two rows' hidden states by the definition, and the gradients of their squares' sum."""
    known: dict = {}

    def of(name: str) -> tuple[list[Tensor], dict[str, Tensor]]:
        if name not in known:
            lm = build(name)
            input_ids, document_ids = batch("several", "filler")
            p = parameters(lm, requires_grad=True)
            rows = [
                definition(p, settings(lm), name, ids.tolist(), documents.tolist())
                for ids, documents in zip(input_ids, document_ids)
            ]
            for row, documents in zip(rows, document_ids):
                row[documents >= 0].square().sum().backward()
            grads = {key: weight.grad for key, weight in p.items() if key != "lm_head.weight"}
            known[name] = [row.detach() for row in rows], grads
        return known[name]

    return of


@pytest.mark.parametrize("policy", ["none", "layer"])
@ALL
def test_values_and_gradients_are_those_of_the_definition(name: str, policy: str, wanted: Callable) -> None:
    states, grads = wanted(name)
    lm = build(name).train()
    lm.model.recompute = policy
    input_ids, document_ids = batch("several", "filler")
    h = lm.model(input_ids=input_ids, document_ids=document_ids).last_hidden_state
    for got, want in zip(h, states):
        assert (got - want).abs().max() < 1e-10
    h[document_ids >= 0].square().sum().backward()
    found = dict(lm.model.named_parameters(prefix="model"))
    assert found.keys() == grads.keys()
    for key, weight in found.items():
        assert (weight.grad - grads[key]).abs().max() <= 1e-9 * max(1, grads[key].abs().max()), key
    assert all(weight.abs().max() > 0 for weight in grads.values())


@ALL
def test_the_cache_holds_what_is_made_and_decoding_is_the_forward(name: str) -> None:
    """Token by token, in chunks, and at once: the same logits; and only the shared KVs are stored."""
    lm = build(name).eval()
    row = tokens(2, 9)
    with torch.no_grad():
        whole = lm(row, use_cache=False).logits
        assert (lm.train()(row).logits - whole).abs().max() < 1e-12
        lm.eval()
        for cuts in ([1] * 9, [4, 3, 2]):
            cache, parts = None, []
            for part in row.split(cuts, dim=1):
                out = lm(part, **{CACHE_FIELD: cache}, use_cache=True)
                cache = getattr(out, CACHE_FIELD)
                parts.append(out.logits)
            assert (torch.cat(parts, 1) - whole).abs().max() < 1e-10
    kvs = MODELS[name][2]
    assert len(cache) == lm.config.num_kv_channels == cached_kvs(lm.config) == kvs
    assert size(cache) == 2 * 9 * cache_bytes(lm.config, torch.float64) == 2 * 9 * (2 * kvs * 2 * 8 * 8)


@pytest.mark.parametrize("name", ["cla2", "yoco", "fusedkv"])
def test_generation_in_padded_batches_with_and_without_cache_and_with_beams(name: str) -> None:
    lm = build(name, torch.float32).eval()
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    short, long = tokens(1, 4, seed=1), tokens(1, 7, seed=2)
    both = torch.cat((torch.cat((torch.zeros(1, 3, dtype=torch.long), short), 1), long))
    mask = torch.tensor([[0] * 3 + [1] * 4, [1] * 7])
    for beams in (1, 3):
        options = greedy | {"num_beams": beams}
        want = [lm.generate(row, **options)[0, row.shape[1] :] for row in (short, long)]
        for use_cache in (True, False):
            got = lm.generate(both, attention_mask=mask, use_cache=use_cache, **options)[:, 7:]
            assert torch.equal(got, torch.stack(want))
    with torch.no_grad():
        alone = lm(short).logits
        padded = lm(both, attention_mask=mask).logits[:1, 3:]
        assert (padded - alone).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["cla2", "yoco", "fusedkv"])
def test_another_document_changes_no_bit(name: str) -> None:
    lm = build(name, torch.float32).eval()
    documents = torch.tensor([[0] * 5 + [1] * 8])
    one, two = tokens(1, 13), tokens(1, 13)
    two[:, :5] = (two[:, :5] + 7) % 37
    with torch.no_grad():
        a, b = (lm(x, document_ids=documents, use_cache=False).logits for x in (one, two))
        alone = lm(one[:, 5:], use_cache=False).logits
    assert torch.equal(a[:, 5:], b[:, 5:])
    assert not torch.equal(a[:, :5], b[:, :5])
    assert (a[:, 5:] - alone).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("family", "own"),
    [("cla", {"layers_per_kv": 1}), ("yoco", {"own_kv_layers": 5}), ("fusedkv", {"own_kv_layers": 6})],
)
def test_without_sharing_it_is_qwen3(family: str, own: dict) -> None:
    """transformers' own model with the same weights under the same names."""
    config_class, model_class = CLASSES[family]
    lm = model_class(config_class(**SIZES, **own)).eval()
    scramble(lm)
    fields = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": SIZES["rope_theta"]}}
    fields.pop("rope_theta")
    qwen = Qwen3ForCausalLM(Qwen3Config(**fields, attn_implementation="sdpa")).eval()
    qwen.load_state_dict(lm.state_dict())
    row = tokens(2, 13)
    losses = [model(row, labels=row).loss for model in (lm, qwen)]
    with torch.no_grad():
        assert (lm(row).logits - qwen(row).logits).abs().max() < 1e-5
    assert abs(losses[0] - losses[1]) < 1e-6
    for loss in losses:
        loss.backward()
    theirs = dict(qwen.named_parameters())
    for key, weight in lm.named_parameters():
        assert (weight.grad - theirs[key].grad).abs().max() < 1e-5 * max(1, theirs[key].grad.abs().max()), key
    assert cached_kvs(lm.config) == cached_kvs(qwen.config) == 6


def test_fresh_fusion_takes_the_middle_layers_keys_and_the_bottom_layers_values() -> None:
    """FusedKV-Lite: the upper layers read these as they are."""
    torch.manual_seed(0)
    lm = FusedKVForCausalLM(FusedKVConfig(**SIZES)).double()
    fusion = lm.model.layers[4].self_attn.fusion
    bottom, middle = ((torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)) for _ in range(2))
    key, value = fusion(bottom, middle)
    assert torch.equal(key, middle[0])
    assert torch.equal(value, bottom[1])
    with torch.no_grad():
        before = lm(tokens(1, 9)).logits
        fusion.key_bottom += 0.5
        assert not torch.allclose(lm(tokens(1, 9)).logits, before)


def test_fused_keys_know_distances_only() -> None:
    """Rotary positions that all move by 11 change nothing: the two channels of a turn have one weight."""
    lm = build("fusedkv").eval()
    row, positions = tokens(1, 9), torch.arange(9)[None]
    with torch.no_grad():
        a, b = (lm(row, position_ids=p, use_cache=False).logits for p in (positions, positions + 11))
    assert (a - b).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["cla2", "yoco", "fusedkv"])
def test_it_is_saved_and_loaded_with_its_code(name: str, tmp_path) -> None:
    lm = build(name, torch.float32).eval()
    lm.save_pretrained(tmp_path / name)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name, trust_remote_code=True).eval()
    assert type(loaded).__module__.startswith("transformers_modules")
    assert loaded.config.reads == lm.config.reads
    with torch.no_grad():
        assert torch.equal(loaded(tokens(1, 9)).logits, lm(tokens(1, 9)).logits)
    held = lm.config.to_dict()
    assert not {"router_stride", "num_groups", "feedback", "num_kv_channels", "prefill"} & held.keys()
    assert type(lm.config).from_dict(held).to_dict() == held
    fresh = type(lm)(lm.config)
    assert all(0 < weight.std() < 0.03 for key, weight in fresh.named_parameters() if "proj" in key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_nan(dtype: torch.dtype) -> None:
    lm = build("fusedkv", dtype).train()
    documents = torch.tensor([[0] + [1] * 4 + [2] + [3] + [4] * 5, [-1] * 12])
    h = lm.model(input_ids=tokens(2, 12), document_ids=documents).last_hidden_state
    assert h.dtype == dtype
    assert torch.isfinite(h).all()
    h.float().square().sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in lm.model.parameters())


@pytest.mark.parametrize(
    ("config_class", "fields", "words"),
    [
        (CLAConfig, {"num_hidden_layers": 7}, r"layers_per_kv is 2; it must divide num_hidden_layers \(7\)"),
        (CLAConfig, {"layers_per_kv": 0}, "layers_per_kv is 0"),
        (
            YOCOConfig,
            {"num_hidden_layers": 7},
            "num_hidden_layers is 7, which has no half: set own_kv_layers",
        ),
        (YOCOConfig, {"own_kv_layers": 16}, "own_kv_layers is 16; .* between 0 and 15"),
        (FusedKVConfig, {"own_kv_layers": 1}, "own_kv_layers is 1; .* between 2 and 16"),
        (FusedKVConfig, {"own_kv_layers": 17}, "own_kv_layers is 17; .* between 2 and 16"),
        (
            CLAConfig,
            {"num_kv_channels": 3},
            "num_kv_channels is 3, but a cla model has no choice there: it is 8",
        ),
        (YOCOConfig, {"num_groups": 4}, "num_groups is 4, but a yoco model has no choice there: it is 1"),
        (
            FusedKVConfig,
            {"prefill": "cyclic"},
            "prefill is 'cyclic', but a fusedkv model has no choice there",
        ),
        (CLAConfig, {"attention": "flex"}, "attention is 'flex', but a cla model has no choice there"),
    ],
)
def test_impossible_models_are_refused(config_class: type, fields: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_class(**fields)


def test_passes_are_refused_where_there_are_none() -> None:
    lm = build("cla2", torch.float32).eval()
    row = tokens(1, 5)
    with pytest.raises(ValueError, match=r"schedule=.* has no effect on a cla model"):
        lm(row, schedule=Schedule.jacobi(2))
    with pytest.raises(ValueError, match="prefill='converged' has no effect on a cla model"):
        lm.generate(row, max_new_tokens=2, prefill="converged")
    with pytest.raises(ValueError, match="prefill_passes=3 has no effect"):
        lm.generate(row, max_new_tokens=2, prefill_passes=3)
    assert torch.equal(lm(row, prefill="exact").logits, lm(row).logits)
