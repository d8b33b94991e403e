"""The layerwise start: one sweep over all positions, layer by layer, before the first pass.

From a start at which every state is the token's embedding, the first pass mostly repairs that. A model
without feedback (feedforward.py) knows better states after one traversal, all positions at once; so does this
sweep: layer l reads its channel, l mod k, pooled from the states that have entered layers 0 … l. The deeper
ones are missing, and one vector stands in for each of them: the newest state, or the embedding. Who sees whom
is as in the passes: a token reads the dummy and earlier tokens of its document. The states of all L layers
are then pooled, all k channels, as the start.

The sweep costs one traversal and, for each layer, one channel.

Shapes: B rows, n positions, D width, G KV heads, d head width, m slots of a run of queries.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .pool import Pool, unit
from .stack import Channel, Queries, View
from .tape import Tape, read_channel


@dataclass
class LayerwiseView(View):
    """What the layers read in the sweep; made anew for every sweep, and asked by its layers in turn.

    Attributes:
        passes: a pass's view of the same positions, for the queries.
        tape: its dummy and cached tokens stand before every channel; nothing is written to it.
        token: as in tape.py.
        missing: what stands in for the missing states (schedule.Start).
        recompute: backward makes each channel again instead of keeping what is inside.
        units: the states so far over their RMS, [B, n, D] each.
    """

    passes: View
    tape: Tape
    token: Tensor
    pool: Pool
    missing: str
    recompute: bool = False
    units: list[Tensor] = field(default_factory=list)

    def queries(self) -> Queries:
        """Those of a pass over the same positions."""
        return self.passes.queries()

    def channel(self, index: int, entering: list[Tensor]) -> Channel:
        """Dummy and cached tokens from the tape, then the channel that the states so far make."""
        slots, cos, sin = self.queries()
        self.units.append(unit(entering[-1], self.pool.eps))
        stand_in = self.units[0 if self.missing == "embedding" else -1]
        inputs = (index, tuple(self.units), cos, sin, stand_in)
        if self.recompute:
            made = checkpoint(self.pool.channel, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            made = self.pool.channel(*inputs)
        made = self.tape.shard.entries(*(entries[None] for entries in made))
        fronts = read_channel(self.tape, index, [self.tape.offset], self.token)
        sides = (
            torch.cat((front, entries[0].to(front.dtype)), dim=2)
            for (front,), entries in zip(fronts, made, strict=True)
        )
        return Channel(*([side[:, :, :m] for m in slots.lengths] for side in sides))


__all__ = ["LayerwiseView"]
