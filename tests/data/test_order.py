"""Orders without memory: every token of an epoch once, whatever the lengths of its rows and the stages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wm_ds.data import order
from wm_ds.data.order import Cursor, Mixture, SourceOrder

UNIT = 12


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(order, "WINDOW", 4)


def read(source, stages):
    """[(unit, position in it)] of everything that stages (row length, rows) see, and the last cursor."""
    cursor, seen = Cursor(), []
    for length, count in stages:
        leg = source.leg(cursor, length)
        assert leg.parts * length == UNIT
        units, parts = leg.rows(np.arange(count, dtype=np.int64))
        for turn, (unit, part) in enumerate(zip(units.tolist(), parts.tolist(), strict=True)):
            hidden = leg.seen_before(turn)
            for i in range(length):
                if hidden is None or not hidden[i]:
                    seen.append((unit, part * length + i))
        cursor = leg.after(count)
    return seen, cursor


def whole_epochs(seen, units):
    """Cut what was seen into epochs; each but the last must be complete, and none may have a token twice."""
    size = units * UNIT
    for start in range(0, len(seen), size):
        epoch = seen[start : start + size]
        assert len(set(epoch)) == len(epoch), "a token was seen twice in an epoch"


@settings(deadline=None, max_examples=60)
@given(
    units=st.integers(1, 23),
    stages=st.lists(st.tuples(st.sampled_from([12, 6, 4, 3, 2]), st.integers(0, 60)), min_size=1, max_size=6),
)
def test_every_token_of_an_epoch_is_seen_once_at_any_lengths(units, stages):
    source = SourceOrder(units, UNIT, seed=3, number=1)
    seen, cursor = read(source, stages)
    rest = source.leg(cursor, 2)  # to the end of the epoch, in the shortest rows
    count = 0
    while rest.after(count).epoch == cursor.epoch:
        count += 1
    seen, cursor = read(source, [*stages, (2, count)])
    assert (cursor.window, cursor.seen) == (0, None)
    whole_epochs(seen, units)
    assert len(seen) == cursor.epoch * units * UNIT


@pytest.mark.parametrize("length", [12, 4])
@pytest.mark.parametrize("cut", [0, 1, 7, 8, 31, 100])
def test_a_stage_at_the_same_length_goes_on_as_if_there_were_no_border(length, cut):
    source = SourceOrder(9, UNIT, seed=1, number=0)
    whole = source.leg(Cursor(), length).rows(np.arange(130))
    first = source.leg(Cursor(), length)
    second = source.leg(first.after(cut), length)
    for i in range(2):
        parts = [first.rows(np.arange(cut))[i], second.rows(np.arange(130 - cut))[i]]
        assert np.concatenate(parts).tolist() == whole[i].tolist()


def test_parts_of_a_unit_are_spread_over_their_window():
    source = SourceOrder(8, UNIT, seed=5, number=0)
    units, _ = source.leg(Cursor(), 2).rows(np.arange(24))
    assert len(set(units.tolist())) == 4, "a window of four units"
    assert (np.diff(units) != 0).sum() > 12, "and not one unit after another"


def test_what_was_seen_in_short_rows_is_filler_in_a_long_one():
    source = SourceOrder(4, UNIT, seed=0, number=0)
    leg = source.leg(Cursor(), 4)
    units, parts = leg.rows(np.arange(3))
    after = source.leg(leg.after(3), UNIT)
    hidden = {int(after.rows(np.array([t]))[0][0]): after.seen_before(t) for t in range(4)}
    for unit in range(4):
        expected = np.zeros(UNIT, dtype=bool)
        for part in parts[units == unit].tolist():
            expected[part * 4 : part * 4 + 4] = True
        if not expected.any():
            assert hidden[unit] is None
        elif not expected.all():
            assert (hidden[unit] == expected).all()
    assert after.seen_before(4) is None


def test_a_mixture_counts_what_it_has_drawn(monkeypatch):
    monkeypatch.setattr(order, "MIX_BLOCK", 64)
    mixture = Mixture([3.0, 1.0, 4.0], seed=2)
    source, turn = mixture.draw(np.arange(300))
    for samples in (0, 1, 63, 64, 65, 128, 299):
        counted = np.bincount(source[:samples], minlength=3)
        assert mixture.taken(samples).tolist() == counted.tolist()
    for number in range(3):
        assert turn[source == number].tolist() == list(range((source == number).sum()))
    assert mixture.quota == (24, 8, 32)
