"""One more token behind a cache, without the passes: a token alone is exact after one evaluation.

A token does not see its own KV, only the dummy's and the cached ones'. So the slot that the cache grows by,
in which the token's KV will lie, holds the dummy while the layers run: every channel is copied once a token,
as transformers' DynamicCache does for every layer, and attention reads it where it lies.

Shapes: B rows, P cached tokens, D width, k channels, G KV heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from .attention import Slots
from .stack import Channel, Queries, Stack, States, View, Workspace, run_layers
from .visibility import Visibility, additive_mask


class CacheView(View):
    """The cache as one token per row reads it."""

    def __init__(self, cache: DynamicCache, queries: Queries) -> None:
        self.cache, self.at = cache, queries

    def queries(self) -> Queries:
        """The token."""
        return self.at

    def channel(self, index: int, entering: list[Tensor]) -> Channel:
        """Where it lies."""
        entry = self.cache.layers[index]
        return Channel([entry.keys], [entry.values])


def decode(stack: Stack, workspace: Workspace, cache: DynamicCache) -> States:
    """The states that entered each layer and the last one's output, [B, 1, D] all.

    The token's entries are added to the cache.

    Args:
        workspace: one real token per row; `past` is not read.
        cache: holds at least one token, in its first k layers, in the dtype that attention computes in.
    """
    rows, entries = workspace.x_BWD.shape[0], cache.layers[: stack.channels]
    for channel, entry in enumerate(entries):
        dummies = (
            dummy[channel, None, :, None].expand(rows, -1, -1, -1).to(entry.keys.dtype)
            for dummy in (stack.dummy_key, stack.dummy_value)
        )
        cache.update(*dummies, channel)
    try:
        mask = _mask(workspace.visibility.past_BP, entries[0].keys.dtype)
        slots = Slots([1], [entries[0].keys.shape[2]], [mask])
        view = CacheView(cache, Queries(slots, workspace.cos, workspace.sin))
        states = run_layers(stack, workspace.x_BWD, view)
        keys, values = stack.pool(states.entering, workspace.cos, workspace.sin)
        for entry, key, value in zip(entries, keys, values):
            entry.keys[:, :, -1:] = key
            entry.values[:, :, -1:] = value
    except BaseException:
        cache.crop(-1)
        raise
    return states


def _mask(past_BP: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Additive mask [B, 1, 1, P+1] of the cached tokens and the dummy behind them; None if all are seen."""
    if past_BP is None:
        return None
    visibility = Visibility(past_BP.shape[1], past_BP, None)
    return additive_mask(visibility, range(1), dtype, past_BP.device).roll(-1, dims=-1)


__all__ = ["decode"]
