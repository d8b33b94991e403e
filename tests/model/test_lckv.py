"""The LCKV sandwich against its definition written a second time, token by token, and against itself."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.model.test_cache import size
from tests.support import reference
from tests.support.tiny import batch, parameters, scramble, settings, tokens
from wm_ds.model import LCKVConfig, LCKVForCausalLM, Schedule
from wm_ds.model.cache import CACHE_FIELD

POLICIES = ["none", "layer", "group", "group+layer"]


def build(w: int = 3, layers: int = 6, *, dtype: torch.dtype = torch.float64, **fields) -> LCKVForCausalLM:
    sizes = {
        "vocab_size": 37,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000.0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    lm = LCKVForCausalLM(LCKVConfig(warmup_layers=w, num_hidden_layers=layers, **(sizes | fields))).to(dtype)
    scramble(lm)
    return lm


# ------------------------------------------------------------------------------------- the second writing


def own_kv(p: dict, s: reference.Settings, layer: int, x: Tensor, position: int) -> tuple[list, list]:
    at = f"model.layers.{layer}."
    normed = reference.rms_norm(x, p[at + "input_layernorm.weight"], s.eps)
    keys = reference.split_heads(p[at + "self_attn.k_proj.weight"] @ normed, s.kv_heads)
    keys = [reference.rms_norm(key, p[at + "self_attn.k_norm.weight"], s.eps) for key in keys]
    keys = [reference.rotate(key, position, s.theta) for key in keys]
    return keys, reference.split_heads(p[at + "self_attn.v_proj.weight"] @ normed, s.kv_heads)


def vanilla_layer(
    p: dict, s: reference.Settings, layer: int, row: list, positions: list, documents: list
) -> list:
    entries = [own_kv(p, s, layer, x, position) for x, position in zip(row, positions)]
    out = []
    for i, x in enumerate(row):
        seen = [entries[j] for j in [*reference.visible(documents, i), i]]
        keys, values = [e[0] for e in seen], [e[1] for e in seen]
        out.append(reference.attention_and_mlp(p, s, layer, x, positions[i], keys, values))
    return out


def sandwich(
    p: dict, s: reference.Settings, w: int, row: list, documents: list, steps: list, no_grad: int = 0
) -> Tensor:
    """Hidden states [T, D] after the final norm; `steps` as in reference.passes."""
    positions = reference.positions_in_document(documents)
    bottom, top = w // 2, s.layers - (w - w // 2)
    states = [p["model.embed_tokens.weight"][token] for token in row]
    for layer in range(bottom):
        states = vanilla_layer(p, s, layer, states, positions, documents)
    zero = [torch.zeros(s.head_dim, dtype=torch.float64)] * s.kv_heads
    shared = [own_kv(p, s, top - 1, x, position) for x, position in zip(states, positions)]
    if no_grad:
        shared = list(reference.detach(shared))
    finals = list(states)
    for step in steps:
        written = []
        for i, number in step:
            seen = [(zero, zero)] + [shared[j] for j in reference.visible(documents, i)]
            with torch.set_grad_enabled(number >= no_grad):
                x = states[i]
                for layer in range(bottom, top):
                    entering = x
                    x = reference.attention_and_mlp(
                        p, s, layer, x, positions[i], [e[0] for e in seen], [e[1] for e in seen]
                    )
            entry = own_kv(p, s, top - 1, entering, positions[i])
            written.append((i, entry if number >= no_grad - 1 else reference.detach([entry])[0], x))
        for i, entry, x in written:
            shared[i], finals[i] = entry, x
    for layer in range(top, s.layers):
        finals = vanilla_layer(p, s, layer, finals, positions, documents)
    return torch.stack([reference.hidden(p, s, x) for x in finals])


def view(lm: LCKVForCausalLM) -> reference.Settings:
    return settings(lm)


# ---------------------------------------------------------------------------------------------- the tests

SCHEDULES = {
    "exact": (Schedule.exact(), reference.one_by_one(13)),
    "jacobi": (Schedule.jacobi(3, no_grad=1), reference.cyclic(13, 1, 3)),
    "jacobi once": (Schedule.jacobi(1), reference.cyclic(13, 1, 1)),
    "cyclic": (Schedule.cyclic(4, 2), reference.cyclic(13, 4, 2)),
}


@pytest.mark.parametrize("w", [0, 1, 3, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_values_are_those_of_the_definition(name: str, w: int) -> None:
    lm = build(w).eval()
    input_ids, document_ids = batch("several", "filler", "one")
    schedule, steps = SCHEDULES[name]
    with torch.no_grad():
        got = lm.model(input_ids=input_ids, document_ids=document_ids, schedule=schedule).last_hidden_state
    p = parameters(lm)
    for row in range(3):
        want = sandwich(p, view(lm), w, input_ids[row].tolist(), document_ids[row].tolist(), steps)
        assert (got[row] - want).abs().max() < 1e-10


@pytest.fixture(scope="module")
def wanted() -> dict:
    """Loss and gradients of the definition: three Jacobi passes, the first detached."""
    lm = build(3)
    input_ids, document_ids = batch("several", "filler")
    p = parameters(lm, requires_grad=True)
    for row in range(2):
        h = sandwich(
            p,
            view(lm),
            3,
            input_ids[row].tolist(),
            document_ids[row].tolist(),
            reference.cyclic(13, 1, 3),
            no_grad=1,
        )
        h[document_ids[row] >= 0].square().sum().backward()
    return {name: p[name].grad for name, _ in lm.model.named_parameters(prefix="model")}


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_those_of_the_definition(policy: str, wanted: dict) -> None:
    lm = build(3, no_grad_passes=1, grad_passes=2).train()
    lm.model.recompute = policy
    input_ids, document_ids = batch("several", "filler")
    h = lm.model(input_ids=input_ids, document_ids=document_ids).last_hidden_state
    h[document_ids >= 0].square().sum().backward()
    for name, weight in lm.model.named_parameters(prefix="model"):
        assert (weight.grad - wanted[name]).abs().max() <= 1e-9 * max(1, wanted[name].abs().max()), name


def test_decoding_equals_the_converged_training_path() -> None:
    """Token by token through the cache, and Jacobi passes in training mode until nothing can change."""
    lm = build(3)
    row = tokens(2, 9)
    trained = lm.train()(row, schedule=Schedule.jacobi(9, no_grad=7)).logits
    lm.eval()
    cache, decoded = None, []
    with torch.no_grad():
        for i in range(9):
            out = lm(row[:, i : i + 1], **{CACHE_FIELD: cache}, use_cache=True)
            cache = getattr(out, CACHE_FIELD)
            decoded.append(out.logits)
        tolerant = lm(row, prefill="converged", prefill_tolerance=0.0).logits
    assert (torch.cat(decoded, 1) - trained).abs().max() < 1e-10
    assert (tolerant - trained).abs().max() < 1e-10


def test_the_cache_holds_warm_up_layers_and_one_more() -> None:
    lm = build(3, 6, dtype=torch.float32).eval()
    with torch.no_grad():
        cache = getattr(lm(tokens(2, 7), use_cache=True), CACHE_FIELD)
    assert cache.get_seq_length() == 7
    assert len(cache) == lm.config.num_kv_channels == 4
    assert size(cache) == 4 * 2 * 2 * 8 * 2 * 7 * 4


def test_generation_with_padding_cache_and_parts() -> None:
    lm = build(3, dtype=torch.float32, prefill="exact").eval()
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    short, long = tokens(1, 4, seed=1), tokens(1, 7, seed=2)
    want = [lm.generate(row, **settings)[0, row.shape[1] :] for row in (short, long)]
    both = torch.cat((torch.cat((torch.zeros(1, 3, dtype=torch.long), short), 1), long))
    mask = torch.tensor([[0] * 3 + [1] * 4, [1] * 7])
    for use_cache in (True, False):
        got = lm.generate(both, attention_mask=mask, use_cache=use_cache, **settings)[:, 7:]
        assert torch.equal(got, torch.stack(want))
    with torch.no_grad():
        whole = lm(long).logits
        cache = getattr(lm(long[:, :3]), CACHE_FIELD)
        assert (lm(long[:, 3:], **{CACHE_FIELD: cache}).logits - whole[:, 3:]).abs().max() < 1e-4


@pytest.mark.parametrize("schedule", [Schedule.exact(), Schedule.jacobi(2)], ids=lambda s: s.kind)
def test_another_document_changes_no_bit(schedule: Schedule) -> None:
    lm = build(dtype=torch.float32).eval()
    documents = torch.tensor([[0] * 5 + [1] * 8])
    one, two = tokens(1, 13), tokens(1, 13)
    two[:, :5] = (two[:, :5] + 7) % 37
    with torch.no_grad():
        a, b = (lm(x, document_ids=documents, schedule=schedule, use_cache=False).logits for x in (one, two))
    assert torch.equal(a[:, 5:], b[:, 5:])
    assert not torch.equal(a[:, :5], b[:, :5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_nan(dtype: torch.dtype) -> None:
    lm = build(dtype=dtype).train()
    documents = torch.tensor([[0] + [1] * 4 + [2] + [3] + [4] * 5, [-1] * 12])
    h = lm.model(input_ids=tokens(2, 12), document_ids=documents).last_hidden_state
    assert torch.isfinite(h).all()
    h.float().square().sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in lm.model.parameters())


@pytest.mark.parametrize(
    ("w", "count", "middle"), [(4, 48_679_392, range(2, 14)), (7, 49_564_416, range(3, 12))]
)
def test_the_papers_sizes(w: int, count: int, middle: range) -> None:
    with torch.device("meta"):
        lm = LCKVForCausalLM(LCKVConfig(warmup_layers=w, vocab_size=151_936))
    assert lm.config.condensed == middle
    assert lm.config.training_schedule() == Schedule.jacobi(9, no_grad=7)
    assert (
        sum(v.numel() for k, v in lm.named_parameters() if "embed" not in k and "lm_head" not in k) == count
    )


def test_it_is_saved_and_loaded_with_its_code(tmp_path) -> None:
    lm = build(3, dtype=torch.float32).eval()
    lm.save_pretrained(tmp_path / "sandwich")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sandwich", trust_remote_code=True).eval()
    assert type(loaded).__module__.startswith("transformers_modules")
    assert loaded.config.warmup_layers == 3
    assert loaded.config.num_kv_channels == 4
    with torch.no_grad():
        assert torch.equal(loaded(tokens(1, 9)).logits, lm(tokens(1, 9)).logits)
    fresh = LCKVForCausalLM(lm.config)
    assert all(0 < weight.std() < 0.03 for name, weight in fresh.named_parameters() if "proj" in name)


def test_impossible_sandwiches_are_refused() -> None:
    with pytest.raises(ValueError, match="warmup_layers is 6"):
        LCKVConfig(warmup_layers=6, num_hidden_layers=6)
