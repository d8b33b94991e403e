"""In which order a source's rows come, and how far it has been read: computed, never stored.

    units --(an order per epoch)--> windows --(cut into rows, shuffled in the window)--> rows of one length

A source is read in *units*, rows of the length that it was packed with (or, where its first stage reads
longer rows than that, of their length). Each epoch has an order of its own over all units, a keyed
permutation. Rows of the unit's length come in this order. For shorter rows, which are parts of units, the
order is cut into windows of 256 units, and the parts of a window come in an order of the window's own. So
whatever has been read at one length, the rest can be read at another: what is left of the window begun is
read first (the parts of it that have been seen are filler in a longer row), then whole windows. Every token
of an epoch is seen once, whichever lengths it was read in.

Where a stage takes a source up is its `Cursor`, which follows from the stages before it alone.

`Mixture` says which source a sample is drawn from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from wm_ds.data import shuffle

WINDOW = 256  # units whose parts are shuffled among each other
MIX_BLOCK = 1 << 16  # samples over which mixing weights hold exactly


@dataclass(frozen=True)
class Cursor:
    """How far a source has been read.

    Attributes:
        epoch, window: where it stands.
        seen: of the window, what has been read: bool [units, pieces], pieces of a unit of equal length; None
            for nothing.
    """

    epoch: int = 0
    window: int = 0
    seen: np.ndarray | None = None


class SourceOrder:
    """The units of a source in order: `units` of `length` tokens. `number`: the source's among a run's."""

    def __init__(self, units: int, length: int, *, seed: int, number: int) -> None:
        self.units, self.length, self._seed, self._number = units, length, seed, number
        self.windows = -(-units // WINDOW)
        self.window_order = lru_cache(maxsize=16)(self._window_order)

    def rows(self, epoch: np.ndarray, index: np.ndarray) -> np.ndarray:
        """Units at places `index` of the epochs' orders (int64, equal shapes)."""
        found = np.empty_like(index)
        for number in np.unique(epoch):
            here = epoch == number
            key = shuffle.key(self._seed, self._number, int(number))
            found[here] = shuffle.permute(index[here], self.units, key)
        return found

    def _window_order(self, epoch: int, window: int, parts: int) -> tuple[np.ndarray, np.ndarray]:
        """(place in the window, part of the unit) of a window's rows in order, for units of `parts` rows."""
        size = min(WINDOW, self.units - window * WINDOW) * parts
        order = np.arange(size, dtype=np.int64)
        if parts > 1:
            order = shuffle.permute(order, size, shuffle.key(self._seed, self._number, epoch, window, parts))
        return order // parts, order % parts

    def leg(self, cursor: Cursor, length: int) -> Leg:
        """The rows of `length` tokens from `cursor` on; `length` divides the unit's."""
        return Leg(self, cursor, length)


