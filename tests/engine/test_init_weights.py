"""Weights drawn one by one are those of the whole model, bit for bit, in a fraction of its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.config.test_load import changed
from wm_ds.config import load as configuration
from wm_ds.engine.init_weights import Shell, place
from wm_ds.families import build_model, model_config
from wm_ds.plan.storage_tracker import StorageTracker

FAMILIES: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True, "num_kv_channels": 4},
    {"routing": "static", "num_kv_channels": 1},
    {"routing": "softmax"},
    {"routing": "fixed", "num_kv_channels": 4},
    {"feedback": False, "num_kv_channels": 4, "no_grad_passes": 0, "grad_passes": 1},
    {"family": "vanilla"},
    {"family": "vanilla", "tie_word_embeddings": True},
    {"family": "lckv", "warmup_layers": 1},
    {"family": "fusedkv"},
]


def hf_config(fields: dict[str, Any], eos_id: int | None = 3) -> Any:
    config = configuration.parse(changed(**{f"model__{k}": v for k, v in fields.items()}))
    return model_config(config.model, vocab_size=50, seq_len=32, eos_id=eos_id)


@pytest.mark.parametrize("fields", FAMILIES, ids=str)
def test_values_are_those_of_the_whole_model(fields):
    whole = build_model(hf_config(fields), seed=5)
    shell = Shell(hf_config(fields))
    assert all(p.is_meta for p in shell.lm.parameters())
    expected = dict(whole.named_parameters())
    found = dict(shell.values(5))
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == torch.float32
        assert torch.equal(value.view(torch.int32), expected[name].detach().view(torch.int32)), name
    again, other = dict(shell.values(5)), dict(shell.values(6))
    embedding = "model.embed_tokens.weight"
    assert torch.equal(again[embedding], found[embedding])
    assert not torch.equal(other[embedding], found[embedding])


def test_drawing_leaves_the_generator_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    values = Shell(hf_config({})).values(0)
    next(values)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("fields", FAMILIES, ids=str)
def test_a_placed_model_computes_the_same(fields):
    whole = build_model(hf_config(fields), seed=5).eval()
    shell = Shell(hf_config(fields))
    lm = shell.lm.eval()
    place(lm, shell.values(5), {"zero_optimization": {"stage": 2}}, torch.device("cpu"))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(lm(ids, use_cache=False).logits, whole(ids, use_cache=False).logits)
    tied = fields.get("tie_word_embeddings", False)
    assert (lm.lm_head.weight is lm.model.embed_tokens.weight) == tied


def test_bf16_weights_are_placed_in_bf16():
    shell = Shell(hf_config({}))
    full = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    place(shell.lm, shell.values(0), full, torch.device("cpu"))
    whole = build_model(hf_config({}), seed=0)
    for (name, p), expected in zip(shell.lm.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, expected.bfloat16()), name


def test_a_value_that_is_missing_is_named():
    shell = Shell(hf_config({}))
    values = ((n, v) for n, v in shell.values(0) if n != "model.norm.weight")
    with pytest.raises(ValueError, match=r"no value was given for model\.norm\.weight"):
        place(shell.lm, values, {"zero_optimization": {"stage": 0}}, torch.device("cpu"))


def test_never_more_than_a_few_parameters_exist():
    fields = {"num_hidden_layers": 24, "num_kv_channels": 2, "hidden_size": 96, "intermediate_size": 128}
    shell = Shell(hf_config(fields))
    total = largest = 0
    with StorageTracker() as tracker:
        for _, value in shell.values(0):
            total, largest = total + value.nbytes, max(largest, value.nbytes)
            del value
    assert total > 20 * largest
    assert tracker.peak < 3 * largest
