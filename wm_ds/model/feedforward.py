"""The ablation without feedback (paper §5.3): KV mixing from the layers below only.

Channel l mixes the states entering layers 0 … l of the token itself, so it exists before layer l attends: the
layers run once, attention is ordinary and causal (a token sees itself), there is no dummy and nothing to
iterate. Router inputs and mixing weights of channel l are masked to sources <= l.

Shapes: B rows, W positions, P cached tokens, L layers, D width, G KV heads, d head width.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import Slots, Visibility, compute_dtype
from .passes import PassResult
from .pool import Pool, unit


def run_feedforward(
    layers: nn.ModuleList,
    pool: Pool,
    x_BWD: Tensor,
    rotary: tuple[Tensor, Tensor],
    visibility: Visibility,
    *,
    past: tuple[Tensor, Tensor] | None,
    keep_states: bool,
    recompute: str,
) -> PassResult:
    """One pass over all positions, layer by layer.

    Args:
        past: keys and values of cached tokens, each [L, B, G, P, d].
        keep_states: return the states that enter each layer, too.
        recompute: with anything but "none", backward recomputes each layer and its channel.
    """
    cos, sin = rotary
    mask = causal_mask(visibility, x_BWD.shape[1], compute_dtype(x_BWD), x_BWD.device)
    slots = Slots([x_BWD.shape[1]], [visibility.past + x_BWD.shape[1]], [mask])

    def run_layer(index: int, h_BWD: Tensor, *units: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key, value = pool.channel(index, units, cos, sin)
        keys, values = key, value
        if past is not None:
            keys = torch.cat((past[0][index].to(key.dtype), key), dim=2)
            values = torch.cat((past[1][index].to(value.dtype), value), dim=2)
        return (
            layers[index](h_BWD, slots, cos, sin, [keys.to(mask.dtype)], [values.to(mask.dtype)]),
            key,
            value,
        )

    h_BWD, units, new_keys, new_values, states = x_BWD, [], [], [], []
    for index in range(len(layers)):
        if keep_states:
            states.append(h_BWD)
        units.append(unit(h_BWD, pool.eps))
        if recompute != "none" and torch.is_grad_enabled():
            h_BWD, key, value = checkpoint(
                run_layer, index, h_BWD, *units, use_reentrant=False, preserve_rng_state=False
            )
        else:
            h_BWD, key, value = run_layer(index, h_BWD, *units)
        new_keys.append(key)
        new_values.append(value)
    return PassResult(h_BWD, torch.stack(new_keys), torch.stack(new_values), states=tuple(states))


def causal_mask(visibility: Visibility, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [B or 1, 1, W, P+W] of ordinary causal attention.

    A token sees itself and earlier tokens of its document. A position without a token (padding, filler) sees
    itself alone, so no softmax row is empty.
    """
    index_W = torch.arange(width, device=device)
    seen_BWW = (index_W <= index_W[:, None])[None]
    if visibility.document_BW is not None:
        document_BW = visibility.document_BW
        same_BWW = (document_BW[:, None] == document_BW[:, :, None]) & (document_BW[:, :, None] >= 0)
        seen_BWW = seen_BWW & (same_BWW | torch.eye(width, dtype=torch.bool, device=device))
    if visibility.past:
        past_BWP = seen_BWW.new_ones(1, width, visibility.past)
        if visibility.past_BP is not None:
            past_BWP = past_BWP & visibility.past_BP[:, None]
        if visibility.document_BW is not None:
            past_BWP = past_BWP & (visibility.document_BW[:, :, None] >= 0)
        rows = max(len(past_BWP), len(seen_BWW))
        seen_BWW = torch.cat((past_BWP.expand(rows, -1, -1), seen_BWW.expand(rows, -1, -1)), dim=-1)
    mask = torch.zeros(seen_BWW.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~seen_BWW, float("-inf"))[:, None]
