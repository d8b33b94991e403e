"""The training state of a DeepSpeed engine as named shares, for saving and loading.

`optim/partition.py` knows which range of which parameter this rank's optimizer steps. This file adds what
else a checkpoint needs: the optimizer's state beside each master weight, frozen parameters and persistent
buffers, which rank saves what several ranks hold, and how the model's own weights follow loaded masters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from wm_ds.distributed import deepspeed_internals
from wm_ds.optim.partition import WRAPPER_PREFIX, fragments, parameter_names

WEIGHT = "weight"


@dataclass
class Share:
    """A live view of one rank on [start, stop) of a flattened tensor; `owned` is the part that it saves.

    `kind` is "weight" or the key of an optimizer state. Where all ranks hold a tensor whole (stage 0, frozen
    parameters, buffers) each element is owned by exactly one of them, but all of them load it.
    """

    name: str
    kind: str
    start: int
    stop: int
    owned: tuple[int, int]
    view: torch.Tensor

    def owned_view(self) -> torch.Tensor:
        """The 1-D live view of what this rank saves."""
        return self.view[self.owned[0] - self.start : self.owned[1] - self.start]


class EngineState:
    """The state of this rank's engine, by names relative to the Hugging Face model.

    Raises ValueError where the engine keeps state out of reach (NVMe offload, dynamic loss scaling).
    """

    def __init__(self, engine: Any, *, rank: int = 0, world: int = 1) -> None:
        self.engine, self.rank, self.world = engine, rank, world
        self.stage = int(engine.zero_optimization_stage())
        self.optimizer = deepspeed_internals.base_optimizer(engine)
        if deepspeed_internals.keeps_state_on_nvme(engine):
            raise ValueError("NVMe offload is not supported by checkpoints; offload to cpu instead")
        if getattr(engine.optimizer, "dynamic_loss_scale", False) is True:
            raise ValueError(
                "fp16 with dynamic loss scaling is not supported by checkpoints; use bf16 or autocast"
            )
        names = parameter_names(engine.module)
        self._parameters = {names[id(p)]: p for p in engine.module.parameters()}
        persistent = engine.module.state_dict(keep_vars=True).keys()
        buffers = ((name, b) for name, b in engine.module.named_buffers() if name in persistent)
        self._buffers = {name.removeprefix(WRAPPER_PREFIX): b for name, b in buffers}
        numels = {name: int(torch.Size(shape).numel()) for name, shape in self.shapes().items()}
        self._cuts = even_cuts(numels, rank, world)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter and persistent buffer; the same on all ranks."""
        return self.parameter_shapes() | {name: tuple(b.shape) for name, b in self._buffers.items()}

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, whole."""
        return {name: deepspeed_internals.shape_of(p) for name, p in self._parameters.items()}

    def live_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter as the model computes with it, whole and flat, in the same order on all ranks.

        At stage 3 each is gathered for its turn: a collective, and nothing may be left out.
        """
        for name, parameter in self._parameters.items():
            with deepspeed_internals.whole(parameter):
                yield name, parameter.detach().view(-1)

    def updated(self) -> bool:
        """Whether the optimizer has made an update since it was built or loaded."""
        return any(int(group["step"]) for group in self.optimizer.param_groups)

    def roles(self) -> dict[str, str]:
        """ "trainable", "frozen" or "buffer" for every name."""
        roles = {n: "trainable" if p.requires_grad else "frozen" for n, p in self._parameters.items()}
        return roles | dict.fromkeys(self._buffers, "buffer")

    def tied(self) -> dict[str, str]:
        """Second names of tied parameters, each with the name under which the tensor is stored."""
        first = parameter_names(self.engine.module)
        every = self.engine.module.named_parameters(remove_duplicate=False)
        names = ((name.removeprefix(WRAPPER_PREFIX), first[id(p)]) for name, p in every)
        return {name: stored for name, stored in names if name != stored}

    def shares(self) -> Iterator[Share]:
        """All live views of this rank, in the same order every time."""
        for piece in fragments(self.engine):
            whole = self.stage == 0
            owned = self._cuts[piece.name] if whole else (piece.start, piece.stop)
            tensors = {WEIGHT: piece.master, **self.optimizer.state[piece.master]}
            for kind, tensor in tensors.items():
                if not torch.is_tensor(tensor) or tensor.shape != piece.master.shape:
                    raise ValueError(f"optimizer state {kind} of {piece.name} is not shaped like its weight")
                yield Share(piece.name, kind, piece.start, piece.stop, owned, piece.of(tensor.detach()))
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                continue
            if deepspeed_internals.is_cut(parameter):  # stage 3 cuts frozen parameters too
                start, stop, _ = deepspeed_internals.cut_range(parameter)
                part = deepspeed_internals.piece(parameter)
                yield Share(name, WEIGHT, start, stop, (start, stop), part[: stop - start])
            else:
                yield self._whole(name, parameter)
        for name, buffer in self._buffers.items():
            yield self._whole(name, buffer)

    def _whole(self, name: str, tensor: torch.Tensor) -> Share:
        return Share(name, WEIGHT, 0, tensor.numel(), self._cuts[name], tensor.detach().view(-1))

    def update_counts(self) -> dict[str, int]:
        """How many updates the optimizer has made of each parameter on this rank, for bias correction."""
        groups = self.optimizer.param_groups
        return {piece.name: int(groups[piece.group]["step"]) for piece in fragments(self.engine)}

    def set_update_counts(self, counts: dict[str, int]) -> None:
        """Put the optimizer's counts back. Raises ValueError where the parameters of a group disagree."""
        new: dict[int, int] = {}
        for piece in fragments(self.engine):
            count = counts[piece.name]
            if new.setdefault(piece.group, count) != count:
                raise ValueError(
                    f"{piece.name} has had {count} updates, others of its group {new[piece.group]}"
                )
        for index, group in enumerate(self.optimizer.param_groups):
            # A group of which this rank holds no element still counts: all groups are stepped together.
            group["step"] = new.get(index, max(counts.values(), default=0))

    def before_load(self) -> None:
        """Release parameters that stage 3 holds gathered, so that no stale copy outlives the load."""
        deepspeed_internals.release_gathered(self.engine)

    @torch.no_grad()
    def after_load(self) -> None:
        """Bring the weights that the model computes with in line with the loaded masters. A collective."""
        deepspeed_internals.refresh_weights(self.engine)


def even_cuts(numels: dict[str, int], rank: int, world: int) -> dict[str, tuple[int, int]]:
    """`rank`'s part [start, stop) of each tensor: all, laid end to end, are cut into `world` equal parts."""
    total = sum(numels.values())
    low, high = rank * total // world, (rank + 1) * total // world
    cuts, at = {}, 0
    for name, numel in numels.items():
        start, stop = min(max(low - at, 0), numel), min(max(high - at, 0), numel)
        cuts[name] = (start, max(start, stop))
        at += numel
    return cuts
