"""The plan of a forward against counting by hand, and pass_counts against closed forms and the model."""

from __future__ import annotations

import pytest
import torch

from tests.support.tiny import batch, build
from wm_ds.model import LAYERWISE, Schedule, Start
from wm_ds.model.work import RECOMPUTE_POLICIES, pass_counts, plan

SCHEDULES = [
    Schedule.cyclic(3, 3, 1),
    Schedule.cyclic(4, 2, 0),
    Schedule.cyclic(2, 4, 2, 0.8),
    Schedule.jacobi(3, 1),
    Schedule.exact(),
    Schedule.chunked(8, 2, 3, 2),
    Schedule.wavefront(6, 3, 3, 1),
    Schedule.wavefront(5, 2, 2, 0),
]
GRADED = Start("layerwise", grad=True)
SWEPT = [
    Schedule.cyclic(3, 1, start=LAYERWISE),
    Schedule.cyclic(3, 2, 1, start=LAYERWISE),
    Schedule.cyclic(2, 4, 2, 0.8, LAYERWISE),
    Schedule.cyclic(3, 2, start=GRADED),
    Schedule.jacobi(1, start=GRADED),
    Schedule.wavefront(6, 3, 3, 1, start=LAYERWISE),
]


def needed_by_definition(schedule: Schedule, length: int, keep_cache: bool) -> dict[tuple, bool]:
    """For each part of which anything is needed: whether an entry is read, searching all later steps."""
    steps = schedule.steps(length)

    def read(time: int, i: int) -> bool:
        for later in steps[time + 1 :]:
            if max(part.positions[-1] for part in later) > i:
                return True
            if any(i in part.positions and schedule.factor(part.pass_index) == 1.0 for part in later):
                return False
        return keep_cache

    found = {}
    for time, step in enumerate(steps):
        for part in step:
            needed = any(read(time, i) for i in part.positions)
            if needed or part.pass_index == schedule.passes - 1:
                found[part.positions, part.pass_index] = needed
    return found


@pytest.mark.parametrize("keep_cache", [False, True])
@pytest.mark.parametrize("length", [1, 7, 13, 24])
@pytest.mark.parametrize("schedule", SCHEDULES + SWEPT[:2], ids=str)
def test_only_what_somebody_reads_is_computed(schedule, length, keep_cache):
    planned = plan(schedule, length, keep_cache=keep_cache)
    updates = [update for step in planned.steps for update in step if update.pass_index is not None]
    found = {(update.positions, update.pass_index): update.needs_pool for update in updates}
    assert found == needed_by_definition(schedule, length, keep_cache)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_position_goes_through_every_pass_and_is_finished_once(schedule):
    updates = [u for step in plan(schedule, 24, gradient=True).steps for u in step if u.runs_layers]
    for position in range(24):
        own = [u for u in updates if position in u.positions]
        assert [u.pass_index for u in own] == list(range(schedule.passes))
        assert [u.needs_hidden for u in own] == [False] * (schedule.passes - 1) + [True]
        assert [u.states_grad for u in own] == [i >= schedule.no_grad for i in range(schedule.passes)]
        assert [u.pool_grad for u in own] == [i >= schedule.no_grad - 1 for i in range(schedule.passes)]


def test_without_gradient_nothing_is_recorded_or_kept():
    planned = plan(Schedule.cyclic(3, 3, 1), 24, remake_start=True)
    assert not planned.recorded
    assert not any(u.keeps_old or u.remakes_start or u.pool_grad for step in planned.steps for u in step)


def test_the_first_recorded_pass_keeps_its_entries_or_makes_them_again():
    for remake in (False, True):
        planned = plan(Schedule.cyclic(3, 3, 1), 24, gradient=True, remake_start=remake)
        assert all(not step[0].runs_layers for step in planned.detached)
        for (update,) in planned.recorded:
            assert update.remakes_start == (remake and update.pass_index == 0)
            assert update.keeps_old != update.remakes_start


def test_a_layerwise_start_is_one_sweep_of_all_positions_and_its_entries_are_kept():
    """Whatever the schedule's sets; gradient begins at its pool, or with the sweep, or behind it."""
    for schedule, pooled, swept in (
        (SWEPT[0], True, False),
        (SWEPT[1], False, False),
        (SWEPT[3], True, True),
        (SWEPT[5], False, False),
    ):
        planned = plan(schedule, 24, gradient=True, remake_start=True)
        starts = [step for step in planned.steps if step[0].pass_index is None]
        ((start,),) = starts
        assert planned.steps[0] == starts[0]
        assert start.positions == range(24)
        assert (start.pool_grad, start.states_grad) == (pooled, swept)
        recorded = [update for step in planned.recorded for update in step if update is not start]
        assert all(update.keeps_old and not update.remakes_start for update in recorded)
    # Where one position after another is exact, nobody reads a start.
    assert all(step[0].pass_index == 0 for step in plan(SWEPT[0], 3).steps)


