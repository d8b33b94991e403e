"""Matrices that ZeRO has cut, on their way to one owner rank and back.

Newton-Schulz needs whole matrices, and a rank holds pieces (see partition.py). So each matrix has one owner,
the rank that holds most of it, which receives the other pieces, works on the whole, and sends the results
back. At stages 1 and 2 most matrices lie on one rank already and only those cut by a partition's edge travel;
at stage 3 all do. Who sends what to whom is decided once, on every rank alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from wm_ds.optim.param_rules import Row
from wm_ds.optim.partition import Fragment

EXCHANGE_ELEMENTS = 1 << 26  # matrices sent to their owners at a time: 256 MiB in fp32


@dataclass(frozen=True)
class Matrix:
    """One matrix of a parameter: `index` counts the matrices of a stack."""

    name: str
    index: int
    rows: int
    cols: int
    scale: float
    """Its orthogonalised update is multiplied by this."""

    @property
    def start(self) -> int:
        """Its first element in the flattened parameter."""
        return self.index * self.size

    @property
    def size(self) -> int:
        """Its elements."""
        return self.rows * self.cols


@dataclass
class Exchange:
    """One batch of matrices on their way to their owners and back. Sizes are element counts per rank."""

    send: list[list[tuple[Fragment, int, int]]]
    """Per owner: (fragment, start, stop in the flattened parameter) of my pieces, in matrix order."""
    receive: list[int]
    """Per sender: elements that I get for the matrices I own."""
    mine: list[tuple[Matrix, list[tuple[int, int, int]]]] = field(default_factory=list)
    """Matrices I own, with their pieces as (sender, offset in what it sends me, count)."""
    local: bool = True
    """No rank sends anything to another."""

    def apply(self, update: Tensor, device: torch.device, work: Callable[[Tensor, float], Tensor]) -> None:
        """Replace these matrices inside `update`, a tensor like the master, by `work(matrix, scale)`.

        Collective unless `local`. Matrices [rows, cols] travel and are worked on in fp32 on `device`.
        """
        pieces = [[f.of(update)[a - f.start : b - f.start] for f, a, b in to] for to in self.send]
        outgoing = [_joined(p, device) for p in pieces]
        if self.local:
            incoming = outgoing
        else:
            sizes = [o.numel() for o in outgoing]
            received = torch.empty(sum(self.receive), dtype=torch.float32, device=device)
            dist.all_to_all_single(received, torch.cat(outgoing), self.receive, sizes)
            incoming = list(received.split(self.receive))
        for matrix, parts in self.mine:
            whole = torch.cat([incoming[r].narrow(0, o, n) for r, o, n in parts])
            result = work(whole.view(matrix.rows, matrix.cols), matrix.scale).reshape(-1)
            done = 0
            for r, o, n in parts:
                incoming[r].narrow(0, o, n).copy_(result.narrow(0, done, n))
                done += n
        if not self.local:
            back = torch.empty(sum(sizes), dtype=torch.float32, device=device)
            dist.all_to_all_single(back, torch.cat(incoming), sizes, self.receive)
            outgoing = list(back.split(sizes))
        for to, result in zip(pieces, outgoing):
            done = 0
            for piece in to:
                piece.copy_(result.narrow(0, done, piece.numel()))
                done += piece.numel()


class Planner:
    """Decides every matrix's owner, the same on every rank. Collective, with each rank's own fragments.

    The owner is the rank that holds most of a matrix; among equals the one with the least work so far.
    """

    def __init__(self, fragments: Iterable[Fragment]) -> None:
        self.own = {f.name: f for f in fragments}
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        held = [(f.name, f.start, f.stop) for f in self.own.values()]
        everyone: list = [held]
        if self.world > 1:
            everyone = [None] * self.world
            dist.all_gather_object(everyone, held)
            whole = all(f.stop - f.start == math.prod(f.shape) for f in self.own.values())
            if whole and all(theirs == held for theirs in everyone):
                # stage 0: everybody holds everything and needs no one
                everyone, self.world, self.rank = [held], 1, 0
        self.holders: dict[str, list[tuple[int, int, int]]] = {}
        for r, ranges in enumerate(everyone):
            for name, start, stop in ranges:
                self.holders.setdefault(name, []).append((r, start, stop))
        self.load = [0.0] * self.world

    def exchanges(self, rows: Iterable[Row]) -> list[Exchange]:
        """The exchanges for the matrices of some parameters, about EXCHANGE_ELEMENTS in each."""
        found: list[Exchange] = []
        batch: list[Matrix] = []
        for row in rows:
            for index in range(row.matrices):
                batch.append(Matrix(row.name, index, row.shape[-2], row.shape[-1], row.scale))
                if sum(matrix.size for matrix in batch) >= EXCHANGE_ELEMENTS:
                    found.append(self._exchange(batch))
                    batch = []
        return [*found, self._exchange(batch)] if batch else found

    def _exchange(self, batch: list[Matrix]) -> Exchange:
        exchange = Exchange([[] for _ in range(self.world)], [0] * self.world)
        for matrix in batch:
            first, last = matrix.start, matrix.start + matrix.size
            pieces = sorted(
                (max(a, first), min(b, last), r)
                for r, a, b in self.holders[matrix.name]
                if max(a, first) < min(b, last)
            )
            owner = self._owner(matrix, pieces, exchange)
            parts = []
            for a, b, r in pieces:
                if r == self.rank:
                    exchange.send[owner].append((self.own[matrix.name], a, b))
                if owner == self.rank:
                    parts.append((r, exchange.receive[r], b - a))
                    exchange.receive[r] += b - a
            if owner == self.rank:
                exchange.mine.append((matrix, parts))
        return exchange

    def _owner(self, matrix: Matrix, pieces: list[tuple[int, int, int]], exchange: Exchange) -> int:
        held = [0] * self.world
        for a, b, r in pieces:
            held[r] += b - a
        owner = min(range(self.world), key=lambda r: (-held[r], self.load[r], r))
        self.load[owner] += matrix.size * min(matrix.rows, matrix.cols)
        exchange.local = exchange.local and held[owner] == matrix.size
        return owner


def _joined(pieces: list[Tensor], device: torch.device) -> Tensor:
    if not pieces:
        return torch.empty(0, dtype=torch.float32, device=device)
    return torch.cat([p.to(device) for p in pieces])
