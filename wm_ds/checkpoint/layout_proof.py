"""Proof, before the first step and before the first save, that weights are where the code looks for them.

Optimizer and checkpoints know by optim/partition.py which part of which parameter lies where in this rank's
fp32 masters. That is knowledge about DeepSpeed's inside: an option or a new version that lays things out in
another way would train and save scrambled weights without any error. So on all ranks:

* every part of a master, rounded to the weights' own type, is the part of the parameter that it is said to
  be, bit for bit;
* the parts of all ranks cover every parameter once;
* all ranks hold the same parameters.

Before the first step most matrices differ everywhere, so that almost any other layout shows; parameters that
still are constant (norms, biases) show before the first save, after steps.

Cost: all weights are read once and compared piece by piece; at stage 3 each parameter is gathered once,
alone. It happens twice in a launch, and takes about as long as one or two gathers of the model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wm_ds.checkpoint.engine_state import WEIGHT, EngineState, Share
from wm_ds.distributed.host_group import Agreement
from wm_ds.errors import WmError

PIECE = 1 << 22  # elements that are compared at a time


class LayoutError(WmError, RuntimeError):
    """Masters and parameters do not belong together: training would be silently wrong."""


@torch.no_grad()
def prove(state: EngineState, agreement: Agreement, *, before: str) -> None:
    """Raise LayoutError on all ranks where the map of this rank's weights or another's is wrong. Collective.

    `before`: what this is a proof for ("the first step"), for the message.
    """
    held: dict[str, list[Share]] = {}
    for share in state.shares():
        if share.kind == WEIGHT:
            held.setdefault(share.name, []).append(share)
    problem: str | None = None
    digests: dict[str, int] = {}
    for name, live in state.live_parameters():
        for share in held.get(name, ()):
            found = _difference(share, live)
            problem = problem or found  # all ranks go through all parameters: gathering needs everybody
        digests[name] = _digest(live)
    ranges = {name: [share.owned for share in shares] for name, shares in held.items()}
    answers = agreement.gather((problem, ranges, digests))
    problems = [f"rank {rank}: {found}" for rank, (found, _, _) in enumerate(answers) if found]
    if not problems:
        problems = _gaps(state, [ranges for _, ranges, _ in answers])
    # At stage 0 each rank updates its own copy, whose last bits may differ on GPUs.
    if not problems and (state.stage > 0 or not state.updated()):
        problems = _strays([digests for _, _, digests in answers])
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise LayoutError(
            f"weights are not where they are looked for, found before {before}: {problems[0]}{more}. "
            "Training on would be silently wrong. Nothing was saved. Leave out of DeepSpeed's JSON whatever "
            "the files in ds_configs do not have; where that does not help, report it with the run's "
            "ds_config.json"
        )


def _difference(share: Share, live: Tensor) -> str | None:
    for start in range(share.start, share.stop, PIECE):
        stop = min(start + PIECE, share.stop)
        want, at = share.view[start - share.start : stop - share.start], live[start:stop]
        master = want.to(device=at.device).to(at.dtype)
        if torch.equal(master, at):
            continue
        same = (master == at) | (master.isnan() & at.isnan())
        if bool(same.all()):
            continue
        off = (master.float() - at.float()).abs()[~same]
        return (
            f"{share.name}: of its elements {start} to {stop}, {int((~same).sum()):,} differ from the fp32 "
            f"weights that the optimizer keeps for them, by up to {float(off.max()):.3g}"
        )
    return None


def _digest(live: Tensor) -> int:
    """A number that depends on every bit of `live` and on its place."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[live.element_size()]
    total = 0
    for number, part in enumerate(live.split(PIECE)):
        bits = part.contiguous().view(kind).to(torch.int64)
        places = torch.arange(1, part.numel() + 1, device=part.device)
        total = hash((total, number, int((bits * places).sum())))
    return total


def _gaps(state: EngineState, ranges: list[dict[str, list[tuple[int, int]]]]) -> list[str]:
    found = []
    for name, shape in state.parameter_shapes().items():
        at = 0
        for start, stop in sorted(r for rank in ranges for r in rank.get(name, ()) if r[1] > r[0]):
            if start != at:
                break
            at = stop
        else:
            if at == torch.Size(shape).numel():
                continue
        found.append(f"{name}: its elements from {at} on are held by no rank, or by several")
    return found


def _strays(digests: list[dict[str, Any]]) -> list[str]:
    return [
        f"rank {rank}: its {name} differs from rank 0's"
        for rank, own in enumerate(digests)
        for name, digest in own.items()
        if digest != digests[0][name]
    ]
