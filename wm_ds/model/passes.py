"""The fixed-point passes: one loop that runs any schedule, with or without gradient (paper §3.3).

What is computed, and what carries gradient, is decided beforehand (work.py); the loop carries it out. Every
step evaluates its updates against the pool as it is and then rewrites their pool entries.

Shapes: B rows, W workspace positions, L layers, D width, k channels, G KV heads, d head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .schedule import Schedule
from .shard import Shard
from .stack import PassOptions, PassResult, Stack, Workspace
from .tape import Computed, Tape, begin, finish, finish_with_entries, store, write
from .updates import Updates, empty_tape
from .work import Update, plan


def run_passes(stack: Stack, workspace: Workspace, schedule: Schedule, options: PassOptions) -> PassResult:
    """Runs `schedule` over a workspace. Gradient flows, to the embeddings, to cached tokens and to all
    parameters, if the embeddings require it."""
    x_BWD, shard = workspace.x_BWD, options.shard
    with_grad = torch.is_grad_enabled() and x_BWD.requires_grad
    stack = stack.share_of(shard)
    tape = empty_tape(stack, workspace, options)
    updates = Updates(stack, workspace, tape, options, with_grad)
    residuals = Residuals(schedule.passes, x_BWD.device) if options.measure_residuals else None
    planned = plan(
        schedule,
        x_BWD.shape[1] * shard.ranks,
        gradient=with_grad,
        keep_cache=options.keep_cache,
        whole_start=shard.ranks > 1 or options.measure_residuals,
        remake_start=options.by_step and shard.ranks == 1,
    )
    for step in planned.detached:
        for update, computed in updates.step(step):
            if residuals is not None:
                residuals.add(tape, update, computed)
            store(tape, update, computed)
    hidden_BWD = tape.hidden_BWD
    keys, values = tape.entries()
    if planned.recorded:
        past_keys, past_values = workspace.past or (None, None)
        token = begin(tape, x_BWD, stack.dummy_key, stack.dummy_value, past_keys, past_values)
        for step in planned.recorded:
            for update, computed in updates.step(step, token):
                if residuals is not None:
                    residuals.add(tape, update, computed)
                token = write(tape, update, computed, token, on_host=options.entries_on_host)
        if options.keep_cache:
            hidden_BWD, keys, values = finish_with_entries(tape, token)
        else:
            hidden_BWD = finish(tape, token)
    states: list[Tensor] = []
    if options.keep_states:
        *states, hidden_BWD = hidden_BWD.split(x_BWD.shape[-1], dim=-1)
    measured = None if residuals is None else residuals.relative(shard)
    return PassResult(hidden_BWD, keys, values, measured, tuple(states))


class Residuals:
    """How far every pass moves the pool: |new - old| / |new| over all entries that it writes."""

    def __init__(self, passes: int, device: torch.device) -> None:
        self.sums = torch.zeros(passes, 2, device=device)

    def add(self, tape: Tape, update: Update, computed: Computed) -> None:
        """Before the update is written: squared distance to the entries on the tape, and squared norm."""
        pairs = computed.beside(tape)
        if update.pass_index is None or not pairs:
            return
        sums = [torch.zeros(2, device=self.sums.device)]
        for buffer, new in pairs:
            new = new.detach().float()
            old = buffer[:, :, :, tape.slots(update.positions)].float()
            sums.append(torch.stack(((new - old).square().sum(), new.square().sum())))
        self.sums[update.pass_index] += torch.stack(sums).sum(0)

    def relative(self, shard: Shard) -> Tensor:
        """[passes], over all ranks that share the rows."""
        sums = shard.total(self.sums)
        return (sums[:, 0] / sums[:, 1].clamp_min(1e-30)).sqrt()


__all__ = ["run_passes"]
