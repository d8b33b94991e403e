"""Contradictions between fields and with the data."""

from __future__ import annotations

import pytest
import yaml

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
        ({"model__family": "fusedkv", "entries_on_host": True}, ("entries_on_host", "fusedkv has none")),
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


NO_EFFECT = [
    ({"optim__name": "adamw", "optim__momentum": 0.9}, "optim.momentum = 0.9", "name = adamw", "0.95"),
    ({"optim__name": "adamw", "optim__ns_steps": 6}, "optim.ns_steps = 6", "name = adamw", "5"),
    ({"optim__name": "adamw", "optim__head_rule": "muon"}, "optim.head_rule = muon", "adamw", "adamw"),
    ({"optim__head_rule": "muon", "model__tie_word_embeddings": True}, "head_rule = muon", "tie_w", "adamw"),
    ({"optim__decay": 30}, "optim.decay = 30", "schedule = cosine", "20%"),
    ({"optim__schedule": "constant", "optim__floor": 0.0}, "optim.floor = 0.0", "constant", "0.1"),
    ({"model__chunk_size": 8}, "model.chunk_size = 8", "schedule = cyclic", "null"),
    ({"model__schedule": "exact", "model__grad_passes": 3}, "grad_passes = 3", "schedule = exact", "null"),
    ({"model__schedule": "exact", "model__num_groups": 8}, "num_groups = 8", "schedule = exact", "null"),
    ({"model__feedback": False, "model__grad_passes": 2}, "grad_passes = 2", "feedback = false", "null"),
    ({"model__feedback": False, "model__no_grad_passes": 1}, "no_grad_passes = 1", "feedback", "null"),
    ({"model__feedback": False, "model__num_groups": 4}, "num_groups = 4", "feedback = false", "null"),
    (
        {"model__schedule": "exact", "model__start": "layerwise"},
        "start = layerwise",
        "schedule = exact",
        "null",
    ),
    (
        {"model__feedback": False, "model__start": "layerwise"},
        "start = layerwise",
        "feedback = false",
        "null",
    ),
    ({"model__start_missing": "embedding"}, "start_missing = embedding", "model.start = embedding", "null"),
    ({"model__start_grad": True}, "start_grad = True", "model.start = embedding", "null"),
    ({"model__routing": "static", "model__router_stride": 1}, "router_stride = 1", "routing = stat", "null"),
    ({"model__routing": "softmax", "model__router_init": "top"}, "router_init = top", "softmax", "null"),
]


@pytest.mark.parametrize(("changes", "key", "beside", "instead"), NO_EFFECT)
def test_a_key_that_nothing_would_read_is_refused_with_what_to_do(tmp_path, changes, key, beside, instead):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(changed(**changes)))
    with pytest.raises(ConfigError) as caught:
        configuration.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    assert key in message
    assert "has no effect with " in message
    assert beside in message
    assert message.endswith(f"leave it out, or set it to {instead}")
    # What it says helps, on the command line, too.
    name = message.split(": ")[1].split(" = ")[0]
    configuration.load(path, [f"{name}={instead}"])
    # A run that an earlier version has begun goes on, and is exported.
    path.write_text(configuration.dump(configuration.parse(changed(**changes))))
    assert configuration.load_record(path) == configuration.parse(changed(**changes))


def test_what_says_the_default_or_what_happens_anyhow_is_accepted(tmp_path):
    path = tmp_path / "run.yaml"
    for changes in (
        {"optim__name": "adamw", "optim__momentum": 0.95, "optim__ns_steps": 5},
        {"optim__decay": "20%"},
        {"model__feedback": False, "model__no_grad_passes": 0, "model__grad_passes": 1},
        {"model__routing": "static", "model__router_stride": 2},
        {"optim__clip": 0.0, "optim__clip_rule": "local"},  # switched off by its own key
        {"checkpoint__every": None, "checkpoint__keep_last": 5},
    ):
        path.write_text(yaml.safe_dump(changed(**changes)))
        config = configuration.load(path)
        path.write_text(configuration.dump(config))
        assert configuration.load(path) == config, "a run's own record, with every key, is a run's file, too"


def test_gathering_belongs_to_stage_3(tmp_path):
    config = configuration.parse(changed(zero3__gather="step"))
    validate.check_against_deepspeed(config, {"zero_optimization": {"stage": 3}})
    for stage in (0, 1, 2):
        said = f"zero3.gather = step has no effect at stage {stage} of .*=null"
        with pytest.raises(ConfigError, match=said):
            validate.check_against_deepspeed(config, {"zero_optimization": {"stage": stage}})
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(changed(zero3__gather="step")))
    remedied = configuration.load(path, ["zero3.gather=null"])
    validate.check_against_deepspeed(remedied, {"zero_optimization": {"stage": 2}})


@pytest.mark.parametrize(
    "text",
    ["steps: 2026-99-99\n", "? {a: 1}\n: 2\n", "[" * 5000, "? [a]\n: 1\n", "steps: !!python/name:os\n"],
)
def test_yaml_that_cannot_be_built_is_one_line(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        configuration.load(path)
    assert str(caught.value).startswith(f"{path}")
    path.write_text(yaml.safe_dump(changed()))
    with pytest.raises(ConfigError, match="the value is not valid YAML"):
        configuration.load(path, ["steps=2026-99-99"])


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