class Leg:
    """The rows that a stage draws from a source, without end; row `turn` is the stage's turn-th of it."""

    def __init__(self, order: SourceOrder, cursor: Cursor, length: int) -> None:
        self.parts = order.length // length
        self._order, self._cursor, self._length = order, cursor, length
        self._left = np.zeros((0, 2), dtype=np.int64)  # what is left of the window begun: place, part
        self._seen, self._grain = np.zeros((0, 1), dtype=bool), length
        begins = cursor.window
        if cursor.seen is not None:
            self._grain = math.gcd(order.length // cursor.seen.shape[1], length)
            finer = order.length // cursor.seen.shape[1] // self._grain
            self._seen = np.repeat(cursor.seen, finer, axis=1)  # [units, pieces]
            by_part = self._seen.reshape(self._seen.shape[0], self.parts, -1)
            place, part = order.window_order(cursor.epoch, cursor.window, self.parts)
            fresh = ~by_part.all(-1)[place, part]
            self._left = np.stack([place[fresh], part[fresh]], axis=1)
            begins += 1
        # Number of the first row behind the window begun, all epochs' rows counted through.
        self._start = (cursor.epoch * order.units + min(begins * WINDOW, order.units)) * self.parts

    @property
    def begun(self) -> float:
        """Units that were read before it, over all epochs."""
        at = self._cursor
        seen = 0.0 if at.seen is None else at.seen.sum() / at.seen.shape[1]
        return float(at.epoch * self._order.units + at.window * WINDOW + seen)

    def rows(self, turn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(units, parts of them) of rows `turn` (int64)."""
        units, epoch, part = (np.empty_like(turn) for _ in range(3))
        early = turn < len(self._left)
        left = self._left[turn[early]]
        units[early], part[early] = self._cursor.window * WINDOW + left[:, 0], left[:, 1]
        epoch[early] = self._cursor.epoch
        number = self._start + turn[~early] - len(self._left)
        epoch[~early] = number // (self._order.units * self.parts)
        units[~early], part[~early] = self._placed(epoch[~early], number % (self._order.units * self.parts))
        return self._order.rows(epoch, units), part

    def _placed(self, epoch: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(place of the unit in the epoch's order, part) of an epoch's rows `number`."""
        if self.parts == 1:
            return number, np.zeros_like(number)
        units, part = np.empty_like(number), np.empty_like(number)
        window, within = np.divmod(number, WINDOW * self.parts)
        for pair in np.unique(np.stack([epoch, window], axis=1), axis=0).tolist():
            here = (epoch == pair[0]) & (window == pair[1])
            places, parts = self._order.window_order(*pair, self.parts)
            units[here] = pair[1] * WINDOW + places[within[here]]
            part[here] = parts[within[here]]
        return units, part

    def seen_before(self, turn: int) -> np.ndarray | None:
        """Where row `turn` has been read before, in rows of another length (bool [length]); None: nowhere."""
        if turn >= len(self._left):
            return None
        place, part = self._left[turn]
        pieces = self._length // self._grain
        seen = self._seen[place, part * pieces : (part + 1) * pieces]
        return np.repeat(seen, self._grain) if seen.any() else None

    def after(self, count: int) -> Cursor:
        """Where the source stands after `count` rows."""
        order, parts = self._order, self.parts
        if count < len(self._left):
            return self._cursor if count == 0 else self._with(self._seen, self._left[:count], self._cursor)
        number = self._start + count - len(self._left)
        epoch, number = divmod(number, order.units * parts)
        window, within = divmod(number, WINDOW * parts)
        at = Cursor(epoch, window)
        if within == 0:
            return at
        fresh = np.zeros((min(WINDOW, order.units - window * WINDOW), parts), dtype=bool)
        place, part = order.window_order(epoch, window, parts)
        fresh[place[:within], part[:within]] = True
        return Cursor(epoch, window, fresh)

    def _with(self, seen: np.ndarray, rows: np.ndarray, at: Cursor) -> Cursor:
        """`at` with `rows` (place, part) seen as well."""
        seen = seen.copy()
        by_part = seen.reshape(seen.shape[0], self.parts, -1)
        by_part[rows[:, 0], rows[:, 1]] = True
        return Cursor(at.epoch, at.window, seen)


class Mixture:
    """Which source each sample is drawn from, by weight; the same for every global batch and row length.

    `weights`: shares of samples, not summing to anything in particular. Over every 65,536 samples each
    source appears exactly in its share (rounded). Raises ValueError for a share that is less than one.
    """

    def __init__(self, weights: list[float], seed: int) -> None:
        self._quota, self._seed = _apportion(weights), seed
        self._pattern = lru_cache(maxsize=4)(self._mix_pattern)

    @property
    def quota(self) -> tuple[int, ...]:
        """Samples of a block, by source."""
        return tuple(self._quota.tolist())

    def draw(self, sample: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, how many samples of the same source came before) of each sample (int64)."""
        if self._quota.size == 1:
            return np.zeros_like(sample), sample
        source, turn = np.empty_like(sample), np.empty_like(sample)
        block = sample // MIX_BLOCK
        for number in np.unique(block):
            here = block == number
            pattern, rank = self._pattern(int(number))
            slot = sample[here] % MIX_BLOCK
            source[here] = pattern[slot]
            turn[here] = number * self._quota[pattern[slot]] + rank[slot]
        return source, turn

    def taken(self, samples: int) -> np.ndarray:
        """How many of the first `samples` are of each source (int64)."""
        block, slot = divmod(samples, MIX_BLOCK)
        if self._quota.size == 1:
            return np.array([samples], dtype=np.int64)
        begun = np.bincount(self._pattern(block)[0][:slot], minlength=self._quota.size)
        return block * self._quota + begun

    def _mix_pattern(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        slots = np.arange(MIX_BLOCK, dtype=np.int64)
        order = shuffle.permute(slots, MIX_BLOCK, shuffle.key(self._seed, -1, block))
        pattern = np.repeat(np.arange(self._quota.size), self._quota)[order]
        rank = np.empty(MIX_BLOCK, dtype=np.int64)
        for source in range(self._quota.size):
            rank[pattern == source] = np.arange(self._quota[source])
        return pattern, rank


def _apportion(weights: list[float]) -> np.ndarray:
    """Slots of a mixing block for each source, by largest remainder: int64, summing to the block's size."""
    exact = np.array(weights, dtype=np.float64) / sum(weights) * MIX_BLOCK
    quota = np.floor(exact).astype(np.int64)
    for index in np.argsort(quota - exact, kind="stable")[: MIX_BLOCK - int(quota.sum())]:
        quota[index] += 1
    if quota.min() < 1:
        smallest = min(weights)
        raise ValueError(
            f"weight {smallest} is less than 1/{MIX_BLOCK} of the total {sum(weights)}: its source would "
            f"never be drawn"
        )
    return quota
