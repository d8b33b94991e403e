"""Cyclic and Jacobi passes against the same schedule carried out position by position, in float64."""

import pytest
import torch

from tests.support import reference
from tests.support.tiny import batch, build, hidden, parameters, settings
from wm_ds.model import Schedule

LENGTH = 13  # divisible by none of the group counts below but 1


def run(lm: torch.nn.Module, schedule: Schedule, *names: str) -> torch.Tensor:
    with torch.no_grad():
        return hidden(lm, *batch(*names), schedule)


def oracle(lm: torch.nn.Module, steps: list, *names: str) -> torch.Tensor:
    input_ids, document_ids = batch(*names)
    p, s = parameters(lm), settings(lm)
    return torch.stack(
        [
            reference.passes(p, s, ids.tolist(), documents.tolist(), steps).hidden_TD
            for ids, documents in zip(input_ids, document_ids, strict=True)
        ]
    )


@pytest.mark.parametrize(("k", "p", "layers"), [(1, 2, 4), (3, 1, 4), (2, 2, 5), (4, 3, 4)])
@pytest.mark.parametrize(("groups", "passes"), [(1, 1), (1, 3), (2, 2), (3, 1), (3, 3), (8, 2)])
def test_passes_equal_the_schedule_done_by_hand(
    k: int, p: int, layers: int, groups: int, passes: int
) -> None:
    lm = build(k, p, layers, seed=groups).eval()
    got = run(lm, Schedule.cyclic(groups, passes), "one", "several", "filler")
    want = oracle(lm, reference.cyclic(LENGTH, groups, passes), "one", "several", "filler")
    assert (got - want).abs().max() < 1e-10


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_jacobi_updates_every_position_at_once(passes: int) -> None:
    lm = build().eval()
    got = run(lm, Schedule.jacobi(passes), "one", "several")
    want = oracle(lm, reference.cyclic(LENGTH, 1, passes), "one", "several")
    assert (got - want).abs().max() < 1e-10


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 13, 20])
def test_first_positions_are_exact_after_n_passes(groups: int) -> None:
    """After n passes the first n*g positions equal exact evaluation, and no later one happens to."""
    lm = build().eval()
    exact = run(lm, Schedule.exact(), "one")
    for passes in range(1, LENGTH + 1):
        got = run(lm, Schedule.cyclic(groups, passes), "one")
        error_T = (got - exact).abs().amax(dim=(0, 2))
        solved = min(passes * groups, LENGTH)
        assert error_T[:solved].max() < 1e-10
        if solved < LENGTH:
            assert error_T[solved:].max() > 1e-6  # otherwise this test would pass for an exact impostor
        else:
            break


def test_enough_passes_equal_exact_evaluation_in_every_row() -> None:
    lm = build().eval()
    names = ("one", "several", "filler")
    exact = run(lm, Schedule.exact(), *names)
    assert (run(lm, Schedule.cyclic(5, 3), *names) - exact).abs().max() < 1e-10
    assert (run(lm, Schedule.cyclic(8, 2), *names) - exact).abs().max() < 1e-10
    assert (run(lm, Schedule.jacobi(LENGTH), *names) - exact).abs().max() < 1e-10


def test_rows_do_not_know_of_each_other() -> None:
    lm = build().eval()
    input_ids, document_ids = batch("one", "several", "filler")
    schedule = Schedule.cyclic(3, 2)
    with torch.no_grad():
        together = hidden(lm, input_ids, document_ids, schedule)
        for row in range(3):
            alone = hidden(lm, input_ids[row : row + 1], document_ids[row : row + 1], schedule)
            assert (together[row] - alone[0]).abs().max() < 1e-12


def test_detached_passes_change_no_value() -> None:
    """Where the gradient begins decides nothing about the numbers."""
    lm = build().train()
    input_ids, document_ids = batch("several", "filler")
    want = run(lm.eval(), Schedule.cyclic(3, 3), "several", "filler")
    lm.train()
    for no_grad in (0, 1, 2):
        got = hidden(lm, input_ids, document_ids, Schedule.cyclic(3, 3, no_grad=no_grad))
        assert (got - want).abs().max() < 1e-12, f"no_grad={no_grad}"


def test_configured_schedules_are_the_default() -> None:
    lm = build(num_groups=3, no_grad_passes=1, grad_passes=1, prefill_groups=2, prefill_passes=3)
    names = ("one", "several")
    want_training = oracle(lm, reference.cyclic(LENGTH, 3, 2), *names)
    want_prefill = oracle(lm, reference.cyclic(LENGTH, 2, 3), *names)
    assert (run(lm.train(), None, *names) - want_training).abs().max() < 1e-10
    assert (run(lm.eval(), None, *names) - want_prefill).abs().max() < 1e-10
