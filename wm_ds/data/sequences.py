"""From packed shards to rows, and the micro-batches of an evaluation.

    shards --(view)--> sequences --(fixed shuffle)--> splits --> rows

`PackedSequences` cuts the shards' stream into rows of T positions and labels each row's documents. The pack's
own shuffle orders the rows; the last `holdout` of that order are the split `holdout`, the others `train`. A
row belongs to exactly one split, and no label looks into the next row. loader.py makes training batches of
them.

Legend: B rows of a micro-batch, T positions of a row.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wm_ds.data import holdout as held_out
from wm_ds.data import shards, shuffle

IGNORE = -100  # label of a position that predicts nothing
_OPEN_SHARDS = 128  # memory maps hold a file descriptor each; a corpus can have more shards than descriptors

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
    seq_len: tokens of a row, those that the folder was packed with or, for training, a multiple of them. Rows
        that are held out are filler in longer ones; these come in the stream's order.
    Raises shards.ShardError for a folder that is unfinished, damaged or of another format, for a split that
    it does not have, and for a row length that its rows do not go into.
    """

    def __init__(
        self, path: str | os.PathLike[str], split: str = "train", seq_len: int | None = None
    ) -> None:
        self.path = Path(path)
        self.split = split
        self.manifest: dict[str, Any] = shards.load_manifest(path)
        self.packed_len: int = self.manifest["seq_len"]
        self.seq_len: int = seq_len or self.packed_len
        self._is_view = self.seq_len != self.packed_len
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
        if self._is_view:
            self._view_longer_rows()
        self._skipped = self._left_out_indices()
        self._count -= self._skipped.size
        for (
            record
        ) in self._records:  # sizes now, so that a cut file is an error at start and not at step 9000
            self._check_size(record)

    def _view_longer_rows(self) -> None:
        """Cut the stream into longer rows than it was packed in."""
        if self.split != "train" or self.seq_len % self.packed_len:
            raise shards.ShardError(
                f"{self.path} was packed in rows of {self.packed_len} tokens: its split {self.split!r} has "
                f"no rows of {self.seq_len}"
            )
        rows = self.sequences * self.packed_len / self.seq_len
        self.sequences = math.floor(rows) if self.manifest["tail"] == "drop" else math.ceil(rows)
        self._first, self._count = 0, self.sequences
        self._spans = held_out.with_held_out_rows(self._spans, self.manifest)
        if not self.sequences:
            raise shards.ShardError(f"{self.path} has not one row of {self.seq_len} tokens")

    def _left_out_indices(self) -> np.ndarray:
        """Where rows without data stand in the split's order (int64, sorted)."""
        if self._is_view:
            rows = held_out.rows_inside(self._spans, self.manifest, self.seq_len)
            return rows[rows < self.sequences]
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
        if self._is_view:
            return indices
        return shuffle.permute(indices + self._first, self.sequences, self.manifest["shuffle_seed"])

    def sequence(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Sequence `number` in stream order, of any split: (ids int64 [T], document ids int32 [T]).

        In split "train", documents that are held out are filler.
        """
        return self.cut(number * self.seq_len, self.seq_len)

    def cut(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """The same of `length` positions of the stream from `start` on, which need not be a row's."""
        first, stop = start, start + length
        ids_T = np.full(length, self.manifest["filler_id"], dtype=np.int64)
        documents_T = np.full(length, -1, dtype=np.int32)
        documents = 0
        shard = int(np.searchsorted(self._stops, start, side="right"))
        while shard < len(self._records) and start < stop:
            shard_start = int(self._stops[shard]) - self._records[shard]["length"]
            shard_stop = min(stop, int(self._stops[shard]))
            row = start - first
            tokens, ends = self._shard(shard)
            piece = tokens[start - shard_start : shard_stop - shard_start]
            ids_T[row : row + piece.size] = piece
            starts, stops = shards.document_spans(
                ends, start - shard_start, shard_stop - shard_start, self.manifest["align"]
            )
            shift = shard_start - first
            lengths = stops - starts
            positions = np.arange(lengths.sum()) + np.repeat(
                starts + shift - (np.cumsum(lengths) - lengths), lengths
            )
            documents_T[positions] = np.repeat(np.arange(documents, documents + lengths.size), lengths)
            documents += lengths.size
            start, shard = shard_stop, shard + 1
        self._hide_spans(first, ids_T, documents_T)
        return ids_T, documents_T

    def hide(self, hidden_T: np.ndarray, ids_T: np.ndarray, documents_T: np.ndarray) -> None:
        """Turn positions of a row into filler, in place. What a document has behind them is another one."""
        ids_T[hidden_T] = self.manifest["filler_id"]
        documents_T[hidden_T] = -1
        shown = documents_T >= 0
        begins = shown & (np.diff(documents_T, prepend=-1) != 0)
        documents_T[shown] = np.cumsum(begins)[shown] - 1

    def _hide_spans(self, start: int, ids_T: np.ndarray, documents_T: np.ndarray) -> None:
        first = int(np.searchsorted(self._spans[:, 1], start, side="right"))
        last = int(np.searchsorted(self._spans[:, 0], start + ids_T.size, side="left"))
        if first == last:
            return
        hidden_T = np.zeros(ids_T.size, dtype=bool)
        for low, high in (self._spans[first:last] - start).tolist():
            hidden_T[max(low, 0) : high] = True
        self.hide(hidden_T, ids_T, documents_T)

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


def stack_rows(rows: Sequence[tuple[np.ndarray, np.ndarray]], samples: np.ndarray, across: bool) -> Batch:
    """A micro-batch of (ids, document ids) rows [T] with their sample numbers; labels are shifted here."""
    return {
        "input_ids": torch.from_numpy(np.stack([ids for ids, _ in rows])),
        "labels": torch.from_numpy(np.stack([shift_labels(ids, docs, across) for ids, docs in rows])),
        "document_ids": torch.from_numpy(np.stack([docs for _, docs in rows])),
        "sample_ids": torch.from_numpy(np.asarray(samples, dtype=np.int64)),
    }


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
        batch = stack_rows(rows, samples, across=False)
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
