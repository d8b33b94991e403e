"""The table of families agrees with what a run may name, and with the classes themselves."""

import inspect
from typing import get_args

import pytest

from wm_ds.config.schema import Model
from wm_ds.families import FAMILIES, MODEL_TYPES, NAMES, family_of, has_passes, mixes_layers, model_class
from wm_ds.model import LCKVConfig, WhiteMatterConfig


def test_a_run_may_name_every_family_and_no_other():
    assert set(get_args(Model.model_fields["family"].annotation)) == set(NAMES)
    assert len(NAMES) == len(MODEL_TYPES) == len(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_columns_are_what_the_classes_are(family):
    forward = inspect.signature(family.model_class.forward).parameters
    assert family.takes_documents == ("document_ids" in forward)
    assert family.has_passes == hasattr(family.config_class, "training_schedule")
    assert family.own_code == family.model_class.__module__.startswith("wm_ds.model.")
    assert family.model_class.config_class is family.config_class
    config = family.config_class()
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
    assert not has_passes(NAMES["vanilla"].config_class())
