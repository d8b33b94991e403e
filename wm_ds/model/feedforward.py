"""The ablation without feedback (paper §5.3): KV mixing from the layers below only.

Channel l mixes the states entering layers 0 … l of the token itself, so it exists before layer l attends: the
layers run once, attention is ordinary and causal (a token sees itself), there is no dummy and nothing to
iterate. Router inputs and mixing weights of channel l are masked to sources <= l.

Shapes: B rows, W positions, P cached tokens, L layers, D width, G KV heads, d head width.
"""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import Slots, compute_dtype
from .passes import PassResult
from .pool import Pool, unit
from .visibility import Visibility, additive_mask


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
    mask = additive_mask(visibility, range(x_BWD.shape[1]), compute_dtype(x_BWD), x_BWD.device, own=True)
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
