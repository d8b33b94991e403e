"""Schedules of the fixed-point iteration, as data.

A schedule is a list of steps. A step is a set of positions that are updated together: all layers run on them
against the pool as it is, then their pool entries are rewritten. Every position carries the pass that it is
in, hence whether it carries gradient and whether this is its last update (paper §3.3). Attention, the pool's
buffer and recomputation know only this; a new schedule is a new function from a length to a list of steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeGuard


@dataclass(frozen=True)
class Part:
    """Positions of a step that are in the same pass. `positions` is an arithmetic progression."""

    positions: range
    pass_index: int


Step = tuple[Part, ...]
Relaxation = float | Sequence[float]


def checked_relaxation(relaxation: Relaxation) -> Relaxation:
    """One factor, or a tuple of one for each pass from the second on. Raises ValueError."""
    factors = (relaxation,) if isinstance(relaxation, float | int) else tuple(relaxation)
    if not factors or not all(factor > 0 for factor in factors):
        raise ValueError(
            f"relaxation is {relaxation}; it takes a positive factor, or one for each pass after the first"
        )
    return relaxation if isinstance(relaxation, float | int) else factors


def relaxation_factor(relaxation: Relaxation, pass_index: int) -> float:
    """The factor of pass `pass_index`, counted from 0."""
    if pass_index < 1:
        return 1.0
    if isinstance(relaxation, float | int):
        return relaxation
    return relaxation[min(pass_index, len(relaxation)) - 1]


@dataclass(frozen=True)
class Start:
    """What the pool holds before the first pass.

    Attributes:
        kind: "embedding" (pooled as if every layer's state were the token's embedding, §3.3) or "layerwise"
            (pooled from the states of one sweep, layer by layer, over all positions: layerwise.py).
        missing: in that sweep, what stands in for the states of layers that it has not reached: the "newest"
            state or the "embedding".
        grad: gradient flows through that sweep. Without, it begins where its states are pooled.
    """

    kind: str = "embedding"
    missing: str = "newest"
    grad: bool = False

    def __post_init__(self) -> None:
        if self.kind not in STARTS:
            raise ValueError(f"start is {self.kind!r}; choose one of {', '.join(STARTS)}")
        if self.missing not in STAND_INS:
            raise ValueError(f"start_missing is {self.missing!r}; choose one of {', '.join(STAND_INS)}")
        if self.grad and self.kind == "embedding":
            raise ValueError("start_grad = true has no effect on start 'embedding': use start 'layerwise'")
        if self.kind == "embedding":
            object.__setattr__(self, "missing", "newest")  # nothing is missing: all such starts are equal

    @property
    def sweeps(self) -> bool:
        """Whether layers run before the first pass."""
        return self.kind == "layerwise"


STARTS = ("embedding", "layerwise")
STAND_INS = ("newest", "embedding")
EMBEDDING = Start()
LAYERWISE = Start("layerwise")


@dataclass(frozen=True)
class Schedule:
    """How often, and in which order, positions are updated.

    Attributes:
        kind: "cyclic" (strided Gauss-Seidel groups), "exact" (one position after another), "chunked" (cyclic
            inside one chunk after another) or "wavefront" (chunk c runs pass t while chunk c+1 runs t-1).
        groups: strided groups of a pass; 1 is Jacobi iteration.
        passes: updates of every position.
        no_grad: the first passes that carry no gradient when the forward carries any.
        chunk: tokens of a chunk ("chunked" and "wavefront").
        relaxation: from the second pass on, new entry = old + relaxation * (computed - old); one factor, or
            one for each pass from the second on, of which the last serves all further passes.
        start: what the first pass finds in the pool; it is no pass itself.
    """

    to_tolerance: ClassVar[bool] = False

    kind: str
    groups: int
    passes: int
    no_grad: int = 0
    chunk: int = 0
    relaxation: Relaxation = 1.0
    start: Start = EMBEDDING

    def __post_init__(self) -> None:
        if self.kind not in ("cyclic", "exact", "chunked", "wavefront"):
            raise ValueError(f"unknown schedule {self.kind!r}; choose cyclic, exact, chunked or wavefront")
        if self.groups < 1 or self.passes < 1:
            raise ValueError(
                f"a schedule needs at least one group and one pass, not {self.groups} and {self.passes}"
            )
        if not 0 <= self.no_grad < self.passes:
            raise ValueError(
                f"{self.no_grad} of {self.passes} passes without gradient: at least the last must carry it"
            )
        if self.kind in ("chunked", "wavefront"):
            if self.chunk < self.groups:
                raise ValueError(f"a chunk of {self.chunk} tokens cannot hold {self.groups} groups")
        elif self.chunk:
            raise ValueError(f"chunk is {self.chunk}, but schedule {self.kind!r} has no chunks")
        if self.start.grad and self.no_grad:
            raise ValueError(
                f"start_grad = true has no effect where no_grad_passes is {self.no_grad}: no gradient comes "
                "back through passes without it. Use no_grad_passes 0, or start_grad = false"
            )
        if self.kind == "exact" and self.start.sweeps:
            raise ValueError("start 'layerwise' has no effect on schedule 'exact', which reads no start")
        object.__setattr__(self, "relaxation", checked_relaxation(self.relaxation))
        if self.kind == "exact" and (self.groups, self.passes, self.relaxation) != (1, 1, 1.0):
            raise ValueError(
                "an exact schedule updates one position after another, once: it takes no groups, passes or "
                "relaxation; write Schedule.exact()"
            )

    @classmethod
    def cyclic(
        cls,
        groups: int,
        passes: int,
        no_grad: int = 0,
        relaxation: Relaxation = 1.0,
        start: Start = EMBEDDING,
    ) -> Schedule:
        """Cyclic Gauss-Seidel: pass by pass, the positions i with i mod groups = 0, 1, … in turn."""
        return cls("cyclic", groups, passes, no_grad, 0, relaxation, start)

    @classmethod
    def jacobi(
        cls, passes: int, no_grad: int = 0, relaxation: Relaxation = 1.0, start: Start = EMBEDDING
    ) -> Schedule:
        """Every position at once, `passes` times."""
        return cls("cyclic", 1, passes, no_grad, 0, relaxation, start)

    @classmethod
    def exact(cls) -> Schedule:
        """One position after another, once: autoregressive evaluation."""
        return cls("exact", 1, 1)

    @classmethod
    def chunked(
        cls,
        chunk: int,
        groups: int,
        passes: int,
        no_grad: int = 0,
        relaxation: Relaxation = 1.0,
        start: Start = EMBEDDING,
    ) -> Schedule:
        """All cyclic passes of the first `chunk` positions, then of the next, …"""
        return cls("chunked", groups, passes, no_grad, chunk, relaxation, start)

    @classmethod
    def wavefront(
        cls,
        chunk: int,
        groups: int,
        passes: int,
        no_grad: int = 0,
        relaxation: Relaxation = 1.0,
        start: Start = EMBEDDING,
    ) -> Schedule:
        """Staggered chunks: while chunk c runs its pass t, chunk c+1 runs its pass t-1, in the same steps."""
        return cls("wavefront", groups, passes, no_grad, chunk, relaxation, start)

    def factor(self, pass_index: int) -> float:
        """The relaxation factor of a pass; the first, and the start before it, are not relaxed."""
        return relaxation_factor(self.relaxation, pass_index)

    @property
    def period(self) -> int:
        """Columns by which a row may be shifted without changing any number (the group phase)."""
        if self.kind == "exact":
            return 1
        return self.groups if self.kind == "cyclic" else math.lcm(self.chunk, self.groups)

    def capped(self, length: int) -> Schedule:
        """The same values with fewer passes where that is exact: ceil(length/groups) passes are enough."""
        if self.kind != "cyclic" or any(self.factor(pass_index) != 1.0 for pass_index in range(self.passes)):
            return self
        passes = min(self.passes, max(1, -(-length // self.groups)))
        return replace(self, passes=passes, no_grad=min(self.no_grad, passes - 1))

    def steps(self, length: int) -> list[Step]:
        """The steps for rows of `length` positions, in order; empty sets are left out."""
        if self.kind == "exact":
            return [(Part(range(i, i + 1), 0),) for i in range(length)]
        chunk = self.chunk or max(length, 1)
        bounds = [(start, min(start + chunk, length)) for start in range(0, length, chunk)]
        if self.kind == "wavefront":
            waves = [
                [
                    (bounds[wave - pass_index], pass_index)
                    for pass_index in range(self.passes)
                    if 0 <= wave - pass_index < len(bounds)
                ]
                for wave in range(len(bounds) + self.passes - 1)
            ]
        else:
            waves = [[(bound, pass_index)] for bound in bounds for pass_index in range(self.passes)]
        steps = []
        for wave in waves:
            for group in range(self.groups):
                parts = [
                    Part(range(start + group, stop, self.groups), pass_index)
                    for (start, stop), pass_index in wave
                ]
                parts = [part for part in parts if len(part.positions)]
                if parts:
                    steps.append(tuple(parts))
        return steps


@dataclass(frozen=True)
class Converged:
    """Cyclic passes until the pool stands still, row by row; no fixed number of them, so for evaluation only.

    Attributes:
        groups: strided groups of a pass.
        tolerance: a row is done once no entry (a token's vector of one channel and branch) moved by more than
            this in a pass, relative to its size. ceil(T/groups) passes are exact and therefore the most.
        relaxation, start: as in Schedule.
    """

    to_tolerance: ClassVar[bool] = True

    groups: int
    tolerance: float = 1e-3
    relaxation: Relaxation = 1.0
    start: Start = EMBEDDING

    def __post_init__(self) -> None:
        object.__setattr__(self, "relaxation", checked_relaxation(self.relaxation))
        if self.groups < 1:
            raise ValueError(f"a schedule needs at least one group, not {self.groups}")
        if not self.tolerance >= 0:
            raise ValueError(
                f"the tolerance of a converged prefill is {self.tolerance}; it cannot be negative"
            )

    def factor(self, pass_index: int) -> float:
        """See Schedule.factor."""
        return relaxation_factor(self.relaxation, pass_index)

    @property
    def period(self) -> int:
        """See Schedule.period."""
        return self.groups


def is_fixed(schedule: Schedule | Converged) -> TypeGuard[Schedule]:
    """Whether the number of passes is known beforehand. Not by class: transformers imports an exported
    folder's configuration and its model one by one, so that each may have classes of its own."""
    return not schedule.to_tolerance


def is_converged(schedule: Schedule | Converged) -> TypeGuard[Converged]:
    """The opposite of `is_fixed`."""
    return schedule.to_tolerance


__all__ = [
    "EMBEDDING",
    "LAYERWISE",
    "Converged",
    "Part",
    "Schedule",
    "Start",
    "Step",
    "is_converged",
    "is_fixed",
]
