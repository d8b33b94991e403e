"""Sequence parallelism: N consecutive ranks work on the same rows, each on a contiguous slice of positions.

How the ranks divide a row is in model/shard.py, which does not communicate; here are the process groups
and the all-to-alls. They are DeepSpeed's Ulysses exchange (`deepspeed.sequence.layer`):
`_dim_zero_all_to_all`, the operator under its newer attention, with a registered backward that torch.compile
can see.

What of DeepSpeed's is not used, and why:
* `DistributedAttention` sends queries, keys and values of every layer, in three all-to-alls. Here keys and
  values of all layers are the pool's k channels, which change once per step of the schedule; they are held by
  heads for the whole row and never travel for a layer.
* `_SeqAllToAll` under it is an autograd function that dynamo inlines, with a zero gradient (DeepSpeed says so
  itself); it is exact in eager mode only.
* An `mpu` that tells DeepSpeed's engine of sequence groups: ZeRO would then reduce over the same ranks as it
  does anyway, since parameters are equal on all of them.

Gradients need no correction: each rank's backward gives the part of every parameter's gradient that goes
through its own positions, for the sum of all ranks' losses (the all-to-alls' backward hands on the rest), so
their sum over all ranks is the gradient, whichever rows or positions a rank had.

Shapes: B rows, T positions, H heads, n positions of a step over all ranks, d head width.
"""

from __future__ import annotations

import datetime

from wm_ds.distributed import (
    process_group,  # first: it prepares the environment that DeepSpeed reads at import
)

import torch  # isort: skip
from torch import Tensor

from wm_ds.distributed import deepspeed_internals
from wm_ds.model.shard import Shard


class SequenceShard(Shard):
    """This rank's part of the rows of its sequence group; constructing it is collective over all ranks.

    size: ranks of a group, a divisor of the number of ranks.
    timeout_minutes: longest wait in a collective of the group.
    """

    def __init__(self, world: process_group.World, size: int, timeout_minutes: float = 30.0) -> None:
        if world.size % size:
            raise ValueError(f"{world.size} ranks cannot be cut into sequence groups of {size}")
        self.ranks, self.rank = size, world.rank % size
        # Every rank creates every group, in the same order, as torch wants it.
        for first in range(0, world.size, size):
            members = list(range(first, first + size))
            group = torch.distributed.new_group(members, timeout=datetime.timedelta(minutes=timeout_minutes))
            if world.rank in members:
                self.group = group
        deepspeed_internals.register_all_to_all(self.group)

    def exchange(self, x: Tensor) -> Tensor:
        """See Shard. Each rank sends (ranks - 1)/ranks of x."""
        return deepspeed_internals.all_to_all(self.group, x)

    def total(self, x: Tensor) -> Tensor:
        """See Shard. One all-reduce."""
        torch.distributed.all_reduce(x, group=self.group)
        return x

    def mean_(self, tensors: list[Tensor]) -> None:
        """See Shard. One all-reduce for each tensor."""
        for tensor in tensors:
            torch.distributed.all_reduce(tensor, group=self.group)
            tensor.div_(self.ranks)
