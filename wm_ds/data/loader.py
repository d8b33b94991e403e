"""Training batches: (seed, b, rank, world) -> tensors, a pure function.

    rows --(per-epoch shuffle, mixing)--> global batch b --> micro-batches of a rank

- `GlobalBatches` names the rows of batch b. Sample s = b * global_batch + i belongs to epoch s // rows;
  each epoch has its own order. A batch may span two epochs, so nothing is dropped and every epoch visits
  every row exactly once. Nothing else is remembered: a run's loader state is the integer b.
- Ranks and micro-batches only cut the same global batch differently.

Legend: B rows of a micro-batch, T positions of a row, S samples of a rank in one global batch.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from wm_ds.data import shards, shuffle
from wm_ds.data.sequences import Batch, PackedSequences, stack_rows

_MIX_BLOCK = 1 << 16  # samples over which mixing weights hold exactly

Source = str | os.PathLike[str] | PackedSequences


class GlobalBatches:
    """Batch b of a run, a pure function of (seed, b) for given sources and global batch size.

    sources: a packed folder, or several as {"path": ..., "weight": ...} mappings or (source, weight) pairs;
        a source may also be an open `PackedSequences`. Weights are shares of *sequences* and need not sum
        to 1; over every 65,536 samples each source appears exactly in its share (rounded), each source
        runs through its own epochs.
    global_batch: sequences of one optimizer step, over all ranks and micro-batches.
    across_documents: labels cross document boundaries (off: a document's end predicts nothing).

    Raises shards.ShardError when sources do not fit together or a split has no rows.
    """

    def __init__(
        self,
        sources: Source | Sequence[Any],
        *,
        split: str = "train",
        global_batch: int,
        seed: int,
        across_documents: bool = False,
    ) -> None:
        if global_batch < 1:
            raise ValueError(f"global_batch {global_batch} must be at least 1")
        pairs = _weighted(sources)
        self.sources = [
            source if isinstance(source, PackedSequences) else PackedSequences(source, split)
            for source, _ in pairs
        ]
        self.split, self.global_batch, self.seed = split, global_batch, seed
        self.across_documents = across_documents
        _check_compatible(self.sources)
        first = self.sources[0]
        self.seq_len, self.eos_id = first.seq_len, first.eos_id
        self.vocab_size = max(source.vocab_size for source in self.sources)
        self._quota = _apportion([weight for _, weight in pairs])
        # A row's global number, for logs: its source's rows follow those of the sources before it.
        self._bases = np.concatenate([[0], np.cumsum([len(source) for source in self.sources])])
        self._pattern = lru_cache(maxsize=4)(self._mix_pattern)

    @property
    def rows(self) -> int:
        """Sequences in all sources' splits together."""
        return int(self._bases[-1])

    def samples(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples first .. first+count-1 of the run: (source numbers, rows within the source's split)."""
        sample = np.arange(first, first + count, dtype=np.int64)
        if len(self.sources) == 1:
            return np.zeros(count, dtype=np.int64), self._epoch_rows(0, sample)
        source = np.empty(count, dtype=np.int64)
        turn = np.empty(count, dtype=np.int64)  # how many samples of the same source came before
        block = sample // _MIX_BLOCK
        for number in np.unique(block):
            here = block == number
            pattern, rank = self._pattern(int(number))
            slot = sample[here] % _MIX_BLOCK
            source[here] = pattern[slot]
            turn[here] = number * self._quota[pattern[slot]] + rank[slot]
        row = np.empty(count, dtype=np.int64)
        for number in np.unique(source):
            row[source == number] = self._epoch_rows(int(number), turn[source == number])
        return source, row

    def _epoch_rows(self, source: int, turn: np.ndarray) -> np.ndarray:
        rows = len(self.sources[source])
        epoch = turn // rows
        result = np.empty_like(turn)
        for number in np.unique(epoch):
            here = epoch == number
            order = shuffle.key(self.seed, source, int(number))
            result[here] = shuffle.permute(turn[here] % rows, rows, order)
        return result

    def _mix_pattern(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        slots = np.arange(_MIX_BLOCK, dtype=np.int64)
        order = shuffle.permute(slots, _MIX_BLOCK, shuffle.key(self.seed, -1, block))
        pattern = np.repeat(np.arange(len(self.sources)), self._quota)[order]
        rank = np.empty(_MIX_BLOCK, dtype=np.int64)
        for source in range(len(self.sources)):
            rank[pattern == source] = np.arange(self._quota[source])
        return pattern, rank

    def batch(self, b: int, rank: int, world: int, micro_batch: int) -> list[Batch]:
        """Rank's micro-batches of global batch b: tensors of shape [micro_batch, T] (see `Row`).

        The global batch's samples are dealt to accumulation steps, then ranks, then rows. Each micro-batch
        also has `sample_ids` int64 [B]: the row's number among all sources' rows of the split.
        """
        accumulation, rest = divmod(self.global_batch, world * micro_batch)
        if rest:
            raise ValueError(
                f"global_batch {self.global_batch} does not divide over {world} ranks x micro_batch "
                f"{micro_batch}; choose a micro_batch and rank count whose product divides it"
            )
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not one of {world} ranks")
        if b < 0:
            raise ValueError(f"batch number {b} is negative")
        source, row = self.samples(b * self.global_batch, self.global_batch)
        mine = np.arange(self.global_batch).reshape(accumulation, world, micro_batch)[:, rank]
        return [self._rows(source[part], row[part]) for part in mine]

    def _rows(self, source: np.ndarray, row: np.ndarray) -> Batch:
        numbers = np.empty_like(row)
        for index in np.unique(source):
            numbers[source == index] = self.sources[index].sequence_numbers(row[source == index])
        cut = [
            self.sources[index].sequence(number)
            for index, number in zip(source.tolist(), numbers.tolist(), strict=True)
        ]
        return stack_rows(cut, self._bases[source] + row, self.across_documents)

    def iterate(
        self, start: int, rank: int, world: int, micro_batch: int, *, workers: int = 1, prefetch: int = 4
    ) -> PrefetchIterator:
        """Batches start, start+1, ... without end, read ahead by `workers` threads (0: read when asked)."""
        return PrefetchIterator(self, start, rank, world, micro_batch, workers, prefetch)


class PrefetchIterator:
    """Yields `GlobalBatches.batch(b, ...)` for b = start, start+1, ...; `next_batch` is its whole state.

    `waited_s` sums the seconds that the consumer waited for data. Close it (or use it as a context manager)
    to stop the threads.
    """

    def __init__(
        self,
        batches: GlobalBatches,
        start: int,
        rank: int,
        world: int,
        micro_batch: int,
        workers: int,
        prefetch: int,
    ) -> None:
        self.next_batch = start
        self.waited_s = 0.0
        self._read = lambda b: batches.batch(b, rank, world, micro_batch)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="wm_ds-data") if workers else None
        self._ahead = max(prefetch, workers, 1)
        self._pending: deque[Future[list[Batch]]] = deque()

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        """The next batch. After an error the state is what it was: the next call tries the same batch."""
        begin = time.perf_counter()
        if self._pool is None:
            batch = self._read(self.next_batch)
        else:
            while len(self._pending) <= self._ahead:
                self._pending.append(self._pool.submit(self._read, self.next_batch + len(self._pending)))
            try:
                batch = self._pending[0].result()
            except BaseException:
                for future in self._pending:
                    future.cancel()
                self._pending.clear()
                raise
            self._pending.popleft()
        self.waited_s += time.perf_counter() - begin
        self.next_batch += 1
        return batch

    def close(self) -> None:
        """Stop reading ahead."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pending.clear()

    def __enter__(self) -> PrefetchIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _weighted(sources: Source | Sequence[Any]) -> list[tuple[Source, float]]:
    if isinstance(sources, (str, os.PathLike, PackedSequences)):
        return [(sources, 1.0)]
    pairs: list[tuple[Source, float]] = []
    for item in sources:
        if isinstance(item, (str, os.PathLike, PackedSequences)):
            pairs.append((item, 1.0))
        elif isinstance(item, dict):
            pairs.append((item["path"], float(item.get("weight", 1.0))))
        else:
            source, weight = item
            pairs.append((source, float(weight)))
    if not pairs:
        raise ValueError("no data sources given")
    for source, weight in pairs:
        if not weight > 0 or weight == float("inf"):
            raise ValueError(
                f"weight {weight} of {source} must be a positive number; leave the source out instead"
            )
    return pairs


def _check_compatible(sources: Sequence[PackedSequences]) -> None:
    first = sources[0]
    for source in sources:
        if not len(source):
            raise shards.ShardError(f"{source.path} has no sequences in its split {source.split!r}")
        if source.split != first.split:
            raise shards.ShardError(
                f"{source.path} is split {source.split!r}, {first.path} is {first.split!r}"
            )
        if source.seq_len != first.seq_len:
            raise shards.ShardError(
                f"{source.path} has sequences of {source.seq_len}, {first.path} of {first.seq_len}; "
                f"pack both with the same --seq-len to mix them"
            )
        if source.manifest["tokenizer"]["sha256"] != first.manifest["tokenizer"]["sha256"]:
            raise shards.ShardError(
                f"{source.path} was packed with tokenizer {source.manifest['tokenizer']['name']!r}, "
                f"{first.path} with {first.manifest['tokenizer']['name']!r} (their sha256 differ): "
                f"the same id would mean different text"
            )


def _apportion(weights: Sequence[float]) -> np.ndarray:
    """Slots of a mixing block for each source, by largest remainder: int64, summing to the block's size."""
    exact = np.array(weights, dtype=np.float64) / sum(weights) * _MIX_BLOCK
    quota = np.floor(exact).astype(np.int64)
    for index in np.argsort(quota - exact, kind="stable")[: _MIX_BLOCK - int(quota.sum())]:
        quota[index] += 1
    if quota.min() < 1:
        smallest = min(weights)
        raise ValueError(
            f"weight {smallest} is less than 1/{_MIX_BLOCK} of the total {sum(weights)}: its source would "
            f"never be drawn"
        )
    return quota
