"""Prefill to a tolerance: cyclic passes until the pool stands still, every row by itself.

Unlike a schedule, the number of passes is found while running, and rows that are done leave the batch: what a
row gets, and after how many passes, does not depend on the rows beside it. For evaluation only.

Shapes: B rows, W workspace positions, n positions of a step, D width, k channels, G KV heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .schedule import Converged
from .stack import PassOptions, PassResult, Stack, Workspace
from .tape import store
from .updates import Updates, empty_tape
from .work import Update, start_of


@torch.no_grad()
def run_until_converged(
    stack: Stack, workspace: Workspace, schedule: Converged, options: PassOptions
) -> PassResult:
    """Passes until each row's largest relative change of a pool entry is within the tolerance.

    An entry is one token's vector [G·d] of one channel and branch. After ceil(W/groups) passes a row is
    exact, so no row runs more of them. Of the options, only `keep_states` matters.
    """
    rows, width, size = workspace.x_BWD.shape
    options = PassOptions(keep_states=options.keep_states)
    tape = empty_tape(stack, workspace, options)
    updates = Updates(stack, workspace, tape, options)
    start = start_of(range(width), schedule.start)
    store(tape, start, updates.run(start))
    final = tape  # of all rows; `tape` holds the rows that still move
    at_B = torch.arange(rows, device=workspace.x_BWD.device)
    sweep = [range(group, width, schedule.groups) for group in range(min(schedule.groups, width))]
    for pass_index in range(-(-width // schedule.groups)):
        change_B = workspace.x_BWD.new_zeros(len(at_B), dtype=torch.float32)
        for positions in sweep:
            update = Update(positions, pass_index, schedule.factor(pass_index), True, True)
            computed = updates.run(update)
            slots = tape.slots(positions)
            for buffer, new in computed.beside(tape):
                moved_Bn = _relative_change(buffer[:, :, :, slots], new.to(buffer.dtype))
                if workspace.visibility.document_BW is not None:
                    document_Bn = workspace.visibility.document_BW[:, tape.columns(positions)]
                    moved_Bn = torch.where(document_Bn >= 0, moved_Bn, 0)
                change_B = torch.maximum(change_B, moved_Bn.amax(1))
                buffer[:, :, :, slots] += update.relaxation * (new.to(buffer.dtype) - buffer[:, :, :, slots])
            tape.hidden_BWD[:, tape.columns(positions)] = computed.h_BnD
        if tape is not final:
            final.keys[:, at_B], final.values[:, at_B] = tape.keys, tape.values
            final.hidden_BWD[at_B] = tape.hidden_BWD
        moving_B = change_B > schedule.tolerance
        if not bool(moving_B.any()):
            break
        if not bool(moving_B.all()):
            at_B, tape, workspace = at_B[moving_B], tape.rows(moving_B), workspace.rows(moving_B)
            updates = Updates(stack, workspace, tape, options)
    *states, hidden_BWD = final.hidden_BWD.split(size, dim=-1)
    keys, values = final.entries()
    return PassResult(hidden_BWD, keys, values, states=tuple(states))


def _relative_change(old: Tensor, new: Tensor) -> Tensor:
    """The largest of the channels' |new - old| / |new|: [k, B, G, n, d] twice to [B, n]."""
    old, new = old.float().transpose(2, 3).flatten(3), new.float().transpose(2, 3).flatten(3)
    return ((new - old).norm(dim=-1) / new.norm(dim=-1).clamp_min(1e-30)).amax(0)


__all__ = ["run_until_converged"]
