"""From packed shards to training batches: (seed, b, rank, world) -> tensors, a pure function.

    shards --(view)--> sequences --(fixed shuffle)--> splits --(per-epoch shuffle, mixing)--> global batch b

- `PackedSequences` cuts the shards' stream into rows of T positions and labels each row's documents. The
  pack's own shuffle orders the rows; the last `holdout` of that order are the split `holdout`, the others
  `train`. A row belongs to exactly one split, and no label looks into the next row.
- `GlobalBatches` names the rows of batch b. Sample s = b * global_batch + i belongs to epoch s // rows;
  each epoch has its own order. A batch may span two epochs, so nothing is dropped and every epoch visits
  every row exactly once. Nothing else is remembered: a run's loader state is the integer b.
- Ranks and micro-batches only cut the same global batch differently.

Legend: B rows of a micro-batch, T positions of a row, S samples of a rank in one global batch.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wm_ds.data import holdout as held_out
from wm_ds.data import shards, shuffle

IGNORE = -100  # label of a position that predicts nothing
_OPEN_SHARDS = 128  # memory maps hold a file descriptor each; a corpus can have more shards than descriptors
_MIX_BLOCK = 1 << 16  # samples over which mixing weights hold exactly

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One packed sequence. All tensors have shape [T].

    input_ids: int64. labels: int64, already shifted (labels[t] is the target at position t, -100 = none).
    document_ids: int32, 0, 1, 2, ... within the row, -1 on filler.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    document_ids: torch.Tensor


class PackedSequences:
    """The rows of one split of a packed folder, memory-mapped.

    `sequences[i]` is a `Row`, 0 <= i < len(sequences), in the pack's shuffled order.
    Raises shards.ShardError for a folder that is unfinished, damaged or of another format, and for a split
    that it does not have.
    """

    def __init__(self, path: str | os.PathLike[str], split: str = "train") -> None:
        self.path = Path(path)
        self.split = split
        self.manifest: dict[str, Any] = shards.load_manifest(path)
        self.seq_len: int = self.manifest["seq_len"]
        self.vocab_size: int = self.manifest["vocab_size"]
        self.eos_id: int = self.manifest["eos_id"]
        self.sequences: int = self.manifest["sequences"]
        self._dtype = shards.token_dtype(self.vocab_size)
        self._records = self.manifest["shards"]
        lengths = np.array([record["length"] for record in self._records], dtype=np.int64)
        self._stops = np.cumsum(lengths)
        self._open: OrderedDict[int, tuple[np.ndarray, np.ndarray]] = OrderedDict()
        holdout = self.manifest["holdout"]
        if split == "train":
            self._first, self._count = 0, self.sequences - holdout
        elif split == "holdout":
            if not holdout:
                raise shards.ShardError(f"{path} was packed without --holdout: it has no held-out split")
            self._first, self._count = self.sequences - holdout, holdout
        else:
            raise shards.ShardError(f"unknown split {split!r} of {path}; it has 'train' and 'holdout'")
        self._spans = held_out.read_spans(self.path, self.manifest)[: None if split == "train" else 0]
        self._skipped = self._left_out_indices()
        self._count -= self._skipped.size
        for (
            record
        ) in self._records:  # sizes now, so that a cut file is an error at start and not at step 9000
            self._check_size(record)

    def _left_out_indices(self) -> np.ndarray:
        """Where rows without data stand in the shuffled order (int64, sorted)."""
        rows = (
            held_out.rows_without_data(self._spans, self.manifest) if self._spans.size else self._spans[:, 0]
        )
        return np.sort(shuffle.unpermute(rows, self.sequences, self.manifest["shuffle_seed"]))

    def _check_size(self, record: dict[str, Any]) -> None:
        sizes = {"tokens": record["length"] * self._dtype.itemsize, "ends": record["documents"] * 8}
        for name, expected in sizes.items():
            path = self.path / record["name"] / f"{name}.bin"
            if not path.is_file() or path.stat().st_size != expected:
                shards.open_array(path, np.dtype("u1"), expected)  # raises, saying which

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < self._count:
            raise IndexError(f"sequence {index} of {self._count} in split {self.split!r} of {self.path}")
        ids_T, documents_T = self.sequence(int(self.sequence_numbers(np.array([index]))[0]))
        return Row(
            torch.from_numpy(ids_T),
            torch.from_numpy(shift_labels(ids_T, documents_T)),
            torch.from_numpy(documents_T),
        )

    def sequence_numbers(self, indices: np.ndarray) -> np.ndarray:
        """Indices in this split's shuffled order -> sequence numbers in stream order (both int64)."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and not 0 <= indices.min() <= indices.max() < self._count:
            raise IndexError(f"indices outside 0 .. {self._count - 1} in split {self.split!r} of {self.path}")
        before = self._skipped - np.arange(self._skipped.size)  # rows of this split in front of each
        indices = indices + np.searchsorted(before, indices, side="right")
        return shuffle.permute(indices + self._first, self.sequences, self.manifest["shuffle_seed"])

    def sequence(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Sequence `number` in stream order, of any split: (ids int64 [T], document ids int32 [T]).

        In split "train", documents that are held out are filler.
        """
        start, stop = number * self.seq_len, (number + 1) * self.seq_len
        ids_T = np.full(self.seq_len, self.manifest["filler_id"], dtype=np.int64)
        documents_T = np.full(self.seq_len, -1, dtype=np.int32)
        documents = 0
        shard = int(np.searchsorted(self._stops, start, side="right"))
        while shard < len(self._records) and start < stop:
            shard_start = int(self._stops[shard]) - self._records[shard]["length"]
            shard_stop = min(stop, int(self._stops[shard]))
            row = start - number * self.seq_len
            tokens, ends = self._shard(shard)
            piece = tokens[start - shard_start : shard_stop - shard_start]
            ids_T[row : row + piece.size] = piece
            starts, stops = shards.document_spans(
                ends, start - shard_start, shard_stop - shard_start, self.manifest["align"]
            )
            shift = shard_start - number * self.seq_len
            lengths = stops - starts
            positions = np.arange(lengths.sum()) + np.repeat(
                starts + shift - (np.cumsum(lengths) - lengths), lengths
            )
            documents_T[positions] = np.repeat(np.arange(documents, documents + lengths.size), lengths)
            documents += lengths.size
            start, shard = shard_stop, shard + 1
        self._hide_spans(number, ids_T, documents_T)
        return ids_T, documents_T

    def _hide_spans(self, number: int, ids_T: np.ndarray, documents_T: np.ndarray) -> None:
        start = number * self.seq_len
        first = int(np.searchsorted(self._spans[:, 1], start, side="right"))
        last = int(np.searchsorted(self._spans[:, 0], start + self.seq_len, side="left"))
        if first == last:
            return
        for low, high in (self._spans[first:last] - start).tolist():
            ids_T[max(low, 0) : high] = self.manifest["filler_id"]
            documents_T[max(low, 0) : high] = -1
        shown = documents_T >= 0
        documents_T[shown] = np.unique(documents_T[shown], return_inverse=True)[1]

    def _shard(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        arrays = self._open.get(index)
        if arrays is None:
            arrays = shards.open_shard(self.path, self._records[index], self._dtype)
        self._open[index] = arrays
        try:  # several prefetch threads share this cache; losing a race only reopens a shard
            self._open.move_to_end(index)
            if len(self._open) > _OPEN_SHARDS:
                self._open.popitem(last=False)
        except KeyError:
            pass
        return arrays


def shift_labels(ids_T: np.ndarray, documents_T: np.ndarray, across_documents: bool = False) -> np.ndarray:
    """Next-token targets int64 [T]: -100 on filler, on a row's last position and at a document's end.

    `across_documents` lets a document's last token predict the first token of the next document in the row
    (skipping filler), for comparison with stacks that do.
    """
    labels_T = np.full(ids_T.shape, IGNORE, dtype=np.int64)
    if across_documents:
        real = np.flatnonzero(documents_T >= 0)
        labels_T[real[:-1]] = ids_T[real[1:]]
        return labels_T
    same = (documents_T[1:] == documents_T[:-1]) & (documents_T[1:] >= 0)
    labels_T[:-1][same] = ids_T[1:][same]
    return labels_T


def _stack(rows: Sequence[tuple[np.ndarray, np.ndarray]], samples: np.ndarray, across: bool) -> Batch:
    return {
        "input_ids": torch.from_numpy(np.stack([ids for ids, _ in rows])),
        "labels": torch.from_numpy(np.stack([shift_labels(ids, docs, across) for ids, docs in rows])),
        "document_ids": torch.from_numpy(np.stack([docs for _, docs in rows])),
        "sample_ids": torch.from_numpy(np.asarray(samples, dtype=np.int64)),
    }


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
        return _stack(cut, self._bases[source] + row, self.across_documents)

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


class EvaluationBatches:
    """One rank's micro-batches of an evaluation, an iterator; see `evaluation_batches`.

    After an error the position is what it was: `next` tries the same micro-batch again.
    """

    def __init__(
        self, sequences: PackedSequences, rank: int, world: int, micro_batch: int, limit: int | None
    ) -> None:
        self._sequences, self._rank, self._micro_batch = sequences, rank, micro_batch
        self._count = len(sequences) if limit is None else min(limit, len(sequences))
        self._step = world * micro_batch
        self._next = 0  # micro-batches that were given

    def __len__(self) -> int:
        return -(-self._count // self._step)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._next >= len(self):
            raise StopIteration
        sequences, first = self._sequences, self._next * self._step + self._rank * self._micro_batch
        samples = np.arange(self._micro_batch, dtype=np.int64) + first
        samples[samples >= self._count] = -1
        rows = []
        for sample in samples.tolist():
            if sample >= 0:
                rows.append(sequences.sequence(int(sequences.sequence_numbers(np.array([sample]))[0])))
            else:
                filler_T = np.full(sequences.seq_len, sequences.manifest["filler_id"], dtype=np.int64)
                rows.append((filler_T, np.full(sequences.seq_len, -1, dtype=np.int32)))
        batch = _stack(rows, samples, across=False)
        self._next += 1
        return batch


def evaluation_batches(
    sequences: PackedSequences, rank: int, world: int, micro_batch: int, limit: int | None = None
) -> EvaluationBatches:
    """This rank's micro-batches of the first `limit` rows (None: all), each row on exactly one rank.

    Every rank yields the same number of micro-batches of the same shape, so that collectives stay in step;
    rows that fill up the last ones are filler only (document_ids -1, labels -100, sample_ids -1) and add
    nothing to a sum over valid labels.
    """
    return EvaluationBatches(sequences, rank, world, micro_batch, limit)


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
