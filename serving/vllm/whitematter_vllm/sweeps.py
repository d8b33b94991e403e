"""Which tokens of a prompt are evaluated together, in which order: the schedules of wm_ds, for flat batches.

A token has a column: its position, counted from where its request's new tokens begin (from a whole number of
periods before, so that groups fall where they fell in training). A sweep is a set of tokens that are
evaluated together, each with the pass that it is in. All requests of a step go through them side by side.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from whitematter_vllm.configuration import WhiteMatterConfig

KINDS = ("exact", "cyclic", "chunked", "wavefront", "converged")
STARTS = ("embedding", "layerwise")
STAND_INS = ("newest", "embedding")


@dataclass(frozen=True)
class Sweep:
    """Indices of tokens (ascending) and the pass of each, both [n] on the host."""

    token_n: Tensor
    pass_n: Tensor


@dataclass(frozen=True)
class Schedule:
    """How the tokens of prompts are evaluated.

    Attributes:
        kind: one token after another ("exact"), strided groups in turn ("cyclic"), that inside one chunk
            after another ("chunked") or in staggered chunks ("wavefront"), or cyclic until entries stand
            still ("converged").
        groups, passes, chunk, tolerance: as the fields of config.json; 0 where the kind has no use for one.
        relaxation: a factor for each pass from the second on; the last serves all further ones.
        start: what the first pass finds: the pool of the tokens' embeddings, or of one layerwise sweep.
        newest: in that sweep the newest state stands in for those to come, otherwise the embedding does.
        border: no pass crosses a multiple of so many positions; 0 for none.
    """

    kind: str
    groups: int = 1
    passes: int = 1
    chunk: int = 0
    tolerance: float = 0.0
    relaxation: tuple[float, ...] = (1.0,)
    start: str = "embedding"
    newest: bool = True
    border: int = 0

    @property
    def period(self) -> int:
        """Columns by which a request may be shifted without changing its sweeps."""
        if self.kind == "exact":
            return 1
        return math.lcm(self.chunk, self.groups) if self.chunk else self.groups

    @property
    def relaxed(self) -> bool:
        """Whether any pass keeps a part of what it replaces."""
        return any(factor != 1.0 for factor in self.relaxation)

    def factor(self, pass_n: Tensor) -> Tensor:
        """The relaxation factor of each pass [n], counted from 0; the first is not relaxed."""
        factors = torch.tensor((1.0, *self.relaxation))
        return factors[pass_n.clamp(max=len(self.relaxation))]

    def capped(self, width: int) -> Schedule:
        """The same values in fewer passes: ceil(width / groups) of them are exact."""
        if self.kind not in ("cyclic", "converged") or (self.kind == "cyclic" and self.relaxed):
            return self
        enough = max(1, -(-width // self.groups))
        passes = enough if self.kind == "converged" else min(self.passes, enough)
        return replace(self, passes=passes)

    def sweeps(self, column_N: Tensor) -> Iterator[Sweep]:
        """All sweeps over tokens with these columns [N]; empty ones are left out."""
        if self.kind == "exact":
            for turn in column_N.unique().tolist():
                token_n = (column_N == turn).nonzero()[:, 0]
                yield Sweep(token_n, torch.zeros_like(token_n))
            return
        for pass_N in self._waves(column_N):
            yield from self.one_pass(column_N, pass_N)

    def one_pass(self, column_N: Tensor, pass_N: Tensor) -> Iterator[Sweep]:
        """The groups in turn, over the tokens whose pass is not negative."""
        group_N = column_N % self.groups
        for group in range(self.groups):
            token_n = ((pass_N >= 0) & (group_N == group)).nonzero()[:, 0]
            if len(token_n):
                yield Sweep(token_n, pass_N[token_n])

    def _waves(self, column_N: Tensor) -> Iterator[Tensor]:
        """The pass that each token is in, -1 for none, time after time."""
        if not self.chunk:
            for index in range(self.passes):
                yield torch.full_like(column_N, index)
            return
        chunk_N = column_N // self.chunk
        if self.kind == "wavefront":
            for wave in range(int(chunk_N.max()) + self.passes):
                pass_N = wave - chunk_N
                yield torch.where(pass_N < self.passes, pass_N, -1)
            return
        for chunk in chunk_N.unique().tolist():
            for index in range(self.passes):
                yield torch.where(chunk_N == chunk, index, -1)


def schedule_of(config: WhiteMatterConfig) -> Schedule:
    """The prefill that a configuration names. Raises ValueError for one that is not known here."""
    kind = config.schedule if config.prefill == "trained" else config.prefill
    if kind not in KINDS:
        raise ValueError(f"prefill {kind!r} is not supported; choose one of trained, {', '.join(KINDS)}")
    start = config.prefill_start or config.start
    if start not in STARTS:
        raise ValueError(f"start {start!r} is not supported; choose one of {', '.join(STARTS)}")
    if config.start_missing not in STAND_INS:
        raise ValueError(
            f"start_missing {config.start_missing!r} is not supported; choose one of {', '.join(STAND_INS)}"
        )
    if kind == "exact":
        return Schedule("exact")
    chunk = (config.chunk_size or 0) if kind in ("chunked", "wavefront") else 0
    passes = config.prefill_passes or config.no_grad_passes + config.grad_passes
    groups = config.prefill_groups or config.num_groups
    given = config.relaxation
    relaxation = (given,) if isinstance(given, int | float) else tuple(given)
    if groups < 1 or passes < 1 or not relaxation or min(relaxation) <= 0:
        raise ValueError(
            f"prefill needs a group, a pass and positive relaxation, not {groups}, {passes} and {given}"
        )
    if chunk < groups and kind in ("chunked", "wavefront"):
        raise ValueError(f"chunk_size {chunk} cannot hold {groups} groups")
    return Schedule(
        kind,
        groups,
        passes,
        chunk,
        config.prefill_tolerance if kind == "converged" else 0.0,
        tuple(float(factor) for factor in relaxation),
        start,
        config.start_missing == "newest",
        config.prefill_border or 0,
    )
