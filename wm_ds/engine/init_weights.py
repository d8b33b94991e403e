"""Fresh weights, one parameter at a time: the numbers of families.build_model without ever holding the model.

A model of 30 B parameters takes 120 GB in fp32, and every rank of a node would build one. So the model is
constructed without storage for its parameters (on the meta device) while every write to one of them is noted:
draws of random numbers, fills, copies. `Shell.values` then repeats the writes in the same order from the same
seed, on one parameter after another; `place` gives each value to the rank that keeps it. Draws that a later
one overwrites are repeated, too, since they advance the generator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.configuration_utils import PretrainedConfig

from wm_ds.distributed import deepspeed_internals
from wm_ds.families import construct


@dataclass(frozen=True)
class _Write:
    """One operation that wrote to a parameter (`target`, on the meta device, perhaps a part of it)."""

    operation: Callable
    target: Tensor
    arguments: tuple
    options: dict[str, Any]

    @property
    def storage(self) -> int:
        return self.target.untyped_storage()._cdata

    @property
    def whole(self) -> bool:
        return self.target.nbytes == self.target.untyped_storage().nbytes()

    @property
    def random(self) -> bool:
        return torch.Tag.nondeterministic_seeded in self.operation.tags  # type: ignore[attr-defined]

    def repeat(self, memory: Tensor, generator: torch.Generator) -> None:
        """Do it to `memory`, the parameter's elements, flat."""
        t = self.target
        place = memory.as_strided(t.shape, t.stride(), t.storage_offset())
        options = self.options | ({"generator": generator} if self.random else {})
        self.operation(place, *self.arguments, **options)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[_Write] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        target = args[0] if args else None
        if isinstance(target, Tensor) and target.is_meta and func._schema.is_mutable:
            self.writes.append(_Write(func, target, args[1:], options))
        return func(*args, **options)


class Shell:
    """A model on the meta device (`lm`; its buffers are real), and how its parameters get their values."""

    def __init__(
        self, hf_config: PretrainedConfig, *, recompute: str = "none", entries_on_host: bool = False
    ) -> None:
        recorder = _Recorder()
        with _parameters_on_meta(), recorder:
            self.lm: PreTrainedModel = construct(
                hf_config, recompute=recompute, entries_on_host=entries_on_host
            )
        self._writes = recorder.writes

    def values(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """(name, value) of every parameter, tied ones once, in fp32 on the CPU, equal to build_model's.

        The caller drops each value before it takes the next.
        """
        generator = torch.Generator().manual_seed(seed)
        names = {p.untyped_storage()._cdata: (name, p) for name, p in self.lm.named_parameters()}
        # What was there before the last write to the whole parameter does not matter.
        first = {w.storage: i for i, w in enumerate(self._writes) if w.whole}
        last = {w.storage: i for i, w in enumerate(self._writes)}
        missing = [name for storage, (name, _) in names.items() if storage not in first]
        if missing:
            raise RuntimeError(f"nothing initialises {missing[0]}")
        alive: dict[int, Tensor] = {}
        for i, write in enumerate(self._writes):
            kept = write.storage in names and i >= first[write.storage]
            if not kept and not write.random:
                continue
            memory = alive.pop(write.storage, None)
            if memory is None:
                size = write.target.untyped_storage().nbytes() // write.target.element_size()
                memory = torch.empty(size, dtype=write.target.dtype)
            write.repeat(memory, generator)
            if kept and i == last[write.storage]:
                name, p = names[write.storage]
                yield name, memory.view(p.shape)
            elif kept:
                alive[write.storage] = memory
            del memory


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Whatever becomes a parameter of a module loses its storage. Buffers are left alone."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), param.requires_grad)
        original(module, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


@torch.no_grad()
def place(
    lm: nn.Module, values: Iterable[tuple[str, Tensor]], full: dict[str, Any], device: torch.device
) -> None:
    """Give the parameters of `lm`, on the meta device, their values in storage precision. Collective.

    At ZeRO stage 3 each is cut as soon as it is there, and a rank keeps its piece (in the host's memory where
    parameters are offloaded). `full`: DeepSpeed's complete configuration.
    """
    dtype = torch.bfloat16 if full.get("bf16", {}).get("enabled") else torch.float32
    cut = None
    if full["zero_optimization"].get("stage") == 3:
        cut = deepspeed_internals.cutter(full, dtype)
    for buffer in lm.buffers():
        buffer.data = buffer.data.to(device)
    names = {id(p): name for name, p in lm.named_parameters()}
    owners: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for module in lm.modules():
        for key, p in module._parameters.items():
            if p is not None:
                owners[names[id(p)]].append((module, key))
    for name, value in values:
        places = owners.pop(name)
        p = nn.Parameter(value.to(device, dtype), places[0][0]._parameters[places[0][1]].requires_grad)  # type: ignore[union-attr]
        for module, key in places:
            module._parameters[key] = p
        if cut is not None:
            deepspeed_internals.cut(cut, p)
    if owners:
        raise ValueError(f"no value was given for {next(iter(owners))}")
