"""One more token behind a cache, without the passes: a token alone is exact after one evaluation.

A token does not see its own KV, only the dummy's and the cached ones'. So the slot that the cache grows by,
in which the token's KV will lie, holds the dummy while the layers run: every channel is copied once a token,
as transformers' DynamicCache does for every layer, and attention reads it where it lies.

Shapes: B rows, P cached tokens, D width, k channels, G KV heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from .attention import Slots
from .pool import Pool
from .visibility import Visibility, additive_mask


def decode(
    layers: nn.ModuleList,
    pool: Pool,
    dummy_key: Tensor,
    dummy_value: Tensor,
    x_B1D: Tensor,
    rotary: tuple[Tensor, Tensor],
    past_BP: Tensor | None,
    cache: DynamicCache,
) -> tuple[Tensor, list[Tensor]]:
    """The last layer's output and the states that entered each layer, [B, 1, D] all.

    The token's entries are added to the cache.

    Args:
        layers, pool, dummy_key, dummy_value: the model's parts; dummies are [k, G, d].
        x_B1D: embeddings of one real token per row.
        rotary: cosines and sines of its position, each [B or 1, 1, d].
        past_BP: True where a cached slot holds a token of the row; None when all do.
        cache: holds at least one token, in its first k layers, in the dtype that attention computes in.
    """
    rows, channels = x_B1D.shape[0], len(dummy_key)
    for channel in range(channels):
        dummies = (
            dummy[channel, None, :, None].expand(rows, -1, -1, -1) for dummy in (dummy_key, dummy_value)
        )
        cache.update(*(dummy.to(cache.layers[channel].keys.dtype) for dummy in dummies), channel)
    entries = cache.layers[:channels]
    try:
        length = entries[0].keys.shape[2]
        slots = Slots([1], [length], [_mask(past_BP, entries[0].keys.dtype)])
        cos, sin = rotary
        h_B1D, states = x_B1D, []
        for index, layer in enumerate(layers):
            states.append(h_B1D)
            entry = entries[index % channels]
            h_B1D = layer(h_B1D, slots, cos, sin, [entry.keys], [entry.values])
        keys, values = pool(states, cos, sin)
        for entry, key, value in zip(entries, keys, values):
            entry.keys[:, :, -1:] = key
            entry.values[:, :, -1:] = value
    except BaseException:
        cache.crop(-1)
        raise
    return h_B1D, states


def _mask(past_BP: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Additive mask [B, 1, 1, P+1] of the cached tokens and the dummy behind them; None if all are seen."""
    if past_BP is None:
        return None
    visibility = Visibility(past_BP.shape[1], past_BP, None)
    return additive_mask(visibility, range(1), dtype, past_BP.device).roll(-1, dims=-1)


__all__ = ["decode"]
