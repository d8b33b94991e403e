"""The stack of layers that share a pool, and the one loop over them.

The loop asks a `View` for what a layer reads. Passes and the converged prefill view a tape's buffers
(updates.py), decoding views the cache (decode.py).

Shapes: B rows, W workspace positions, n positions at hand, D width, k channels, G KV heads, d head width,
m slots that queries may reach, P cached tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import Slots
from .pool import Pool
from .shard import ALL, Shard
from .spans import span
from .visibility import Visibility
from .work import RECOMPUTE_POLICIES

# States of all layers at some positions, and their cosines and sines, to keys and values [k, B, G, n, d].
PoolFunction = Callable[[list[Tensor], Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Stack:
    """Layers, the pool that all of them read, and the entry in front of every row: dummies are [k, G, d].

    `mixer` is the pool again, where it can make single channels; a layerwise start needs that.
    """

    layers: Sequence[nn.Module]
    pool: PoolFunction
    dummy_key: Tensor
    dummy_value: Tensor
    mixer: Pool | None = None

    @property
    def channels(self) -> int:
        """k."""
        return len(self.dummy_key)

    def share_of(self, shard: Shard) -> Stack:
        """The same with the dummies of the shard's heads only."""
        key, value = (shard.share(dummy, 1) for dummy in (self.dummy_key, self.dummy_value))
        return replace(self, dummy_key=key, dummy_value=value)


@dataclass(frozen=True)
class Workspace:
    """The rows that are evaluated.

    Attributes:
        x_BWD: token embeddings. Of a shard, these and the rotary table are its positions.
        cos, sin: rotary table of the positions, each [B or 1, W, d].
        visibility: who exists and who may see whom, in whole rows.
        past: keys and values of cached tokens, each [k, B, G, P, d].
    """

    x_BWD: Tensor
    cos: Tensor
    sin: Tensor
    visibility: Visibility
    past: tuple[Tensor, Tensor] | None = None

    def rows(self, index: Tensor) -> Workspace:
        """Those rows for which the bool mask `index` [B] is true; without the cache, which is read once."""
        cos, sin = (table if len(table) == 1 else table[index] for table in (self.cos, self.sin))
        return Workspace(self.x_BWD[index], cos, sin, self.visibility.rows(index))


@dataclass(frozen=True)
class PassOptions:
    """How passes are run; none of it changes a number.

    Attributes:
        recompute: what backward recomputes instead of keeping it: "none", "layer" (each layer), "group" (each
            step of the schedule), "group+layer" (each step, and inside its recomputation each layer and each
            piece of the pool).
        entries_on_host: keep the entries that steps overwrite in the host's memory until backward.
        keep_cache: compute the pool entries of every position's last update, too. Gradient flows from them.
        keep_states: keep the states that enter each layer in a position's last update.
        measure_residuals: report how far every pass moved the pool.
        shard: which part of the rows the workspace and the result are.
    """

    recompute: str = "none"
    entries_on_host: bool = False
    keep_cache: bool = False
    keep_states: bool = False
    measure_residuals: bool = False
    shard: Shard = ALL

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE_POLICIES:
            raise ValueError(
                f"recompute is {self.recompute!r}; choose one of {', '.join(RECOMPUTE_POLICIES)}"
            )

    @property
    def by_layer(self) -> bool:
        """Backward recomputes every layer by itself."""
        return "layer" in self.recompute

    @property
    def by_step(self) -> bool:
        """Backward recomputes every step of the schedule."""
        return "group" in self.recompute


@dataclass(frozen=True)
class PassResult:
    """hidden_BWD: output of the last layer; keys, values: pool entries of the workspace, [k, B, G, W, d],
    final only where a cache was asked for; residuals [passes]: relative change of the pool in each pass;
    states: where asked for, what entered each layer in the positions' last pass, L of [B, W, D]."""

    hidden_BWD: Tensor
    keys: Tensor
    values: Tensor
    residuals: Tensor | None = None
    states: tuple[Tensor, ...] = ()


class Channel(NamedTuple):
    """What a layer reads: keys and values [B, G, m, d] for every run of queries (attention.Slots)."""

    keys: list[Tensor]
    values: list[Tensor]


class Queries(NamedTuple):
    """Where a layer's queries stand: the slots that they see, and their rotary table [B or 1, n, d]."""

    slots: Slots
    cos: Tensor
    sin: Tensor


class View:
    """A pool as the layers read it at some positions."""

    def queries(self) -> Queries:
        """Asked for by every layer anew, and by every recomputation of it, so that nothing keeps it alive."""
        raise NotImplementedError

    def channel(self, index: int, entering: list[Tensor]) -> Channel:
        """One channel, for the layer that the last of the states `entering` enters; those are all so far."""
        raise NotImplementedError


class States(NamedTuple):
    """What entered each layer, L of [B, n, D], and the last layer's output if it was run."""

    entering: list[Tensor]
    output: Tensor | None

    def joined(self) -> Tensor | None:
        """States and output in one tensor [B, n, (L+1)·D]."""
        return None if self.output is None else torch.cat([*self.entering, self.output], dim=-1)


def run_layers(
    stack: Stack, x_BnD: Tensor, view: View, *, last: bool = True, recompute: bool = False
) -> States:
    """All layers on some positions. The loop.

    Args:
        last: run the last layer, whose output no pool reads.
        recompute: backward recomputes every layer instead of keeping what is inside.
    """
    h_BnD, entering = x_BnD, []
    for index, layer in enumerate(stack.layers):
        entering.append(h_BnD)
        if index == len(stack.layers) - 1 and not last:
            return States(entering, None)
        channel = view.channel(index % stack.channels, entering)
        run = partial(_run_layer, index, layer, view, channel)
        if recompute:
            h_BnD = checkpoint(run, h_BnD, use_reentrant=False, preserve_rng_state=False)
        else:
            h_BnD = run(h_BnD)
    return States(entering, h_BnD)


def _run_layer(index: int, layer: nn.Module, view: View, channel: Channel, h_BnD: Tensor) -> Tensor:
    with span("layer", index):
        return layer(h_BnD, *view.queries(), *channel)


__all__ = [
    "Channel",
    "PassOptions",
    "PassResult",
    "Queries",
    "Stack",
    "States",
    "View",
    "Workspace",
    "run_layers",
]
