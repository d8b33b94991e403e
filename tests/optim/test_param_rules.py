"""Parameter tables, Muon's update, weight decay, and the learning rate's pins."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.initialization import no_init_weights

from wm_ds.config.load import load
from wm_ds.engine.deepspeed_config import table_for
from wm_ds.families import model_class, model_config
from wm_ds.model import WhiteMatterConfig, WhiteMatterForCausalLM
from wm_ds.optim.param_rules import (
    MuonAdamW,
    OptimizerError,
    learning_rate,
    muon_scale,
    orthogonalize,
    parameter_table,
)
from wm_ds.optim.partition import Fragment, Master

SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def whitematter(**fields: object) -> WhiteMatterForCausalLM:
    return WhiteMatterForCausalLM(WhiteMatterConfig(**SIZES, num_kv_channels=2, router_stride=2, **fields))


def shapes(lm: torch.nn.Module) -> list:
    return [(name, tuple(p.shape)) for name, p in lm.named_parameters()]


def optimizer(lm: torch.nn.Module, lr: float, **table: object) -> MuonAdamW:
    """As in an engine of one rank at stage 0."""
    parameters = dict(lm.named_parameters())
    rows = parameter_table(shapes(lm), **table)
    found = MuonAdamW(rows, parameters, lr=lr, ns_dtype=torch.float32)
    names = {id(p): n for n, p in parameters.items()}
    masters, fragments = [], []
    for i, group in enumerate(found.param_groups):
        for p in group["params"]:
            masters.append(Master(p, i, (names[id(p)],)))
            fragments.append(Fragment(names[id(p)], tuple(p.shape), 0, p.numel(), p, 0, i))
    found.attach(masters, fragments, torch.device("cpu"))
    return found


def test_whitematter_table_is_pinned():
    rows = {
        r.name: (r.rule, r.decay, r.matrices if r.rule == "muon" else None)
        for r in parameter_table(shapes(whitematter()))
    }
    layer = "model.layers.2."
    expected = {
        "model.dummy_key": ("adamw", 0.0, None),  # [k, G, d]: three dimensions, no matrices
        "model.dummy_value": ("adamw", 0.0, None),
        "model.embed_tokens.weight": ("adamw", 0.1, None),
        "lm_head.weight": ("adamw", 0.1, None),
        "model.norm.weight": ("adamw", 0.0, None),
        f"{layer}input_layernorm.weight": ("adamw", 0.0, None),
        f"{layer}post_attention_layernorm.weight": ("adamw", 0.0, None),
        f"{layer}self_attn.q_norm.weight": ("adamw", 0.0, None),
        f"{layer}self_attn.q_proj.weight": ("muon", 0.1, 1),
        f"{layer}self_attn.o_proj.weight": ("muon", 0.1, 1),
        f"{layer}mlp.gate_proj.weight": ("muon", 0.1, 1),
        f"{layer}mlp.up_proj.weight": ("muon", 0.1, 1),
        f"{layer}mlp.down_proj.weight": ("muon", 0.1, 1),
        "model.pool.key.head_norm": ("adamw", 0.0, None),
    }
    for branch in ("model.pool.key.", "model.pool.value."):
        expected |= {
            f"{branch}source_norm": ("adamw", 0.0, None),  # [L, D]: two dimensions, no matrix
            f"{branch}router_weight": ("muon", 0.1, 1),
            f"{branch}router_bias": ("adamw", 0.0, None),
            f"{branch}channel_norm": ("adamw", 0.0, None),
            f"{branch}proj": ("muon", 0.1, 2),  # one matrix per channel
        }
    assert {n: r for n, r in rows.items() if ".layers." not in n or n.startswith(layer)} == expected
    assert len(rows) == len(list(whitematter().parameters()))


def test_vanilla_table_is_pinned():
    rows = {
        r.name: (r.rule, r.decay) for r in parameter_table(shapes(Qwen3ForCausalLM(Qwen3Config(**SIZES))))
    }
    attention = {f"self_attn.{m}_proj.weight": ("muon", 0.1) for m in "qkvo"}
    mlp = {f"mlp.{m}_proj.weight": ("muon", 0.1) for m in ("gate", "up", "down")}
    norms = ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm")
    expected = attention | mlp | {f"{n}.weight": ("adamw", 0.0) for n in norms}
    assert {n.removeprefix("model.layers.1."): r for n, r in rows.items() if "layers.1." in n} == expected
    assert rows["lm_head.weight"] == rows["model.embed_tokens.weight"] == ("adamw", 0.1)
    assert rows["model.norm.weight"] == ("adamw", 0.0)


# (rule, decay) by name, the layer's number left out; every parameter of every shipped run is one of these.
TABLE = {
    **dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("adamw", 0.1)),
    **{f"model.layers.*.self_attn.{m}_proj.weight": ("muon", 0.1) for m in "qkvo"},
    **{f"model.layers.*.mlp.{m}_proj.weight": ("muon", 0.1) for m in ("gate", "up", "down")},
    **{f"model.layers.*.self_attn.{m}_norm.weight": ("adamw", 0.0) for m in "qk"},
    **{f"model.layers.*.{m}_layernorm.weight": ("adamw", 0.0) for m in ("input", "post_attention")},
    **{f"model.pool.{b}.{m}": ("muon", 0.1) for b in ("key", "value") for m in ("proj", "router_weight")},
    **{f"model.pool.{b}.{m}_norm": ("adamw", 0.0) for b in ("key", "value") for m in ("source", "channel")},
    **{f"model.pool.{b}.router_bias": ("adamw", 0.0) for b in ("key", "value")},
    **dict.fromkeys(("model.pool.key.head_norm", "model.norm.weight"), ("adamw", 0.0)),
    **dict.fromkeys(("model.dummy_key", "model.dummy_value"), ("adamw", 0.0)),
}
CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_table_of_every_shipped_run_is_pinned(path):
    config = load(path)
    hf = model_config(config.model, vocab_size=151_936, seq_len=2048, eos_id=0)
    with torch.device("meta"), no_init_weights():
        lm = model_class(hf)(hf)
        lm.tie_weights()
    rows = table_for(config, lm)
    assert [r.name for r in rows] == [name for name, _ in lm.named_parameters()]
    layers, family = hf.num_hidden_layers, config.model.family
    expected = {"whitematter": ("q", "o"), "vanilla": tuple("qkvo"), "lckv": ("q", "o")}[family]
    for row in rows:
        assert (row.rule, row.decay) == TABLE[re.sub(r"\.\d+\.", ".*.", row.name)], row.name
        stacked = row.name.startswith("model.pool.") and row.name.endswith("proj")
        assert row.matrices == (hf.num_kv_channels if stacked else 1) or row.rule == "adamw"
        if row.rule == "muon":  # rms: the size of an AdamW update
            assert row.scale == pytest.approx(0.2 * math.sqrt(max(row.shape[-2:])))
    for projection in expected:
        of_layers = [r for r in rows if r.name.endswith(f"self_attn.{projection}_proj.weight")]
        assert len(of_layers) == layers


# Elements under Muon, summed by hand: D=512, I=1536, heads 6 and 3 of 96, p=2.
BLOCK, KV = 2 * 512 * 576 + 3 * 512 * 1536, 2 * 512 * 288


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("paper_vanilla_16l", 16 * (BLOCK + KV)),
        ("paper_vanilla_32l", 32 * (BLOCK + KV)),
        ("paper_wm_k8", 16 * BLOCK + 8 * KV + 2 * 8 * 16 * 8 * 512),
        ("paper_wm_k16", 16 * BLOCK + 16 * KV + 2 * 16 * 16 * 8 * 512),
        ("ablation_static_k16", 16 * BLOCK + 16 * KV),
        ("paper_lckv_w7", 16 * BLOCK + 8 * KV),
    ],
)
def test_what_muon_updates_by_hand(name, elements):
    config = load(CONFIGS[0].parent / f"{name}.yaml")
    hf = model_config(config.model, vocab_size=151_936, seq_len=2048, eos_id=0)
    with torch.device("meta"), no_init_weights():
        rows = table_for(config, model_class(hf)(hf))
    assert sum(math.prod(r.shape) for r in rows if r.rule == "muon") == elements


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_group(tied):
    lm = whitematter(tie_word_embeddings=tied)
    grouped = [p for g in optimizer(lm, 1e-3).param_groups for p in g["params"]]
    assert len({id(p) for p in grouped}) == len(grouped)
    assert sum(p.numel() for p in grouped) == sum(p.numel() for p in lm.parameters())


def test_embedding_and_head_follow_the_configuration_and_adamw_takes_all():
    rows = {
        r.name: r.rule
        for r in parameter_table(shapes(whitematter()), embedding_rule="muon", head_rule="muon")
    }
    assert rows["lm_head.weight"] == rows["model.embed_tokens.weight"] == "muon"
    assert rows["model.pool.key.source_norm"] == "adamw"
    assert {r.rule for r in parameter_table(shapes(whitematter()), optimizer="adamw")} == {"adamw"}


def test_a_parameter_that_no_rule_names_is_refused():
    with pytest.raises(OptimizerError, match=r"model\.extra \[3, 4\] has no optimizer rule"):
        parameter_table([("model.extra", (3, 4))])


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (31, 31), (3, 16, 24)])
def test_orthogonalized_singular_values_are_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalize(matrix, dtype=torch.float32))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_stack_is_orthogonalized_matrix_by_matrix():
    stack = torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(1))
    alone = torch.stack([orthogonalize(m, dtype=torch.float32) for m in stack])
    torch.testing.assert_close(orthogonalize(stack, dtype=torch.float32), alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize(("scale", "name"), [("rms", "match_rms_adamw"), ("spectral", "original")])
def test_one_update_equals_torchs_muon(shape, scale, name):
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    theirs = torch.nn.Parameter(start.clone())
    reference = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn=name)
    theirs.grad = grad.clone()
    reference.step()
    update = grad * 0.05
    update = orthogonalize(grad * 0.05 + update * 0.95, dtype=torch.bfloat16) * muon_scale(*shape, scale)
    ours = start * (1 - 0.01 * 0.1) - 0.01 * update
    # Both iterate in bf16, with their products in another order.
    assert (ours - theirs).norm() < 0.05 * (start - theirs).norm()


def test_adamw_equals_torchs():
    torch.manual_seed(0)
    lm, twin = whitematter(), whitematter()
    twin.load_state_dict(lm.state_dict())
    ours = optimizer(lm, 1e-2, optimizer="adamw")
    decayed = {r.name: r.decay for r in ours.table.values()}
    groups = [
        {"params": [p for n, p in twin.named_parameters() if decayed[n] == d], "weight_decay": d}
        for d in (0.1, 0.0)
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(3):
        for p, q in zip(lm.parameters(), twin.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        ours.count_update()
        theirs.step()
    for (name, p), q in zip(lm.named_parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7, msg=name)


def test_decay_shrinks_what_is_decayed_and_nothing_else():
    torch.manual_seed(0)
    lm = whitematter()
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(torch.rand_like(p))
    before = {n: p.detach().clone() for n, p in lm.named_parameters()}
    rule = optimizer(lm, 0.1)
    for p in lm.parameters():
        p.grad = torch.zeros_like(p)
    rule.step()
    for name, p in lm.named_parameters():
        if rule.table[name].decay:
            torch.testing.assert_close(p.detach(), before[name] * (1 - 0.1 * 0.1), rtol=1e-6, atol=0)
        else:
            assert torch.equal(p.detach(), before[name]), name


def test_a_skipped_step_changes_nothing():
    lm = whitematter()
    rule = optimizer(lm, 0.1)
    before = {n: p.detach().clone() for n, p in lm.named_parameters()}
    for p in lm.parameters():
        p.grad = torch.full_like(p, float("nan"))
    rule.skip = True
    rule.step()
    assert all(torch.equal(p, before[n]) for n, p in lm.named_parameters())
    assert all(t.abs().max() == 0 for state in rule.state.values() for t in state.values())


# Steps are counted from 1; 3e-4 at its peak, ten of warm-up, a hundred in all, to a tenth.
PINS = {"peak": 3e-4, "total": 100, "warmup": 10, "floor": 0.1}


@pytest.mark.parametrize(
    ("step", "lr"), [(1, 3e-5), (5, 1.5e-4), (10, 3e-4), (55, 1.65e-4), (100, 3e-5), (120, 3e-5)]
)
def test_cosine_is_pinned(step, lr):
    assert learning_rate(step, **PINS) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(("step", "lr"), [(1, 3e-5), (10, 3e-4), (80, 3e-4), (90, 1.65e-4), (100, 3e-5)])
def test_wsd_is_pinned(step, lr):
    assert learning_rate(step, **PINS, kind="wsd", decay=20) == pytest.approx(lr, rel=1e-12)


def test_schedules_are_monotone_and_never_leave_their_bounds():
    for kind in ("cosine", "wsd", "constant"):
        values = [learning_rate(s, **PINS, kind=kind, decay=30) for s in range(1, 101)]
        assert values[:10] == sorted(values[:10])
        assert values[9:] == sorted(values[9:], reverse=True)
        assert max(values) == 3e-4
        assert min(values) == pytest.approx(3e-5)
    assert learning_rate(1, **(PINS | {"warmup": 0})) < 3e-4
    assert math.isclose(learning_rate(100, **(PINS | {"warmup": 100})), 3e-4)
