"""The table of families agrees with what a run may name, and with the classes themselves."""

import inspect
from typing import get_args

import pytest
import torch

from wm_ds.config.schema import PLAIN_FAMILIES, ConfigError, Model
from wm_ds.families import (
    FAMILIES,
    MODEL_TYPES,
    NAMES,
    WITHOUT_QK_NORM,
    cache_bytes,
    cached_kvs,
    family_of,
    has_passes,
    mixes_layers,
    model_class,
    model_config,
)
from wm_ds.model import LCKVConfig, WhiteMatterConfig


def test_a_run_may_name_every_family_and_no_other():
    assert set(get_args(Model.model_fields["family"].annotation)) == set(NAMES)
    assert len(NAMES) == len(FAMILIES)
    assert len(MODEL_TYPES) == len(FAMILIES) + len(WITHOUT_QK_NORM)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_columns_are_what_the_classes_are(family):
    forward = inspect.signature(family.model_class.forward).parameters
    assert family.takes_documents == ("document_ids" in forward)
    config = family.config_class()
    assert family.has_passes == (hasattr(config, "training_schedule") and config.feedback)
    assert family.own_code == family.model_class.__module__.startswith("wm_ds.model.")
    assert family.model_class.config_class is family.config_class
    assert family_of(config) is family
    assert model_class(config) is family.model_class


def test_what_depends_on_the_configuration_too():
    without = {"feedback": False, "num_kv_channels": 16, "num_hidden_layers": 16}
    assert has_passes(WhiteMatterConfig())
    assert mixes_layers(WhiteMatterConfig())
    assert not has_passes(WhiteMatterConfig(**without))
    assert not mixes_layers(WhiteMatterConfig(**without))
    assert has_passes(LCKVConfig())
    assert not mixes_layers(LCKVConfig())
    for name in PLAIN_FAMILIES:
        assert not has_passes(NAMES[name].config_class())
        assert not mixes_layers(NAMES[name].config_class())


def test_plain_families_are_those_without_passes():
    assert set(PLAIN_FAMILIES) == {family.name for family in FAMILIES if not family.has_passes}


@pytest.mark.parametrize(
    ("name", "fields", "kvs"),
    [
        ("vanilla", {}, 16),
        ("whitematter", {"num_kv_channels": 8}, 8),
        ("lckv", {"warmup_layers": 4}, 5),
        ("cla", {}, 8),
        ("yoco", {}, 9),
        ("yoco", {"own_kv_layers": 7}, 8),
        ("fusedkv", {}, 8),
    ],
)
def test_bytes_of_a_token_in_the_cache(name, fields, kvs):
    """Of the paper's sizes: keys and values, three heads of 96."""
    sizes = {"num_hidden_layers": 16, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 96}
    config = NAMES[name].config_class(**sizes, **fields)
    assert cached_kvs(config) == kvs
    assert cache_bytes(config, torch.bfloat16) == 2 * kvs * 288 * 2
    assert cache_bytes(config, torch.float32) == 2 * kvs * 288 * 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"family": "cla", "num_hidden_layers": 7}, r"model: layers_per_kv is 2; it must divide .* \(7\)"),
        ({"family": "yoco", "num_hidden_layers": 7}, "model: num_hidden_layers is 7, which has no half"),
        ({"family": "fusedkv", "own_kv_layers": 1}, "model: own_kv_layers is 1; .* between 2 and 4"),
    ],
)
def test_a_run_with_an_impossible_sharing_is_refused_in_one_line(changes, words):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4, "head_dim": 8}
    model = Model(**sizes | {"num_attention_heads": 2, "num_key_value_heads": 1} | changes)
    with pytest.raises(ConfigError, match=words) as caught:
        model_config(model, vocab_size=50, seq_len=16, eos_id=0)
    assert "\n" not in str(caught.value)
