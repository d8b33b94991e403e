"""The ablation without feedback (paper §5.3): KV mixing from the layers below only.

Channel l mixes the states entering layers 0 … l of the token itself, so it exists before layer l attends: the
layers run once, attention is ordinary and causal (a token sees itself), there is no dummy and nothing to
iterate. Router inputs and mixing weights of channel l are masked to sources <= l.

Shapes: B rows, W positions, P cached tokens, L layers, D width, G KV heads, d head width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import Slots, compute_dtype
from .pool import Pool, unit
from .spans import span
from .stack import PassOptions, PassResult, Workspace
from .visibility import additive_mask


def run_feedforward(
    layers: Sequence[nn.Module], pool: Pool, workspace: Workspace, options: PassOptions
) -> PassResult:
    """One pass over all positions, layer by layer. With any recompute policy but "none", backward recomputes
    each layer and its channel."""
    x_BWD, cos, sin, past = workspace.x_BWD, workspace.cos, workspace.sin, workspace.past
    width, dtype = x_BWD.shape[1], compute_dtype(x_BWD)
    mask = additive_mask(workspace.visibility, range(width), dtype, x_BWD.device, own=True)
    slots = Slots([width], [mask.shape[-1]], [mask])

    def run_layer(index: int, h_BWD: Tensor, *units: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with span("layer", index):
            return run_and_pool(index, h_BWD, *units)

    def run_and_pool(index: int, h_BWD: Tensor, *units: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with span("pool"):
            key, value = pool.channel(index, units, cos, sin)
        keys, values = key, value
        if past is not None:
            keys = torch.cat((past[0][index].to(key.dtype), key), dim=2)
            values = torch.cat((past[1][index].to(value.dtype), value), dim=2)
        return (
            layers[index](h_BWD, slots, cos, sin, [keys.to(dtype)], [values.to(dtype)]),
            key,
            value,
        )

    h_BWD, units, new_keys, new_values, states = x_BWD, [], [], [], []
    for index in range(len(layers)):
        if options.keep_states:
            states.append(h_BWD)
        units.append(unit(h_BWD, pool.eps))
        if options.recompute != "none" and torch.is_grad_enabled():
            h_BWD, key, value = checkpoint(
                run_layer, index, h_BWD, *units, use_reentrant=False, preserve_rng_state=False
            )
        else:
            h_BWD, key, value = run_layer(index, h_BWD, *units)
        new_keys.append(key)
        new_values.append(value)
    return PassResult(h_BWD, torch.stack(new_keys), torch.stack(new_values), states=tuple(states))
