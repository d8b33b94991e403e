"""What the engine decides by itself: skipping, spikes, counters, DeepSpeed's configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.test_load import changed
from wm_ds.config import load as configuration
from wm_ds.config.stages import plan, rate_schedule
from wm_ds.distributed.process_group import World
from wm_ds.engine.deepspeed_config import deepspeed_config
from wm_ds.engine.engine import Engine, StepResult, TrainingFailed
from wm_ds.optim.learning_rate import RateSchedule

WORLD = World(0, 0, 1, torch.device("cpu"), "gloo")


def engine(**guard: Any) -> Engine:
    """An engine without a model: DeepSpeed and optimizer are only looked at."""
    config = configuration.parse(changed(guard=guard))
    ds = SimpleNamespace(zero_optimization_stage=lambda: 0, optimizer=None, module=None)
    optimizer = SimpleNamespace(param_groups=[{"step": 0}, {"step": 0}])
    return Engine(ds, optimizer, WORLD, config, RateSchedule(**rate_schedule(plan(config, 16))), 1)


def feed(e: Engine, losses: list[float]) -> list[tuple[str | None, float | None]]:
    found = []
    for loss in losses:
        reason, spike = e._judge(loss, 1.0, 10)
        e.steps += 1
        found.append((reason, spike))
        e._count(StepResult(e.steps, loss, 1.0, 1e-3, 10, reason, spike))
    return found


def steady(count: int) -> list[float]:
    return [3.0 + 0.1 * (-1) ** i for i in range(count)]


def test_a_spike_is_reported_and_not_skipped_unless_asked():
    (_, quiet), *_ = feed(engine(), [*steady(30), 3.2])[-1:]
    assert quiet is None
    reason, spike = feed(engine(), [*steady(30), 6.0])[-1]
    assert reason is None
    assert spike == pytest.approx(30, rel=0.2)  # 3.0 above a mean with deviation 0.1
    reason, spike = feed(engine(skip_spikes=True), [*steady(30), 6.0])[-1]
    assert "loss 6 is" in reason
    assert spike > 6


def test_a_spike_does_not_move_what_it_is_measured_by_when_skipped():
    e = engine(skip_spikes=True)
    feed(e, steady(30))
    before = (e.loss_mean, e.loss_var, e.loss_count)
    feed(e, [50.0])
    assert (e.loss_mean, e.loss_var, e.loss_count) == before
    assert (e.skipped, e.skipped_in_a_row) == (1, 1)


def test_the_first_steps_cannot_spike():
    assert all(spike is None for _, spike in feed(engine(), [8.0] * 10 + [20.0]))


@pytest.mark.parametrize(
    ("loss", "norm", "tokens", "said"),
    [
        (float("nan"), 1.0, 5, "loss is nan"),
        (float("inf"), 1.0, 5, "loss is inf"),
        (1.0, float("nan"), 5, "gradient norm is nan"),
        (1.0, float("inf"), 5, "gradient norm is inf"),
        (0.0, 0.0, 0, "no valid token"),
    ],
)
def test_what_is_not_a_step_is_skipped(loss, norm, tokens, said):
    assert said in engine()._judge(loss, norm, tokens)[0]


def test_too_many_skipped_steps_in_a_row_end_the_run():
    e = engine(max_skipped=3)
    feed(e, [float("nan"), float("nan"), 3.0, float("nan"), float("nan")])
    assert e.skipped == 4
    with pytest.raises(TrainingFailed, match=r"3 steps in a row .*last checkpoint is intact"):
        feed(e, [float("nan")])


def test_counters_survive_a_checkpoint():
    e, other = engine(), engine()
    feed(e, [*steady(25), float("nan")])
    for group in e.optimizer.param_groups:
        group["step"] = 25
    other.load_state_dict(e.state_dict())
    assert other.state_dict() == e.state_dict()
    assert [g["step"] for g in other.optimizer.param_groups] == [25, 25]
    assert feed(other, [9.0]) == feed(e, [9.0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", ["local", "global"])
def test_deepspeed_never_clips_and_local_clipping_reduces_once(stage, rule):
    config = configuration.parse(changed(optim__clip_rule=rule))
    full = deepspeed_config(config, {"zero_optimization": {"stage": stage}}, 4, ())
    assert full["gradient_clipping"] == 0.0
    assert full["gradient_accumulation_steps"] == (1 if rule == "local" else 4)
    assert full["torch_autocast"]["lower_precision_safe_modules"] == []


def test_spikes_in_a_row_are_counted_from_the_first_and_move_nothing():
    """A loss that is not finite neither makes a row nor breaks it; a usual one does."""
    e = engine(rollback=5)
    feed(e, steady(30))
    before = (e.loss_mean, e.loss_var, e.loss_count)
    feed(e, [6.0, 6.0, float("nan"), 6.0])
    assert (e.spikes_in_a_row, e.spiking_since) == (3, 31)
    assert (e.loss_mean, e.loss_var, e.loss_count) == before
    feed(e, [3.0])
    assert e.spikes_in_a_row == 0
    assert e.loss_count == before[2] + 1
    assert not {"spikes_in_a_row", "spiking_since"} & e.state_dict().keys(), "as before there was a count"
    feed(e, [6.0])
    assert (e.spikes_in_a_row, e.spiking_since) == (1, 36)
    other = engine(rollback=5)
    other.load_state_dict(e.state_dict())
    assert (other.spikes_in_a_row, other.spiking_since) == (1, 36)
    e.load_state_dict({k: v for k, v in e.state_dict().items() if "spik" not in k})
    assert e.spikes_in_a_row == 0, "of a checkpoint from before them"


def test_without_rollback_spikes_move_the_mean_as_ever():
    e = engine()
    feed(e, [*steady(30), 6.0])
    assert e.loss_count == 31
    assert e.spikes_in_a_row == 1
