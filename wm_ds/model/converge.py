"""Prefill to a tolerance: cyclic passes until the pool stands still, every row by itself.

Unlike a schedule, the number of passes is found while running, and rows that are done leave the batch: what a
row gets, and after how many passes, does not depend on the rows beside it. For evaluation only.

Shapes: B rows, W workspace positions, n positions of a step, D width, k channels, G KV heads, d head width,
M = 1 + P + W slots of the pool's buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .attention import compute_dtype, slots_of
from .passes import PassResult
from .pool import Pool
from .schedule import Converged
from .visibility import Visibility


@torch.no_grad()
def run_until_converged(
    layers: nn.ModuleList,
    pool: Pool,
    dummy_key: Tensor,
    dummy_value: Tensor,
    x_BWD: Tensor,
    rotary: tuple[Tensor, Tensor],
    visibility: Visibility,
    schedule: Converged,
    *,
    past: tuple[Tensor, Tensor] | None = None,
    keep_states: bool = False,
) -> PassResult:
    """Passes until each row's largest relative change of a pool entry is within the tolerance.

    An entry is one token's vector [G·d] of one channel and branch. After ceil(W/groups) passes a row is
    exact, so no row runs more of them. The arguments are those of `passes.run_passes`.
    """
    rows, width = x_BWD.shape[:2]
    cached = visibility.past
    buffers = []
    start = pool([x_BWD], *rotary)
    for dummy, old, new in zip((dummy_key, dummy_value), past or (None, None), start):
        first = dummy[:, None, :, None].expand(-1, rows, -1, -1, -1)
        parts = [first, new] if old is None else [first, old, new]
        buffers.append(torch.cat([part.to(compute_dtype(x_BWD)) for part in parts], dim=3))
    size = x_BWD.shape[-1]
    hidden_BWD = torch.cat([torch.zeros_like(x_BWD)] * (len(layers) + 1 if keep_states else 1), dim=-1)
    final = [buffer[:, :, :, 1 + cached :].clone() for buffer in buffers]
    at = torch.arange(rows, device=x_BWD.device)  # the rows that still move
    sweep = [range(group, width, schedule.groups) for group in range(min(schedule.groups, width))]
    for turn in range(-(-width // schedule.groups)):
        relaxation = schedule.factor(turn)
        slots = [slots_of(positions, visibility, buffers[0].dtype, x_BWD.device) for positions in sweep]
        change_B = x_BWD.new_zeros(len(at), dtype=torch.float32)
        for positions, seen in zip(sweep, slots):
            columns = slice(positions.start, positions.stop, positions.step)
            cos, sin = (table[:, columns] for table in rotary)
            keys, values = ([[channel[:, :, :m] for m in seen.lengths] for channel in b] for b in buffers)
            h_BnD, states = x_BWD[:, columns], []
            for index, layer in enumerate(layers):
                states.append(h_BnD)
                channel = index % len(keys)
                h_BnD = layer(h_BnD, seen, cos, sin, keys[channel], values[channel])
            kept_BnD = torch.cat([*states, h_BnD], dim=-1) if keep_states else h_BnD
            hidden_BWD[at, columns] = kept_BnD.to(hidden_BWD.dtype)
            written = slice(1 + cached + positions.start, 1 + cached + positions.stop, positions.step)
            for buffer, new in zip(buffers, pool(states, cos, sin)):
                old, new = buffer[:, :, :, written], new.to(buffer.dtype)
                moved_Bn = _relative_change(old, new)
                if visibility.document_BW is not None:
                    moved_Bn = torch.where(visibility.document_BW[:, columns] >= 0, moved_Bn, 0)
                change_B = torch.maximum(change_B, moved_Bn.amax(1))
                buffer[:, :, :, written] = old + relaxation * (new - old)
        for kept, buffer in zip(final, buffers):
            kept[:, at] = buffer[:, :, :, 1 + cached :]
        moving = change_B > schedule.tolerance
        if not bool(moving.any()):
            break
        if not bool(moving.all()):
            at, x_BWD = at[moving], x_BWD[moving]
            buffers = [buffer[:, moving] for buffer in buffers]
            rotary = tuple(table if table.shape[0] == 1 else table[moving] for table in rotary)
            visibility = visibility.rows(moving)
    *states, hidden_BWD = hidden_BWD.split(size, dim=-1)
    return PassResult(hidden_BWD, final[0], final[1], states=tuple(states))


def _relative_change(old: Tensor, new: Tensor) -> Tensor:
    """The largest of the channels' |new - old| / |new|: [k, B, G, n, d] twice to [B, n]."""
    old, new = old.float().transpose(2, 3).flatten(3), new.float().transpose(2, 3).flatten(3)
    return ((new - old).norm(dim=-1) / new.norm(dim=-1).clamp_min(1e-30)).amax(0)


__all__ = ["run_until_converged"]
