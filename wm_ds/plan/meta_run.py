"""A model's operations on meta tensors, which have shapes and no numbers, as they would run on a CPU.

Meta tensors have no autocast, and attention on them is taken apart into products. `as_on_cpu` gives back
both, so that memory counted here (storage_tracker.py) is the memory of a run on the CPU; a test compares it
with torch's own, much slower, fake tensors. `MetaTracker` counts, and it remembers the shapes that operations
gave: the steps of a schedule repeat the same ones thousands of times.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from wm_ds.model import attention as model_attention
from wm_ds.plan.storage_tracker import StorageTracker

PRODUCTS = ((F, "linear"), (torch, "matmul"), (torch, "bmm"))  # what the models use of what autocast casts


class Autocast:
    """The CPU's autocast for meta tensors: products in its dtype, and each weight cast once.

    It follows `torch.autocast("cpu", …)`, which checkpointing puts back for what backward recomputes.
    """

    def __init__(self) -> None:
        self.casts: dict[int, Tensor] = {}

    def cast(self, x: Any) -> Any:
        """A float32 tensor in autocast's dtype; anything else as it is."""
        if not isinstance(x, Tensor) or x.dtype != torch.float32:
            return x
        dtype = torch.get_autocast_dtype("cpu")
        is_weight = x.requires_grad and x.is_leaf and not x._is_view()
        if not (is_weight and torch.is_autocast_cache_enabled()):
            return x.to(dtype)
        if id(x) not in self.casts:
            with torch.enable_grad():
                self.casts[id(x)] = x.to(dtype)
        return self.casts[id(x)]

    def product(self, function: Callable) -> Callable:
        """`function` with its arguments cast where autocast is on."""

        def cast_first(*args: Any, **kwargs: Any) -> Any:
            if torch.is_autocast_enabled("cpu"):
                args = tuple(self.cast(x) for x in args)
                kwargs = {name: self.cast(x) for name, x in kwargs.items()}
            return function(*args, **kwargs)

        return cast_first


def attention(  # noqa: PLR0913 - the signature of the function that it stands in for
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention by the CPU's kernel, which keeps no weights for backward."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


@contextlib.contextmanager
def as_on_cpu() -> Iterator[None]:
    """Inside, models on the meta device do what they would do on the CPU, also under `torch.autocast("cpu")`.

    Not for two threads at a time: it replaces functions of torch.
    """
    autocast, clear, original = Autocast(), torch.clear_autocast_cache, model_attention.compute_dtype

    def clear_both() -> None:
        autocast.casts.clear()
        clear()

    def compute_dtype(x: Tensor) -> torch.dtype:
        return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype

    # Patches, because a torch-function mode is off inside backward, where layers are recomputed.
    with contextlib.ExitStack() as patches:
        for owner, name in PRODUCTS:
            replaced = autocast.product(getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, replaced))
        replaced = autocast.product(attention)
        patches.enter_context(mock.patch.object(F, "scaled_dot_product_attention", replaced))
        patches.enter_context(mock.patch.object(torch, "clear_autocast_cache", clear_both))
        for module in list(sys.modules.values()):  # the model's modules import it by name
            if getattr(module, "compute_dtype", None) is original:
                patches.enter_context(mock.patch.object(module, "compute_dtype", compute_dtype))
        yield


class MetaTracker(StorageTracker):
    """Counts storages of a run on meta tensors, where an operation on shapes seen before is not run again.

    Attributes:
        results: (operation, its arguments' shapes and other arguments) -> shape, stride and dtype of the new
            tensor that it returns; None for operations that must run, because they return views or several
            tensors.
    """

    def __init__(self, parameters: Iterable[Tensor] = ()) -> None:
        super().__init__(parameters)
        self.results: dict[Any, tuple | None] = {}

    def __torch_dispatch__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if writes_in_place(func):
            return args[0]  # there are no numbers to change
        try:
            key = (id(func), *map(described, args), *((name, described(x)) for name, x in kwargs.items()))
            known = self.results.get(key, ...)
        except TypeError:  # an argument without a hash
            return super().__torch_dispatch__(func, types, args, kwargs)
        if known is not None and known is not ...:
            shape, stride, dtype = known
            result = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            self.note(result)
            return result
        before = len(self._live)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if known is ...:
            new = isinstance(result, Tensor) and result.is_meta and len(self._live) == before + 1
            self.results[key] = (result.shape, result.stride(), result.dtype) if new else None
        return result


@cache
def writes_in_place(func: Any) -> bool:
    """Whether the operation only changes the numbers of its first argument, which it returns."""
    schema = func._schema
    if not schema.name.endswith("_") or not schema.is_mutable or torch.Tag.inplace_view in func.tags:
        return False
    first = schema.arguments[0].alias_info
    return len(schema.returns) == 1 and first is not None and first.is_write


def described(argument: Any) -> Any:
    """What a result's shape can depend on, as a key. Raises TypeError for what has no hash."""
    if isinstance(argument, Tensor):
        return argument.shape, argument.stride(), argument.dtype, argument.is_meta
    if isinstance(argument, list | tuple):
        return tuple(map(described, argument))
    hash(argument)
    return type(argument), argument  # 1, 1.0 and True are equal
