"""The learning rate's pins."""

from __future__ import annotations

import math

import pytest

from wm_ds.optim.learning_rate import RateSchedule, continued, learning_rate

# Steps are counted from 1; 3e-4 at its peak, ten of warm-up, a hundred in all, to a tenth.
PINS = {"peak": 3e-4, "total": 100, "warmup": 10, "floor": 0.1}


@pytest.mark.parametrize(
    ("step", "lr"), [(1, 3e-5), (5, 1.5e-4), (10, 3e-4), (55, 1.65e-4), (100, 3e-5), (120, 3e-5)]
)
def test_cosine_is_pinned(step, lr):
    assert learning_rate(step, RateSchedule(**PINS)) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(("step", "lr"), [(1, 3e-5), (10, 3e-4), (80, 3e-4), (90, 1.65e-4), (100, 3e-5)])
def test_wsd_is_pinned(step, lr):
    assert learning_rate(step, RateSchedule(**PINS, kind="wsd", decay=20)) == pytest.approx(lr, rel=1e-12)


def test_schedules_are_monotone_and_never_leave_their_bounds():
    for kind in ("cosine", "wsd", "constant"):
        values = [learning_rate(s, RateSchedule(**PINS, kind=kind, decay=30)) for s in range(1, 101)]
        assert values[:10] == sorted(values[:10])
        assert values[9:] == sorted(values[9:], reverse=True)
        assert max(values) == 3e-4
        assert min(values) == pytest.approx(3e-5)
    assert learning_rate(1, RateSchedule(**(PINS | {"warmup": 0}))) < 3e-4
    assert math.isclose(learning_rate(100, RateSchedule(**(PINS | {"warmup": 100}))), 3e-4)


def test_a_capped_rate_follows_the_plan_only_where_it_is_lower():
    plan = RateSchedule(**PINS)
    capped = RateSchedule(**PINS, cap=0.5)
    rates = [learning_rate(s, capped) for s in range(1, 101)]
    assert rates == [min(learning_rate(s, plan), 1.5e-4) for s in range(1, 101)]
    assert max(rates) == 1.5e-4


def rates(schedule: RateSchedule, first: int, last: int) -> list[float]:
    return [learning_rate(step, schedule) for step in range(first, last + 1)]


def test_a_longer_run_does_not_warm_up_again():
    """20 steps with 10% warm-up become 400: 40 steps of warm-up would take step 21 to half the peak."""
    short = RateSchedule(3e-3, 20, 2, "constant")
    longer = continued(short, RateSchedule(3e-3, 400, 40, "constant"), 20)
    assert rates(longer, 21, 400) == [3e-3] * 380


def test_wsd_made_longer_before_its_decay_stays_at_the_peak_and_after_it_at_the_floor():
    short, planned = RateSchedule(3e-3, 20, 2, "wsd", 0.1, 4), RateSchedule(3e-3, 40, 4, "wsd", 0.1, 8)
    before = continued(short, planned, 16)
    assert rates(before, 17, 32) == [3e-3] * 16
    assert learning_rate(40, before) == pytest.approx(3e-4)
    after = continued(short, planned, 20)
    assert rates(after, 21, 40) == pytest.approx([3e-4] * 20)


def test_cosine_made_longer_half_way_never_rises():
    short, planned = RateSchedule(1.0, 20, 2), RateSchedule(1.0, 100, 10)
    whole = rates(short, 3, 11) + rates(continued(short, planned, 11), 12, 100)
    assert whole == sorted(whole, reverse=True)
    assert whole[-1] == pytest.approx(0.1)


def test_an_unchanged_or_shorter_run_and_one_that_has_not_begun_follow_their_plan():
    plan = RateSchedule(1.0, 20, 2)
    assert continued(plan, plan, 7) == plan
    assert continued(RateSchedule(1.0, 50, 5), plan, 0) == plan
    assert continued(RateSchedule(1.0, 50, 2), plan, 7) == plan


def test_a_warm_up_that_the_run_changes_itself_counts_while_it_lasts():
    old, new = RateSchedule(1.0, 100, 10), RateSchedule(1.0, 100, 20)
    assert continued(old, new, 5, warmup_changed=True).warmup == 20
    assert continued(old, new, 10, warmup_changed=True).warmup == 10
