"""The passes as one would write them down: the comparison for memory and speed, not for use.

Plain autograd through the paper's §3.3: for each group the whole pool is rebuilt out of place with the new
entries, every query gets a mask over all slots, every pass runs the last block, every group is pooled, and
the detached states are pooled once more with gradient. Same parameters, same numbers as the model's own
passes (tests/plan/test_storage_tracker.py compares the gradients).

Shapes: B rows, T tokens, n positions of a group, D width, k channels, G KV heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wm_ds.model import WhiteMatterForCausalLM
from wm_ds.model.attention import Slots, compute_dtype
from wm_ds.model.blocks import rotary_table


def naive_hidden(lm: WhiteMatterForCausalLM, input_ids: Tensor, document_ids: Tensor) -> Tensor:
    """Final hidden states [B, T, D] of the cyclic training schedule."""
    model, config = lm.model, lm.config
    x_BTD = model.embed_tokens(input_ids)
    rows, length = input_ids.shape
    index_T = torch.arange(length, device=input_ids.device)
    starts_BT = torch.ones_like(document_ids, dtype=torch.bool)
    starts_BT[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    position_BT = index_T - torch.where(starts_BT, index_T, 0).cummax(1).values
    cos, sin = rotary_table(position_BT, config.head_dim, config.rope_theta, x_BTD.dtype, config.scaled_rope)

    seen_BTT = (document_ids[:, :, None] == document_ids[:, None]) & (index_T < index_T[:, None])
    seen_BTT = seen_BTT & (document_ids >= 0)[:, :, None]
    seen_BTM = torch.cat((seen_BTT.new_ones(rows, length, 1), seen_BTT), dim=2)

    def with_dummy(keys: Tensor, values: Tensor) -> list[Tensor]:
        pairs = ((model.dummy_key, keys), (model.dummy_value, values))
        dtype = compute_dtype(x_BTD)
        return [
            torch.cat((dummy[:, None, :, None].expand(-1, rows, -1, -1, -1).to(dtype), new.to(dtype)), dim=3)
            for dummy, new in pairs
        ]

    def one_pass(keys: Tensor, values: Tensor) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
        hidden_BTD, states = torch.zeros_like(x_BTD), [x_BTD] * config.num_hidden_layers
        for group in range(config.num_groups):
            positions = torch.arange(group, length, config.num_groups, device=input_ids.device)
            columns = slice(group, None, config.num_groups)
            slots = Slots([len(positions)], [length + 1], [seen_BTM[:, None, columns]])
            h_BnD, own = x_BTD[:, columns], []
            for layer, module in enumerate(model.layers):
                own.append(h_BnD)
                channel = layer % config.num_kv_channels
                inputs = (slots, cos[:, columns], sin[:, columns], [keys[channel]], [values[channel]])
                h_BnD = module(h_BnD, *inputs)
            new_keys, new_values = model.pool(own, cos[:, columns], sin[:, columns])
            keys = keys.index_copy(3, positions + 1, new_keys.to(keys.dtype))
            values = values.index_copy(3, positions + 1, new_values.to(values.dtype))
            states = [s.index_copy(1, positions, h) for s, h in zip(states, own)]
            hidden_BTD = hidden_BTD.index_copy(1, positions, h_BnD)
        return hidden_BTD, states, keys, values

    with torch.set_grad_enabled(config.no_grad_passes == 0 and torch.is_grad_enabled()):
        states = [x_BTD] * config.num_hidden_layers
        keys, values = with_dummy(*model.pool(states, cos, sin))
        for _ in range(config.no_grad_passes):
            _, states, keys, values = one_pass(keys, values)
    if config.no_grad_passes:
        keys, values = with_dummy(*model.pool([s.detach() for s in states], cos, sin))
    for _ in range(config.grad_passes):
        hidden_BTD, _, keys, values = one_pass(keys, values)
    return model.norm(hidden_BTD)