def closed_form(n: int, grad: int, g: int, length: int) -> tuple:
    """(blocks, last, pools) forward and backward of cyclic passes, g dividing the length."""
    end = g / length  # nobody reads the last g tokens' entries of the start
    forward = (n, 1, n + 1 - 1 / g - end)
    return forward, (grad, 1, grad + 1 - 1 / g - end * (n == grad))


@pytest.mark.parametrize(("no_grad", "grad", "g"), [(1, 2, 8), (0, 2, 4), (2, 1, 2), (1, 1, 8), (3, 3, 1)])
def test_counts_in_closed_form(no_grad, grad, g):
    n, length = no_grad + grad, 64
    schedule = Schedule.cyclic(g, n, no_grad)
    counts = {policy: pass_counts(schedule, length, recompute=policy) for policy in RECOMPUTE_POLICIES}
    forward, backward = closed_form(n, grad, g, length)
    for found in counts.values():
        assert (found.forward.blocks, found.forward.last, found.forward.pools) == pytest.approx(forward)
        assert (found.backward.blocks, found.backward.last, found.backward.pools) == pytest.approx(backward)
        assert (found.steps, found.steps_with_gradient) == (n * g, grad * g)
    assert counts["none"].repeated == type(counts["none"].repeated)()
    layer, group, both = (counts[policy].repeated for policy in RECOMPUTE_POLICIES[1:])
    assert (layer.blocks, layer.last, layer.pools) == (grad, 1, 0)
    remade = 0.0 if no_grad > 1 else 1.0 if n > 1 else 1 - 1 / g
    again = (grad + (no_grad > 0), 1, backward[2] + remade)
    assert (group.blocks, group.last, group.pools) == pytest.approx(again)
    # A recomputed step without a pool ends at the last layer, which is recomputed by itself.
    assert both.blocks == pytest.approx(again[0] + grad)
    assert both.last == pytest.approx(2 - 1 / g)
    assert both.pools == pytest.approx(again[2])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_counts_of_a_layerwise_start_in_closed_form(n, grad):
    """The sweep and its pool, of all positions; all n passes carry gradient. The last group pools nothing."""
    g, length = 4, 64
    schedule = Schedule.cyclic(g, n, start=Start("layerwise", grad=grad))
    counts = {policy: pass_counts(schedule, length, recompute=policy) for policy in RECOMPUTE_POLICIES}
    pools = n + 1 - 1 / g
    for found in counts.values():
        assert found.forward == type(found.forward)(n, 1, pools, 1)
        assert found.backward == type(found.forward)(n, 1, pools, float(grad))
        assert (found.steps, found.steps_with_gradient) == (n * g + 1, n * g + grad)
    repeated = {policy: found.repeated for policy, found in counts.items()}
    assert repeated["none"] == type(repeated["none"])()
    assert repeated["layer"] == type(repeated["none"])(n, 1, 0, grad)
    # A sweep without gradient is kept for its pool, never run again.
    assert repeated["group"] == type(repeated["none"])(n, 1, pools, grad)
    assert repeated["group+layer"].sweeps == 2 * grad
    without = pass_counts(Schedule.cyclic(g, n + 1, 1, start=LAYERWISE), length, recompute="group")
    assert (without.forward.sweeps, without.backward.sweeps, without.repeated.sweeps) == (1, 0, 0)


@pytest.mark.parametrize("policy", RECOMPUTE_POLICIES)
@pytest.mark.parametrize("schedule", SCHEDULES + SWEPT, ids=str)
def test_counts_are_what_the_model_runs(schedule, policy):
    """Calls of the layers, of the pool and of single channels of it, weighted with their positions."""
    lm = build().train()
    lm.model.recompute = policy
    seen = {"layers": 0, "last": 0, "pools": 0, "channels": 0}

    def count(name: str, module: torch.nn.Module) -> None:
        def hook(_module: object, arguments: tuple) -> None:
            states = arguments[0]
            seen[name] += (states[0] if isinstance(states, list) else states).shape[1]

        # Before, not after: a recomputation that has found everything ends in the middle of a layer.
        module.register_forward_pre_hook(hook)

    for index, layer in enumerate(lm.model.layers):
        count("last" if index == len(lm.model.layers) - 1 else "layers", layer)
    count("pools", lm.model.pool)

    def single(_module: object, arguments: tuple) -> None:
        seen["channels"] += len(arguments[0]) if len(arguments) > 1 else 0

    lm.model.pool.key.register_forward_pre_hook(single)
    ids, _ = batch("one")
    length, depth = ids.shape[1], len(lm.model.layers)
    hidden = lm.model(input_ids=ids, schedule=schedule).last_hidden_state
    counts = pass_counts(schedule, length, recompute=policy)
    forward = dict(seen)
    hidden.sum().backward()
    for part, found in (
        (counts.forward, forward),
        (counts.repeated, {name: seen[name] - forward[name] for name in seen}),
    ):
        assert found["layers"] == pytest.approx((part.blocks + part.sweeps) * length * (depth - 1))
        assert found["channels"] == pytest.approx(part.sweeps * length * (depth - 1))
        assert found["pools"] == pytest.approx(part.pools * length)
        assert found["last"] == pytest.approx(part.last * length)
