"""A golden: the hash of some bytes, and for numbers a few of them to read.

An entry is `[sha256, values]`. The hash is exact. The values (of a tensor: its norm, its sum and four of its
elements) tell the reader how far apart two results are, and are what is compared where the machine differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

Entry = tuple[str, list[float]]
Entries = dict[str, Entry]


def of_bytes(data: bytes) -> Entry:
    """Bytes, which are the same on every machine."""
    return hashlib.sha256(data).hexdigest(), []


def of_tensors(tensors: Iterable[tuple[str, Tensor]]) -> Entry:
    """Named tensors, in order of their names."""
    digest = hashlib.sha256()
    values: list[float] = []
    for name, tensor in sorted(tensors, key=lambda named: named[0]):
        tensor = tensor.detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
        values.append(float(tensor.double().norm()))
    return digest.hexdigest(), values


def of_tensor(tensor: Tensor) -> Entry:
    """One tensor, with its norm, its sum and four elements."""
    digest, values = of_tensors([("", tensor)])
    flat = tensor.detach().double().flatten()
    picked = flat[torch.linspace(0, flat.numel() - 1, 4).long()]
    return digest, [*values, float(flat.sum()), *picked.tolist()]


def of_floats(numbers: list[float]) -> Entry:
    """Python floats, all of them shown."""
    return hashlib.sha256(repr([float(x) for x in numbers]).encode()).hexdigest(), [float(x) for x in numbers]
