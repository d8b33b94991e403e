"""Fields' own arithmetic: accumulation, durations, tokens."""

from __future__ import annotations

import re
from inspect import signature

import pytest

from tests.config.test_load import changed
from wm_ds.config import load as configuration
from wm_ds.config import schema
from wm_ds.config.durations import to_steps
from wm_ds.config.schema import Batch, ConfigError
from wm_ds.config.stages import plan
from wm_ds.families import num_groups
from wm_ds.model import WhiteMatterConfig


def test_accumulation_keeps_the_global_batch():
    assert [Batch(global_batch=128, micro_batch=4).accumulation(r) for r in (1, 4, 8, 32)] == [32, 8, 4, 1]


def test_indivisible_global_batch_lists_choices_that_work():
    with pytest.raises(ConfigError) as caught:
        Batch(global_batch=128, micro_batch=4).accumulation(6)
    message = str(caught.value)
    assert "global_batch 128 does not divide over 6 ranks x micro_batch 4" in message
    assert "2, 4, 8 ranks" in message
    assert "global_batch 120 or 144" in message
    with pytest.raises(ConfigError, match=r"micro_batch in \{1, 2, 4\}"):
        Batch(global_batch=24, micro_batch=3).accumulation(6)
    for micro in (1, 2, 4):
        Batch(global_batch=24, micro_batch=micro).accumulation(6)


# The paper's 2% of 30,518 steps is 610.36: 610 steps.
@pytest.mark.parametrize(
    ("duration", "steps"),
    [
        (200, 200),
        ("2%", 610),
        ("0.5%", 153),
        (0, 0),
        ("262144 tokens", 1),
        ("1.5M tokens", 6),
        ("1e9 tokens", 3815),
    ],
)
def test_durations_become_whole_steps(duration, steps):
    assert to_steps("optim.warmup", duration, 30518, lambda tokens: tokens / (128 * 2048)) == steps


@pytest.mark.parametrize("duration", ["2", "x%", "5 M", "200%", -1, 40000])
def test_durations_that_make_no_sense_are_refused(duration):
    with pytest.raises(ConfigError, match=r"optim\.warmup"):
        to_steps("optim.warmup", duration, 30518, lambda tokens: tokens / (128 * 2048))


def test_a_run_in_tokens_is_rounded_up_to_whole_steps():
    config = configuration.parse(changed(steps=None, tokens="8e9", batch__global_batch=128))
    assert plan(config, 2048).total == 30518  # 8e9 / (128 * 2048) = 30517.6


def test_what_a_run_leaves_out_is_the_models_own_default() -> None:
    """A field that the run's file and the model's configuration both know has one default in both."""
    own = {name: p.default for name, p in signature(WhiteMatterConfig).parameters.items()}
    compared = 0
    for name, field in schema.Model.model_fields.items():
        if name not in own or field.is_required():
            continue
        if field.default is not None:
            assert field.default == own[name], name
            compared += 1
        elif said := re.search(r"[Dd]efault (\d+)\b", field.description or ""):
            assert float(said[1]) == own[name], name
            compared += 1
    assert compared >= 8
    minimal = {name: 8 for name, field in schema.Model.model_fields.items() if field.is_required()}
    for family, groups in (("whitematter", 8), ("lckv", 1), *((name, 1) for name in schema.PLAIN_FAMILIES)):
        assert num_groups(schema.Model.model_validate(minimal | {"family": family})) == groups
        assert num_groups(schema.Model.model_validate(minimal | {"family": "lckv", "num_groups": 5})) == 5
