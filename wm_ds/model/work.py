"""What a forward over some rows has to compute, decided once: the loop in passes.py only carries it out.

`plan` walks a schedule and says of every update (some positions, in one pass) which of its results anybody
needs, which parts of it carry gradient, and what happens to the pool entries that it overwrites.
`pass_counts` adds the same plan up: how often a token goes through a block or the pool.

Dead work is left out: only a position's last update runs the last layer, whose output no pool reads; entries
that no later step can see are not computed, nor is an update of which nothing is needed. With gradient, the
first `no_grad` passes run detached. The gradient phase begins by pooling the detached states with gradient;
the last detached pass writes just those entries, so that pass runs its layers detached and its pool with
gradient, and nothing is pooled twice.

Terms: an *update* runs the layers on some positions and rewrites their pool entries; a *step* is the updates
that read the same state of the pool; a *pass* is one update of every position; the *start* is the pooling,
before the first pass, of the embeddings or of the states of a layerwise sweep (layerwise.py); *entries* are a
position's keys and values in all channels.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from .schedule import EMBEDDING, Schedule, Start

RECOMPUTE_POLICIES = ("none", "layer", "group", "group+layer")


@dataclass(frozen=True)
class Update:
    """Some positions in one pass, and all that is decided about them.

    Attributes:
        positions: an arithmetic progression of workspace positions.
        pass_index: counted from 0; None at the start.
        relaxation: new entry = old + relaxation * (computed - old).
        needs_pool: somebody reads the entries.
        needs_hidden: this is the positions' last update, so the last layer runs.
        states_grad: the states carry gradient: embeddings and layers.
        pool_grad: the pool carries gradient, of detached states where `states_grad` is false.
        keeps_old: backward puts the entries back that this update overwrites.
        remakes_start: instead, recomputing this update first makes the start's entries again.
        missing: at a layerwise start, what stands in for states that its sweep has not reached; otherwise
            None.
    """

    positions: range
    pass_index: int | None
    relaxation: float
    needs_pool: bool
    needs_hidden: bool
    states_grad: bool = False
    pool_grad: bool = False
    keeps_old: bool = False
    remakes_start: bool = False
    missing: str | None = None

    @property
    def sweeps(self) -> bool:
        """A layerwise start."""
        return self.missing is not None

    @property
    def runs_layers(self) -> bool:
        """False where the embeddings alone are pooled."""
        return self.pass_index is not None or self.sweeps


Step = tuple[Update, ...]


def start_of(positions: range, start: Start = EMBEDDING, gradient: bool = False) -> Update:
    """The start of some positions; a layerwise one is of all of them. `gradient`: it begins here."""
    return Update(
        positions,
        None,
        1.0,
        True,
        False,
        states_grad=gradient and (start.grad or not start.sweeps),
        pool_grad=gradient,
        missing=start.missing if start.sweeps else None,
    )


@dataclass(frozen=True)
class Plan:
    """The steps of a forward in order: first those that backward never sees, then those on the tape."""

    detached: tuple[Step, ...]
    recorded: tuple[Step, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """All of them."""
        return self.detached + self.recorded


@lru_cache(maxsize=64)
def plan(
    schedule: Schedule,
    length: int,
    *,
    gradient: bool = False,
    keep_cache: bool = False,
    whole_start: bool = False,
    remake_start: bool = False,
) -> Plan:
    """The work of `schedule` on rows of `length` positions.

    Args:
        gradient: the embeddings or parameters want gradients.
        keep_cache: the entries of every position's last update are wanted, too.
        whole_start: pool the start of every position, in the first pass's sets: ranks that share a row then
            have equal shares, and a measured change of the first pass counts no missing entry as zero.
        remake_start: backward recomputes steps, and an update of the first pass that is alone in its step may
            make the start's entries again instead of keeping them: they come from the embeddings alone, for
            less than a hundredth of a step's work. Updates of one step must find each other's; ranks that
            share a row would have to send them again; a layerwise start's would take a whole sweep.
    """
    # With gradient, passes from here on carry it; the pass before them pools with gradient.
    first_grad = schedule.no_grad if gradient else schedule.passes + 1
    remake_start = remake_start and not schedule.start.sweeps
    parts = schedule.steps(length)
    needed, start_needed = _needed(schedule, length, keep_cache)
    steps: list[Step] = []
    for positions in _start_sets(schedule, length, start_needed, whole_start):
        steps.append((start_of(positions, schedule.start, gradient=first_grad == 0),))
    for step, needs in zip(parts, needed):
        updates = []
        alone = len(step) == 1
        for part, needs_pool in zip(step, needs):
            needs_hidden = part.pass_index == schedule.passes - 1
            if not (needs_pool or needs_hidden):
                continue
            pool_grad = part.pass_index >= first_grad - 1
            first_alone = part.pass_index == 0 and needs_pool and alone and remake_start
            updates.append(
                Update(
                    part.positions,
                    part.pass_index,
                    schedule.factor(part.pass_index),
                    needs_pool,
                    needs_hidden,
                    states_grad=part.pass_index >= first_grad,
                    pool_grad=pool_grad,
                    keeps_old=gradient and not first_alone,
                    remakes_start=pool_grad and first_alone,
                )
            )
        if updates:
            steps.append(tuple(updates))
    graded = [any(update.pool_grad or update.states_grad for update in step) for step in steps]
    first = graded.index(True) if True in graded else len(steps)
    return Plan(tuple(steps[:first]), tuple(steps[first:]))


def _needed(schedule: Schedule, length: int, keep_cache: bool) -> tuple[list[list[bool]], list[int]]:
    """Whose entries somebody reads: for each part of each step, and the positions of the start.

    A walk backwards. An entry of position i is needed if a step between its writing and its next rewriting
    (whose own reading counts) reaches beyond i. A relaxed write reads the old entry, too: that is needed as
    much as the new one. Plain lists: the model also runs on meta and fake tensors, which have no values.
    """
    # times[j] < times[j+1] and reaches[j] > reaches[j+1]: the furthest position read since time t is the
    # reach at the first time >= t. Time counts backwards; time 0 is the cache, which reads everything.
    times, reaches = [0], [length if keep_cache else -1]
    rewritten = [0] * length

    def read_after(position: int) -> bool:
        at = bisect_left(times, rewritten[position])
        return at < len(times) and reaches[at] > position

    needed = []
    for time, step in enumerate(reversed(schedule.steps(length)), start=1):
        needed.append([any(read_after(i) for i in part.positions) for part in step])
        for part in step:
            if schedule.factor(part.pass_index) == 1.0:
                for i in part.positions:
                    rewritten[i] = time
        furthest = max(part.positions[-1] for part in step)
        while reaches and reaches[-1] <= furthest:
            times.pop()
            reaches.pop()
        times.append(time)
        reaches.append(furthest)
    return needed[::-1], [i for i in range(length) if read_after(i)]


def _start_sets(schedule: Schedule, length: int, needed: list[int], whole: bool) -> list[range]:
    """The start's positions, in pieces as large as the largest step; a layerwise sweep's are all at once."""
    parts = [part for step in schedule.steps(length) for part in step]
    if not needed:
        return []
    if schedule.start.sweeps:
        return [range(length)]
    if whole:
        return [part.positions for part in parts if part.pass_index == 0]
    piece, stop = max(len(part.positions) for part in parts), needed[-1] + 1
    return [range(at, min(at + piece, stop)) for at in range(needed[0], stop, piece)]


@dataclass(frozen=True)
class Count:
    """How often a token of a row is put through something, averaged over the row.

    Attributes:
        blocks: all layers but the last.
        last: the last layer.
        pools: the pool, both branches.
        sweeps: the sweep of a layerwise start: all layers but the last, and before each of them its channel.
    """

    blocks: float = 0.0
    last: float = 0.0
    pools: float = 0.0
    sweeps: float = 0.0

    def layers(self, depth: int) -> float:
        """Evaluations of one layer, in a stack of `depth`."""
        return (self.blocks + self.sweeps) * (depth - 1) + self.last


@dataclass(frozen=True)
class PassCounts:
    """The work of one forward and its backward.

    Attributes:
        forward: with and without gradient.
        backward: what gradient flows back through.
        repeated: forward work that backward runs again under the recompute policy.
        steps: of the schedule, and a layerwise start; each goes through the layers once.
        steps_with_gradient: those whose layers carry gradient.
    """

    forward: Count
    backward: Count
    repeated: Count
    steps: int
    steps_with_gradient: int


@lru_cache(maxsize=64)
def pass_counts(
    schedule: Schedule,
    length: int,
    *,
    gradient: bool = True,
    recompute: str = "none",
    keep_cache: bool = False,
    shared: bool = False,
) -> PassCounts:
    """What `passes.run_passes` computes for rows of `length` tokens.

    Args:
        gradient: a training step; False: a forward alone.
        recompute: one of RECOMPUTE_POLICIES.
        keep_cache: the forward leaves a cache.
        shared: ranks share the rows (sequence parallelism); counts are of whole rows all the same.
    """
    by_step, by_layer = "group" in recompute, "layer" in recompute
    planned = plan(
        schedule,
        length,
        gradient=gradient,
        keep_cache=keep_cache,
        whole_start=shared,
        remake_start=by_step and not shared,
    )
    forward, backward, repeated = _Sum(length), _Sum(length), _Sum(length)
    for update in (update for step in planned.steps for update in step):
        forward.add(update, update.runs_layers, update.needs_hidden, update.needs_pool)
        on_states = update.states_grad and update.runs_layers
        backward.add(update, on_states, update.states_grad and update.needs_hidden, update.pool_grad)
        if by_step and (update.states_grad or update.pool_grad):
            # A recomputation ends once everything is found again that backward reads: where layers are
            # recomputed by themselves and no pool follows, that is the last layer's input. A sweep without
            # gradient is kept.
            layers = on_states if update.sweeps else update.runs_layers
            skips_last = by_layer and not update.needs_pool
            repeated.add(update, layers, update.needs_hidden and not skips_last, update.needs_pool)
            repeated.add(update, False, False, update.remakes_start)
        if by_layer:
            repeated.add(update, on_states, update.states_grad and update.needs_hidden, False)
    traversals = [step for step in planned.steps if step[0].runs_layers]
    graded = [step for step in traversals if any(update.states_grad for update in step)]
    return PassCounts(forward.count(), backward.count(), repeated.count(), len(traversals), len(graded))


class _Sum:
    """A Count in the making."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.totals = [0, 0, 0, 0]

    def add(self, update: Update, blocks: bool, last: bool, pools: bool) -> None:
        runs = (blocks and not update.sweeps, last, pools and update.needs_pool, blocks and update.sweeps)
        for i, counts in enumerate(runs):
            self.totals[i] += counts * len(update.positions)

    def count(self) -> Count:
        return Count(*(total / self.length for total in self.totals))


__all__ = [
    "RECOMPUTE_POLICIES",
    "Count",
    "PassCounts",
    "Plan",
    "Step",
    "Update",
    "pass_counts",
    "plan",
    "start_of",
]
