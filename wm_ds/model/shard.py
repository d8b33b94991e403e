"""Which part of a row this process holds: all of it, or its share among ranks that work on the same rows.

With sequence parallelism over N ranks, rank s holds the s-th contiguous slice of the W positions and runs all
layers on it. Attention goes by heads instead: a step's queries travel from "my positions, all heads" to "all
positions, my heads" and its outputs back, once a layer; the pool's buffer holds all positions of my heads,
and a step's new entries travel once, keys and values together. All else is local to a position.

`Shard` is the part that is all of it, so nothing travels. The one that communicates is given to the model by
whoever trains it (`WhiteMatterModel.shard`) and overrides `exchange`, `total` and `mean_`; it is no part of
this package.

Shapes: H heads, n positions of a step over all ranks, d head width.
"""

import torch
from torch import Tensor


class Shard:
    """One of `ranks` equal parts of a row, number `rank`."""

    rank = 0
    ranks = 1

    def share(self, x: Tensor, dim: int) -> Tensor:
        """This rank's slice of x along `dim`: its positions, or its heads."""
        if self.ranks == 1:
            return x
        if x.shape[dim] % self.ranks:
            raise ValueError(f"{x.shape[dim]} positions or heads cannot be cut into {self.ranks} equal parts")
        return x.chunk(self.ranks, dim)[self.rank]

    def local(self, positions: range, width: int) -> range:
        """Those of `positions` that lie in this rank's slice of `width`, counted from the slice's start.

        Steps are spread evenly, and in order, over the ranks where ranks x stride divides the row.
        """
        if self.ranks == 1:
            return positions
        first = self.rank * width
        skipped = max(0, -((positions.start - first) // positions.step))
        start = positions.start + skipped * positions.step - first
        return range(start, min(positions.stop - first, width), positions.step)

    def to_heads(self, x: Tensor) -> Tensor:
        """[…, H, n/ranks, d] of this rank's positions to […, H/ranks, n, d] of its heads; differentiable."""
        if self.ranks == 1:
            return x
        received = self.exchange(x.unflatten(-3, (self.ranks, -1)).movedim(-4, 0))
        return received.movedim(0, -3).flatten(-3, -2)

    def to_positions(self, x: Tensor) -> Tensor:
        """The way back: […, H/ranks, n, d] to […, H, n/ranks, d]; differentiable."""
        if self.ranks == 1:
            return x
        received = self.exchange(x.unflatten(-2, (self.ranks, -1)).movedim(-3, 0))
        return received.movedim(0, -4).flatten(-4, -3)

    def entries(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """`to_heads` of a step's new keys and values, together.

        Keys travel in the values' dtype, which is the buffer's: under autocast their norm's weight has made
        them wider.
        """
        if self.ranks == 1:
            return keys, values
        keys, values = self.to_heads(torch.stack((keys.to(values.dtype), values))).unbind()
        return keys, values

    def exchange(self, x: Tensor) -> Tensor:
        """Sends x[r] to rank r and receives each rank's for this one: one all-to-all, differentiable."""
        raise NotImplementedError

    def total(self, x: Tensor) -> Tensor:
        """The sum of x over the ranks; no gradient."""
        return x

    def mean_(self, tensors: list[Tensor]) -> None:
        """Averages tensors over the ranks, in place."""


ALL = Shard()

__all__ = ["ALL", "Shard"]
