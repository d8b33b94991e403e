"""Which part of which parameter this rank's optimizer holds, at every ZeRO stage.

DeepSpeed hides the optimizer's view of the model behind a different layout per stage:

* stage 0, fp32: the optimizer steps the parameters themselves;
* stage 0, bf16: an unfused wrapper keeps one fp32 copy per parameter;
* stages 1 and 2: every parameter group is one flat fp32 vector, cut into `world` equal partitions, so a
  parameter may straddle two ranks;
* stage 3: every *parameter* is cut into `world` equal pieces (the last padded); the pieces of a sub-group
  are concatenated into one flat fp32 vector.

`fragments(engine)` describes all of them in one way: a list of `Fragment`s, each the range `[start, stop)` of
a flattened parameter, stored at `master.view(-1)[offset : offset + stop - start]`. `master` is the fp32
master weight, and it is also the key under which the optimizer keeps its state: `engine.optimizer`'s inner
optimizer has `state[master]`, a dict of tensors of `master`'s shape (`momentum` for Muon; `exp_avg`,
`exp_avg_sq` for AdamW), created at construction of the engine by `muon.MuonAdamW.attach`. So the same
slice of a state tensor belongs to the same parameter range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from wm_ds.distributed import deepspeed_internals

WRAPPER_PREFIX = "lm."  # the Hugging Face model's name inside loss.TokenLoss, which DeepSpeed wraps


@dataclass(frozen=True, eq=False)
class Fragment:
    """The elements `[start, stop)` of the flattened parameter `name`, held by this rank."""

    name: str
    """Relative to the Hugging Face model, e.g. `model.layers.0.mlp.up_proj.weight`."""
    shape: tuple[int, ...]
    """Of the whole parameter."""
    start: int
    stop: int
    master: torch.Tensor
    """fp32 master storage; the key into the inner optimizer's `state`."""
    offset: int
    """Of element `start` inside the flattened `master`."""
    group: int
    """Index into the optimizer's `param_groups`."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The 1-D view of this range in `tensor`: the master, its gradient or a state tensor like it."""
        return tensor.view(-1).narrow(0, self.offset, self.stop - self.start)


def parameter_names(module: torch.nn.Module) -> dict[int, str]:
    """id(parameter) -> name relative to the Hugging Face model; a tied weight appears once, under its first
    name."""
    return {id(p): name.removeprefix(WRAPPER_PREFIX) for name, p in module.named_parameters()}


@dataclass(frozen=True, eq=False)
class Master:
    """One fp32 tensor that the optimizer steps."""

    tensor: torch.Tensor
    group: int
    """Index into the optimizer's `param_groups`."""
    names: tuple[str, ...]
    """The parameters of which some rank holds a piece in this master; the same on every rank."""


def masters(engine: Any) -> list[Master]:
    """The fp32 masters in the order in which a step updates them, which is the same on every rank.

    `engine` is the DeepSpeed engine. Every rank may call it alone: nothing is communicated.
    """
    names = parameter_names(engine.module)
    return [
        Master(master, group, tuple(names[id(p)] for p in parameters))
        for master, group, parameters in deepspeed_internals.master_groups(engine)
    ]


def fragments(engine: Any) -> list[Fragment]:
    """This rank's fragments, master by master; the same order at every call.

    `engine` is the DeepSpeed engine. Every rank may call it alone: nothing is communicated. A rank that holds
    no element of a parameter has no fragment of it.
    """
    stage = engine.zero_optimization_stage()
    parameters = {
        name: p for p, name in zip(engine.module.parameters(), parameter_names(engine.module).values())
    }
    found = []
    for master in masters(engine):
        offset = 0
        for name in master.names:
            p = parameters[name]
            if stage == 3:  # every parameter is cut into equal pieces, the last one padded
                start, stop, length = deepspeed_internals.cut_range(p)
                if stop > start:
                    shape = deepspeed_internals.shape_of(p)
                    found.append(Fragment(name, shape, start, stop, master.tensor, offset, master.group))
                offset += length
            elif stage in (1, 2):
                held = deepspeed_internals.linked_range(p)
                if held is not None:
                    start, count, at = held
                    found.append(
                        Fragment(name, tuple(p.shape), start, start + count, master.tensor, at, master.group)
                    )
            else:
                found.append(Fragment(name, tuple(p.shape), 0, p.numel(), master.tensor, 0, master.group))
    return found
