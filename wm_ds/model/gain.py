"""The loop's gain: how much a small change of the pool grows in one pass.

Below one, an error that the start or a rounding puts into the pool fades from pass to pass; far above one,
more passes than a model was trained with may drift instead of settling. Positions see earlier ones only, so
ceil(T/g) passes forget every change whatever the gain; it says how large a change grows before that.

Shapes: B rows, W workspace positions, n positions of a step, k channels, G KV heads, d head width.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .schedule import EMBEDDING, Schedule
from .shard import Shard
from .stack import PassOptions, Stack, Workspace
from .tape import Tape, store
from .updates import Updates, empty_tape
from .work import Step, Update

SIZE = 1e-3  # of a change, relative to the entry that is changed; in bfloat16 its rounding is larger
SIZE_BF16 = 5e-2
PASSES = 2  # the second one shows what the loop makes of the directions that it prefers itself


@torch.no_grad()
def loop_gain(
    stack: Stack, workspace: Workspace, schedule: Schedule, entries: tuple[Tensor, Tensor], shard: Shard
) -> Tensor:
    """Norms of a small change after a pass over its norm before, [2]: of a random change of every entry, and,
    scaled back, of what the first pass has made of it.

    `entries`: the pool to begin from, keys and values [k, B, G, W, d]; `schedule`: whose passes. Outside
    autocast, whose rounding would be larger than the change.
    """
    with torch.autocast(workspace.x_BWD.device.type, enabled=False):
        options = PassOptions(shard=shard)
        stack = stack.share_of(shard)
        size = SIZE if workspace.x_BWD.dtype != torch.bfloat16 else SIZE_BF16
        both = [Updates(stack, workspace, empty_tape(stack, workspace, options), options) for _ in range(2)]
        both[1].masks = both[0].masks
        change = small_change(entries, workspace.visibility.document_BW, size)
        steps = _one_pass(schedule, workspace.x_BWD.shape[1] * shard.ranks)
        length, gains = _norm(change, shard), []
        for _ in range(PASSES):
            for updates, moved in zip(both, (0.0, 1.0)):
                for buffer, entry, more in zip(updates.tape.entries(), entries, change):
                    buffer.copy_(entry + moved * more)
                for step in steps:
                    for update, computed in updates.step(step):
                        store(updates.tape, update, computed)
            entries = tuple(buffer.clone() for buffer in both[0].tape.entries())
            change = _difference(both[1].tape, entries)
            after = _norm(change, shard)
            gains.append(after / length)
            length = size * _norm(entries, shard)
            change = tuple(more * (length / after.clamp_min(1e-30)).to(more.dtype) for more in change)
        return torch.stack(gains)


def small_change(
    entries: tuple[Tensor, Tensor], document_BW: Tensor | None, size: float = SIZE
) -> tuple[Tensor, Tensor]:
    """A change of every entry [k, B, G, W, d] in a random direction, the same at every call: `size` times as
    large as the entry. None where there is no token, which nobody reads."""
    changes = []
    for seed, entry in enumerate(entries):
        generator = torch.Generator(entry.device).manual_seed(seed)
        noise = torch.randn(entry.shape, generator=generator, device=entry.device, dtype=torch.float32)
        noise *= size * entry.float().square().mean(-1, keepdim=True).sqrt()
        if document_BW is not None:
            noise *= (document_BW >= 0)[None, :, None, :, None]
        changes.append(noise.to(entry.dtype))
    return changes[0], changes[1]


def _one_pass(schedule: Schedule, length: int) -> list[Step]:
    """A pass from the second on, in which every position's entries are made."""
    once = replace(schedule, passes=1, no_grad=0, start=EMBEDDING)
    factor = schedule.factor(schedule.passes)
    return [
        tuple(Update(part.positions, 1, factor, needs_pool=True, needs_hidden=False) for part in step)
        for step in once.steps(length)
    ]


def _difference(tape: Tape, entries: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    keys, values = (moved - entry for moved, entry in zip(tape.entries(), entries))
    return keys, values


def _norm(sides: tuple[Tensor, Tensor], shard: Shard) -> Tensor:
    """Of keys and values together, over all ranks that share the rows."""
    return shard.total(torch.stack([side.float().square().sum() for side in sides]).sum()).sqrt()


__all__ = ["loop_gain", "small_change"]
