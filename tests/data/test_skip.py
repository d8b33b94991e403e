"""Which batches are trained on, against counting through them one by one."""

from __future__ import annotations

import random

import pytest

from wm_ds.data.skip import LeftOut, merged


def counted(spans: list[tuple[int, int]], steps: int) -> list[int]:
    """The batches of the first steps, by going through the order."""
    found: list[int] = []
    batch = 0
    while len(found) < steps:
        batch += 1
        if not any(first <= batch <= last for first, last in spans):
            found.append(batch)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_batches_are_those_that_are_not_merged(seed):
    rng = random.Random(seed)
    spans = [(first, first + rng.randint(0, 6)) for first in (rng.randint(1, 40) for _ in range(seed % 6))]
    out, batches = merged(spans), counted(spans, 60)
    assert [out.batch(step) for step in range(1, 61)] == batches
    assert [out.consumed(steps) for steps in range(61)] == [0, *batches]
    for steps in range(61):
        past = out.before(steps)
        assert [past.batch(step) for step in range(1, steps + 1)] == batches[:steps]
        assert all(last < out.consumed(steps) for _, last in past.spans)


def test_spans_are_merged_and_read_well():
    assert merged([[7, 9], [1, 2], [8, 12], [3, 3]]) == LeftOut(((1, 3), (7, 12)))
    assert str(merged([[7, 9], [1, 2]])) == "[[1, 2], [7, 9]]"
    assert merged([]) == LeftOut()
