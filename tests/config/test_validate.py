"""Contradictions between fields and with the data."""

from __future__ import annotations

import pytest

from tests.config.test_load import changed, refusal
from wm_ds.config import load as configuration
from wm_ds.config import validate
from wm_ds.config.schema import ConfigError


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"precision": "fp16"}, ("precision = fp16", "optim.name = muon", "autocast or bf16")),
        ({"precision": "fp16", "optim__name": "adamw"}, ("precision = fp16", "loss scale")),
        ({"tokens": 5}, ("steps = 100", "tokens = 5")),
        ({"steps": None}, ("steps = None", "tokens = None")),
        ({"model__family": "vanilla", "model__num_groups": 4}, ("model.num_groups = 4", "vanilla")),
        ({"model__family": "vanilla", "recompute": "group"}, ("recompute = group", "vanilla")),
        ({"model__family": "vanilla", "model__attention": "flex"}, ("model.attention = flex", "vanilla")),
        ({"model__family": "cla", "model__schedule": "exact"}, ("model.schedule = exact", "not cla")),
        ({"model__family": "cla", "model__own_kv_layers": 2}, ("own_kv_layers = 2", "yoco or fusedkv")),
        ({"model__layers_per_kv": 2}, ("model.layers_per_kv = 2 belongs to family cla", "not whitematter")),
        ({"model__family": "yoco", "recompute": "group"}, ("recompute = group", "yoco", "none or layer")),
        ({"model__family": "fusedkv", "entries_on_host": True}, ("entries_on_host", "fusedkv has not")),
        ({"model__family": "cla", "sequence_parallel": 2}, ("sequence_parallel = 2", "model.family = cla")),
        ({"model__num_kv_channels": 5}, ("num_kv_channels = 5", "num_hidden_layers = 4")),
        ({"model__num_key_value_heads": 3}, ("num_attention_heads = 4", "num_key_value_heads = 3")),
        ({"checkpoint__every": 100, "checkpoint__keep_every": 150}, ("keep_every = 150", "every = 100")),
        ({"optim__lr": "fast"}, ("optim.lr", "fast")),
        ({"batch__global_batch": 0}, ("batch.global_batch", "0")),
        ({"model__hidden_size": 1.5}, ("model.hidden_size", "1.5")),
        ({"run__deterministic": "yes"}, ("run.deterministic", "yes")),
        ({"optim": 5}, ("optim must be a section",)),
    ],
)
def test_contradictions_and_wrong_values_name_both_sides(changes, said):
    message = refusal(changed(**changes))
    assert all(part in message for part in said), message


def test_data_that_does_not_fit():
    config = configuration.parse(changed(model__vocab_size=100))
    validate.check_against_data(config, vocab_size=100, seq_len=16, sequences=5, num_groups=8)
    with pytest.raises(
        ConfigError, match=r"model\.vocab_size = 100 is smaller than the data's tokenizer \(101"
    ):
        validate.check_against_data(config, vocab_size=101, seq_len=16, sequences=5, num_groups=8)


def test_a_copy_inside_each_node_needs_ranks_that_divide():
    config = configuration.parse(changed(batch__global_batch=12, batch__micro_batch=1))
    json = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}
    validate.check_against_launch(config, json, 4)
    validate.check_against_launch(config, {"zero_optimization": {"zero_hpz_partition_size": "auto"}}, 6)
    with pytest.raises(ConfigError, match=r"zero_hpz_partition_size = 4 does not divide the 6 ranks"):
        validate.check_against_launch(config, json, 6)
    with pytest.raises(ConfigError, match="global_batch"):
        validate.check_against_launch(config, json, 8)
