"""The learning rate's pins."""

from __future__ import annotations

import math

import pytest

from wm_ds.optim.learning_rate import learning_rate

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
