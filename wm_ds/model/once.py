"""Layers that run once, from the bottom to the top: each makes its own KV or reads what layers below it made.

Attention in them is ordinary and causal: a token sees itself, there is no dummy, and nothing is iterated.

Shapes: B rows, W workspace positions, P cached tokens, k KVs that layers make, D width, G KV heads, d head
width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import Slots, compute_dtype
from .blocks import FusedLayer, OwnKVLayer
from .spans import span
from .stack import PassOptions, PassResult, Workspace
from .visibility import additive_mask


def run_once(
    layers: Sequence[nn.Module], reads: Sequence[tuple[int, ...]], workspace: Workspace, options: PassOptions
) -> PassResult:
    """All layers on all positions.

    With any recompute policy but "none", backward recomputes each layer; what others read of it is kept.

    Args:
        layers: an OwnKVLayer makes the next KV and reads it. Others read what is there, a FusedLayer two.
        reads: for each layer the KVs that it reads, counted in the order in which they are made.
        workspace: its `past` has the k KVs of cached tokens.

    Returns:
        The state that leaves the last layer, and where a cache is kept the k new KVs.
    """
    h_BWD, cos, sin, past = workspace.x_BWD, workspace.cos, workspace.sin, workspace.past
    width, dtype = h_BWD.shape[1], compute_dtype(h_BWD)
    mask = additive_mask(workspace.visibility, range(width), dtype, h_BWD.device, own=True)
    slots = Slots([width], [mask.shape[-1]], [mask])

    def run(index: int, h_BWD: Tensor, *seen: Tensor) -> tuple[Tensor, ...]:
        """The layer's output, and the KV that it made: of cached and new tokens, [B, G, P+W, d]."""
        layer = layers[index]
        made: tuple[Tensor, ...] = ()
        if isinstance(layer, OwnKVLayer):
            entries = layer.self_attn.entries(layer.input_layernorm(h_BWD), cos, sin)
            key, value = (new.to(dtype) for new in entries)
            if past is not None:
                old_key, old_value = (old[reads[index][0]].to(dtype) for old in past)
                key, value = torch.cat((old_key, key), dim=2), torch.cat((old_value, value), dim=2)
            made = key, value
        elif isinstance(layer, FusedLayer):
            key, value = layer.self_attn.fusion(seen[:2], seen[2:])
        else:
            key, value = seen
        return layer(h_BWD, slots, cos, sin, [key], [value]), *made

    def named(index: int, h_BWD: Tensor, *seen: Tensor) -> tuple[Tensor, ...]:
        with span("layer", index):
            return run(index, h_BWD, *seen)

    kvs: list[tuple[Tensor, ...]] = []
    states = []
    for index, layer in enumerate(layers):
        states.append(h_BWD)
        seen = () if isinstance(layer, OwnKVLayer) else [x for kv in reads[index] for x in kvs[kv]]
        if options.recompute != "none" and torch.is_grad_enabled():
            h_BWD, *made = checkpoint(
                named, index, h_BWD, *seen, use_reentrant=False, preserve_rng_state=False
            )
        else:
            h_BWD, *made = named(index, h_BWD, *seen)
        if made:
            kvs.append(tuple(made))
    keys = values = h_BWD.new_zeros(0)
    if options.keep_cache and kvs:
        keys, values = (torch.stack([x[:, :, -width:] for x in side]) for side in zip(*kvs))
    return PassResult(h_BWD, keys, values, states=tuple(states) if options.keep_states else ())


__all__ = ["run_once"]
