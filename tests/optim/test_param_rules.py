"""Parameter tables."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.initialization import no_init_weights

from tests.support.optimizers import SIZES, optimizer, shapes, whitematter
from wm_ds.config.load import load
from wm_ds.engine.deepspeed_config import table_for
from wm_ds.families import model_class, model_config
from wm_ds.optim.param_rules import OptimizerError, parameter_table


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
    **{
        f"model.layers.*.self_attn.fusion.{side}_{place}": ("adamw", 0.0)
        for side in ("key", "value")
        for place in ("bottom", "middle")
    },
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
    expected = tuple("qkvo") if family == "vanilla" else ("q", "o")
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
        ("related_cla2", 16 * BLOCK + 8 * KV),
        ("related_yoco", 16 * BLOCK + 8 * KV),
        ("related_fusedkv", 16 * BLOCK + 8 * KV),
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
