"""How ZeRO-3 gathers parameters for a model whose layers run many times a step.

Stage 3 keeps each parameter cut over the ranks and gathers it when a module that needs it runs. A multi-pass
step runs every layer `passes x groups` times forward and most of that again backward, so gathering at every
traversal costs hundreds of all-gathers. `zero3.gather` chooses:

  step       everything in a few large all-gathers at the start, kept until backward is through. Needs room
             for all parameters in the precision of the stored weights (bf16: 2 bytes each, autocast and fp32:
             4); master weights, optimizer state and reduced gradients stay cut.
  pass       module by module when first needed, then kept from one traversal to the next: each parameter at
             most once a pass, in small pieces that travel while earlier modules compute. Same peak as step.
  traversal  gathered and released at every traversal of a layer: the least memory, hundreds of gathers. Needs
             per-layer recomputation, without which backward keeps every layer gathered anyhow.

DeepSpeed's own limits (1e9 parameters) would silently turn `pass` into `traversal` for larger models and let
`traversal` keep everything for smaller ones, so they are always derived from the model here.

DeepSpeed prefetches along a trace of modules recorded in the first step. A forward that runs other modules -
an evaluation with more passes - would invalidate it; `Traces` gives every kind of forward a trace of its own.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from wm_ds.distributed import deepspeed_internals, environment
from wm_ds.families import NAMES

GATHERS = ("step", "pass", "traversal")
PREFETCH = 50_000_000  # parameters on their way at most, beside a layer's own


def default_gather(family: str) -> str:
    """Multi-pass models gather once a step; a model whose layers run once gains nothing from that."""
    return "step" if NAMES[family].has_passes else "traversal"


def limits(gather: str, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, int]:
    """DeepSpeed's stage-3 limits, in parameters, for a model with these (name, shape) of parameters.

    `stage3_max_reuse_distance`: a parameter is kept if it is needed again before so many others are.
    `stage3_max_live_parameters` bounds prefetching, `stage3_prefetch_bucket_size` one prefetch.
    """
    sizes = {name: math.prod(shape) for name, shape in shapes}
    total = sum(sizes.values())
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        match = re.search(r"\.layers\.(\d+)\.", name)
        key = match[1] if match else name.split(".")[1] if "pool" in name else name
        layers[key] = layers.get(key, 0) + size
    largest = max(layers.values(), default=1)
    if gather == "traversal":
        # Room for the unit at hand and the next one.
        return {
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 2 * largest,
            "stage3_prefetch_bucket_size": min(PREFETCH, largest),
        }
    # Between two uses of a parameter lie at most all the others, once forward and once backward. Once a step:
    # prefetches so large that a step has at most half as many gathers as the model has layers.
    bucket = (
        max(PREFETCH, 2 * total // max(1, len(layers)) + 1) if gather == "step" else min(PREFETCH, largest)
    )
    return {
        "stage3_max_reuse_distance": 2 * total + 1,
        "stage3_max_live_parameters": 2 * total + 1,
        "stage3_prefetch_bucket_size": bucket,
    }


def node_partition(gather: str, world: int) -> int:
    """hpZ: over how many ranks a second copy of the parameters is cut, so that re-gathers stay in a node.

    The ranks of a node where parameters are gathered many times and there are several nodes; else 1 (off).
    """
    local = environment.whole("LOCAL_WORLD_SIZE", 1, least=1)
    return local if gather == "traversal" and 1 < local < world and world % local == 0 else 1


class Traces:
    """Stage 3's recorded traces of modules, one for each kind of forward; nothing at other stages.

    A test counts how often DeepSpeed finds its trace invalid.
    """

    def __init__(self, ds: Any) -> None:
        self._ds = ds
        self._kept: dict[object, tuple] = {}

    def forget(self) -> None:
        """Training goes on with other passes: its next step records a new trace."""
        if self._ds.zero_optimization_stage() != 3:
            return
        coordinator = deepspeed_internals.coordinator(self._ds)
        mode, modules, _ = deepspeed_internals.trace(coordinator)
        if modules:
            coordinator.reset_step()
        deepspeed_internals.set_trace(coordinator, (type(mode).INVALID, [], []))

    @contextlib.contextmanager
    def of(self, kind: object) -> Iterator[None]:
        """Forwards inside are a kind of their own; the training trace is back afterwards."""
        if self._ds.zero_optimization_stage() != 3:
            yield
            return
        coordinator = deepspeed_internals.coordinator(self._ds)
        mode, modules, _ = deepspeed_internals.trace(coordinator)
        if modules:
            coordinator.reset_step()  # a trace that the last step recorded is completed first
        training = deepspeed_internals.trace(coordinator)
        fresh: tuple[Any, ...] = (type(mode).INVALID, [], [])
        deepspeed_internals.set_trace(coordinator, self._kept.get(kind, fresh))
        try:
            yield
            coordinator.reset_step()
        finally:
            self._kept[kind] = deepspeed_internals.trace(coordinator)
            deepspeed_internals.set_trace(coordinator, training)


def parameter_shapes(module: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of all parameters, whole ones also where stage 3 has cut them."""
    return [(name, deepspeed_internals.shape_of(p)) for name, p in module.named_parameters()]
