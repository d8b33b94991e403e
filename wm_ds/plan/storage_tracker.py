"""Memory of a computation, counted storage by storage.

`StorageTracker` sees every operation, counts the storage of each result once, whatever views share it, and
subtracts it when the storage dies. It works alike on real tensors, on any device, and on fake ones, where
nothing is computed and nothing allocated: a step of a model of many gigabytes is measured in seconds.

What it does not see: memory that a kernel takes and returns inside one operation (workspaces), the rounding
up and the fragmentation of CUDA's allocator, and libraries' own memory (NCCL, cuBLAS: about 1 GiB a GPU).
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MIB = 1 << 20


class StorageTracker(TorchDispatchMode):
    """Bytes of storages that were made while it is active and are alive.

    Attributes:
        current: bytes alive now, by label.
        peak: bytes alive at the worst moment since the start or `reset_peak`.
        at_peak: the same moment by label.
        peaks: every label's own worst moment.
        label: given to storages made from now on.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        """`parameters`: their storages are not counted, and what backward makes in the shape of one of them
        is labelled "gradients": the sum over a parameter's uses, which autograd holds until the last use."""
        super().__init__()
        parameters = list(parameters)
        self._live: dict[int, tuple[int, str, weakref.ref]] = {}
        self._foreign = {p.untyped_storage()._cdata for p in parameters}
        self._shapes = {tuple(p.shape) for p in parameters if p.requires_grad}
        # The gradient of a product's right factor is made transposed.
        self._shapes |= {(*shape[:-2], shape[-1], shape[-2]) for shape in self._shapes if len(shape) >= 2}
        self.current: Counter[str] = Counter()
        self.total = self.peak = 0
        self.at_peak: dict[str, int] = {}
        self.peaks: Counter[str] = Counter()
        self.label = "activations"
        self.in_backward = False

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.note(result)
        elif isinstance(result, tuple | list):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.note(leaf)
        return result

    def note(self, tensor: Tensor, label: str | None = None) -> None:
        """Count the tensor's storage, unless it is known already."""
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._foreign:
            return
        if key in self._live:
            self._resized(key, storage.nbytes())
            return
        if label is None:
            gradient = self.in_backward and tuple(tensor.shape) in self._shapes
            label = "gradients" if gradient else self.label
        self._live[key] = (storage.nbytes(), label, weakref.ref(storage, lambda _: self._gone(key)))
        self._add(label, storage.nbytes())

    def _add(self, label: str, size: int) -> None:
        self.current[label] += size
        self.total += size
        self.peaks[label] = max(self.peaks[label], self.current[label])
        if self.total > self.peak:
            self.peak, self.at_peak = self.total, dict(self.current)

    def _resized(self, key: int, size: int) -> None:
        old, label, storage = self._live[key]
        if size != old:
            self._live[key] = (size, label, storage)
            self._add(label, size - old)

    def _gone(self, key: int) -> None:
        size, label, _ = self._live.pop(key)
        self._add(label, -size)

    def reset_peak(self) -> None:
        """Forget earlier peaks: the worst moment starts anew from what is alive now."""
        self.peak, self.at_peak = self.total, dict(self.current)
        self.peaks = Counter(self.current)

    @contextlib.contextmanager
    def labelled(self, label: str) -> Iterator[None]:
        """Storages made inside get this label."""
        before, self.label = self.label, label
        try:
            yield
        finally:
            self.label = before


def step_memory(module: nn.Module, loss: Callable[[], Tensor]) -> StorageTracker:
    """Run `loss()` and its backward pass once under a tracker; gradients of `module` are freed afterwards.

    Peaks include gradients (label "gradients") but no parameters. Works under FakeTensorMode, too.
    """
    tracker = StorageTracker(module.parameters())
    with tracker:
        value = loss()
        tracker.in_backward = True
        value.backward()
        del value
    module.zero_grad(set_to_none=True)
    return tracker
