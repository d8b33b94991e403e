"""Training batches: (seed, b, rank, world) -> tensors, a pure function.

    rows --(per-epoch shuffle, mixing)--> global batch b --> micro-batches of a rank

- `StagedBatches` names the rows of batch b, that of step b + 1: its stage follows from b, what a source has
  given before the stage from the stages before it (order.py), and from what is left out (skip.py). Nothing
  else is remembered: a run's loader state is the integer b. A batch may span two epochs, so nothing is
  dropped and every epoch visits every row exactly once.
- `GlobalBatches` are the batches of a run with one stage: sample s = b * global_batch + i belongs to epoch
  s // rows.
- Ranks and micro-batches only cut the same global batch differently.

Legend: B rows of a micro-batch, T positions of a row, S samples of a rank in one global batch.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wm_ds.data import shards
from wm_ds.data.order import Cursor, Leg, Mixture, SourceOrder
from wm_ds.data.prefetch import PrefetchIterator
from wm_ds.data.sequences import Batch, PackedSequences, stack_rows
from wm_ds.data.skip import NOTHING, LeftOut

Source = str | os.PathLike[str] | PackedSequences


@dataclass(frozen=True)
class StageData:
    """What a stage draws its batches from.

    Attributes:
        sources: a packed folder, or several as {"path": ..., "weight": ...} mappings or (source, weight)
            pairs; a source may also be an open `PackedSequences`. Weights are shares of *sequences* and need
            not sum to 1.
        global_batch: sequences of one optimizer step, over all ranks and micro-batches.
        steps: its batches; None for the last stage, which has no end.
        seq_len: tokens of a row; None where all sources were packed alike, and as they were.
        packed: where seq_len is None, the length that they must have been packed with.
        micro_batch: sequences of a micro-batch, where `batch` is not told.
        name: of the stage, for messages.
    """

    sources: Source | Sequence[Any]
    global_batch: int
    steps: int | None = None
    seq_len: int | None = None
    packed: int | None = None
    micro_batch: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Drawn:
    """What a stage has of a source: `rows` of its `epoch` rows; epochs read `before` it and `after` it."""

    path: str
    rows: int
    epoch: int
    before: float
    after: float


class StagedBatches:
    """Batch b of a run, a pure function of (seed, b) for given stages.

    A source that several stages have (the same content, wherever the folder lies) goes on where it was,
    through its own epochs. `across_documents`: labels cross document boundaries (off: a document's end
    predicts nothing). `left_out`: batches of the order that no step is given (skip.py).

    Raises shards.ShardError when sources do not fit together, when a split has no rows, or when a stage's
    row length does not go into a source's.
    """

    def __init__(
        self,
        stages: Sequence[StageData],
        *,
        seed: int,
        split: str = "train",
        across_documents: bool = False,
        left_out: LeftOut = NOTHING,
    ) -> None:
        self.split, self.seed, self.across_documents = split, seed, across_documents
        self.left_out = left_out
        self.sources: list[PackedSequences] = []
        """All sources, in the order in which the stages have them first."""
        self._orders: list[SourceOrder] = []
        self._numbers: dict[tuple[str, int], int] = {}
        self._opened: dict[str, PackedSequences] = {}
        self.stages: list[_Stage] = []
        cursors: dict[int, Cursor] = {}
        step, first, mixed, samples = 0, 0, None, 0
        for declared in stages:
            if declared.global_batch < 1:
                raise ValueError(f"global_batch {declared.global_batch} must be at least 1")
            pairs = _weighted(declared.sources)
            length, numbers = self._open(declared, [source for source, _ in pairs])
            mixture = Mixture([weight for _, weight in pairs], seed)
            # Stages that draw alike are one mixture: a batch that grows does not start the pattern again.
            samples = samples if mixed == (numbers, mixture.quota) else 0
            mixed = (numbers, mixture.quota)
            legs = [self._orders[number].leg(cursors.get(number, Cursor()), length) for number in numbers]
            stage = _Stage(declared, step, first, length, numbers, mixture, samples, legs)
            self.stages.append(stage)
            if declared.steps is not None:
                step += declared.steps
                drawn = left_out.consumed(step) - first
                first, samples = first + drawn, samples + drawn * declared.global_batch
                for number, leg, count in zip(numbers, legs, stage.rows_by_source(drawn), strict=True):
                    cursors[number] = leg.after(count)
        _check_tokenizers(self.sources)
        self.eos_id = self.sources[0].eos_id
        self.seq_len = self.stages[0].seq_len
        self.vocab_size = max(source.vocab_size for source in self.sources)

    def _open(self, stage: StageData, paths: Sequence[Source]) -> tuple[int, list[int]]:
        """(row length of a stage, numbers of its sources)."""
        given = [self._opened_at(source) for source in paths]
        _check_split(given)
        length = stage.seq_len or _common_length(given, stage)
        numbers = []
        seen: dict[str, int] = {}
        for source in given:
            content = shards.content(source.manifest)
            # Twice in one stage are two sources, each with epochs of its own.
            key = (content, seen.setdefault(content, 0))
            seen[content] += 1
            if key not in self._numbers:
                self._add(source, length, key)
            number = self._numbers[key]
            _check_length(self.sources[number], length, stage.name)
            numbers.append(number)
        return length, numbers

    def _opened_at(self, source: Source) -> PackedSequences:
        if isinstance(source, PackedSequences):
            return source
        path = os.path.realpath(source)
        if path not in self._opened:
            self._opened[path] = PackedSequences(source, self.split)
        return self._opened[path]

    def _add(self, source: PackedSequences, length: int, key: tuple[str, int]) -> None:
        """Number a source. Its units are the rows that it was packed in, or longer ones of its first use."""
        if length > source.seq_len and length % source.seq_len == 0:
            source = PackedSequences(source.path, self.split, length)
        if not len(source):
            raise shards.ShardError(f"{source.path} has no sequences in its split {source.split!r}")
        self._numbers[key] = len(self.sources)
        self.sources.append(source)
        self._orders.append(
            SourceOrder(len(source), source.seq_len, seed=self.seed, number=self._numbers[key])
        )

    def stage_of(self, b: int) -> int:
        """The stage of batch b."""
        return bisect.bisect_right([stage.step for stage in self.stages], b) - 1

    def drawn(self, index: int, steps: int) -> list[Drawn]:
        """What the first `steps` steps of stage `index` use up of each of its sources."""
        stage, found = self.stages[index], []
        counts = stage.rows_by_source(self.left_out.consumed(stage.step + steps) - stage.first)
        for number, leg, count in zip(stage.numbers, stage.legs, counts, strict=True):
            units = self._orders[number].units
            before, epoch = leg.begun / units, units * leg.parts
            found.append(Drawn(str(self.sources[number].path), count, epoch, before, before + count / epoch))
        return found

    def passed_over(self, index: int, steps: int) -> int:
        """How many batches the first `steps` steps of stage `index` leave out."""
        stage = self.stages[index]
        return self.left_out.consumed(stage.step + steps) - stage.first - steps

    def batch(self, b: int, rank: int, world: int, micro_batch: int | None = None) -> list[Batch]:
        """Rank's micro-batches of global batch b: tensors of shape [micro_batch, T] (see `Row`).

        The global batch's samples are dealt to accumulation steps, then ranks, then rows. Each micro-batch
        also has `sample_ids` int64 [B]: the row's number among all rows of the stage's sources.
        """
        if b < 0:
            raise ValueError(f"batch number {b} is negative")
        stage = self.stages[self.stage_of(b)]
        global_batch, micro = stage.data.global_batch, micro_batch or stage.data.micro_batch
        if micro is None:
            raise ValueError("no micro_batch is given")
        accumulation, rest = divmod(global_batch, world * micro)
        if rest:
            raise ValueError(
                f"global_batch {global_batch} does not divide over {world} ranks x micro_batch "
                f"{micro}; choose a micro_batch and rank count whose product divides it"
            )
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} is not one of {world} ranks")
        place = self.left_out.batch(b + 1) - 1 - stage.first
        source, turn = stage.draw(place * global_batch, global_batch)
        mine = np.arange(global_batch).reshape(accumulation, world, micro)[:, rank]
        return [self._rows(stage, source[part], turn[part]) for part in mine]

    def _rows(self, stage: _Stage, source: np.ndarray, turn: np.ndarray) -> Batch:
        """A micro-batch: row `turn` of what the stage draws from its source `source`, for each."""
        sequences = [self.sources[number] for number in stage.numbers]
        start, sample = np.empty_like(turn), np.empty_like(turn)
        for index in np.unique(source):
            here = source == index
            unit, part = stage.legs[index].rows(turn[here])
            number = sequences[index].sequence_numbers(unit)
            start[here] = number * sequences[index].seq_len + part * stage.seq_len
            base = sum(len(sequences[i]) * stage.legs[i].parts for i in range(index))
            sample[here] = base + unit * stage.legs[index].parts + part
        rows = []
        for index, at, place in zip(source.tolist(), start.tolist(), turn.tolist(), strict=True):
            row = sequences[index].cut(at, stage.seq_len)
            seen_T = stage.legs[index].seen_before(place)
            if seen_T is not None:
                sequences[index].hide(seen_T, *row)
            rows.append(row)
        return stack_rows(rows, sample, self.across_documents)

    def iterate(
        self,
        start: int,
        rank: int,
        world: int,
        micro_batch: int | None = None,
        *,
        workers: int = 1,
        prefetch: int = 4,
    ) -> PrefetchIterator:
        """Batches start, start+1, ... without end, read ahead by `workers` threads (0: read when asked)."""
        return PrefetchIterator(
            lambda b: self.batch(b, rank, world, micro_batch), start, workers=workers, prefetch=prefetch
        )


class GlobalBatches(StagedBatches):
    """The batches of a run with one stage; arguments as `StageData` has them."""

    def __init__(
        self,
        sources: Source | Sequence[Any],
        *,
        split: str = "train",
        global_batch: int,
        seed: int,
        across_documents: bool = False,
    ) -> None:
        stage = StageData(sources, global_batch)
        super().__init__([stage], seed=seed, split=split, across_documents=across_documents)
        self.global_batch = global_batch

    @property
    def rows(self) -> int:
        """Sequences in all sources' splits together."""
        return sum(len(source) for source in self.sources)

    def samples(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Samples first .. first+count-1 of the run: (source numbers, rows within the source's split)."""
        (stage,) = self.stages
        source, turn = stage.draw(first, count)
        row = np.empty_like(turn)
        for index in np.unique(source):
            row[source == index], _ = stage.legs[index].rows(turn[source == index])
        return source, row


@dataclass(frozen=True)
class _Stage:
    """A stage's place in the order: the steps before it, the batches that these have consumed, and the
    mixture from sample `samples` on."""

    data: StageData
    step: int
    first: int
    seq_len: int
    numbers: list[int]
    mixture: Mixture
    samples: int
    legs: list[Leg]

    def draw(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(source, which turn of it in this stage) of the stage's samples first .. first+count-1 (int64)."""
        source, turn = self.mixture.draw(self.samples + first + np.arange(count, dtype=np.int64))
        return source, turn - self.mixture.taken(self.samples)[source]

    def rows_by_source(self, batches: int) -> list[int]:
        """Rows that the stage's first `batches` batches draw from each source."""
        end = self.samples + batches * self.data.global_batch
        return (self.mixture.taken(end) - self.mixture.taken(self.samples)).tolist()


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


def _check_split(sources: Sequence[PackedSequences]) -> None:
    first = sources[0]
    for source in sources:
        if not len(source):
            raise shards.ShardError(f"{source.path} has no sequences in its split {source.split!r}")
        if source.split != first.split:
            raise shards.ShardError(
                f"{source.path} is split {source.split!r}, {first.path} is {first.split!r}"
            )


def _common_length(sources: Sequence[PackedSequences], stage: StageData) -> int:
    """The length that all sources were packed with."""
    first, where = sources[0], f"{stage.name}: " if stage.name else ""
    for source in sources:
        if source.seq_len != first.seq_len:
            raise shards.ShardError(
                f"{where}{source.path} has sequences of {source.seq_len}, {first.path} of {first.seq_len}; "
                f"pack both with the same --seq-len to mix them, or give seq_len"
            )
    if stage.packed is not None and first.seq_len != stage.packed:
        raise shards.ShardError(
            f"{where}{first.path} has sequences of {first.seq_len}, data.train of {stage.packed}; give the "
            "stage a seq_len"
        )
    return first.seq_len


def _check_length(source: PackedSequences, length: int, name: str) -> None:
    """Refuse rows that are no parts of the source's units; both lengths are named."""
    where = f"{name}: " if name else ""
    align = source.manifest["align"]
    if length % align:
        raise shards.ShardError(
            f"{where}rows of {length} tokens are no multiple of {align}, to which documents in {source.path} "
            "are aligned (--align)"
        )
    if source.seq_len % length == 0:
        return
    if length % source.packed_len == 0:
        raise shards.ShardError(
            f"{where}{source.path} has been read in rows of {source.seq_len} tokens and parts of them so "
            f"far, and cannot go on in rows of {length}: pack it with --seq-len {length} and give earlier "
            "stages a shorter seq_len"
        )
    raise shards.ShardError(
        f"{where}{source.path} was packed in rows of {source.packed_len} tokens, and rows of {length} are "
        "neither a part nor a multiple of them"
    )


def _check_tokenizers(sources: Sequence[PackedSequences]) -> None:
    first = sources[0]
    for source in sources:
        if source.manifest["tokenizer"]["sha256"] != first.manifest["tokenizer"]["sha256"]:
            raise shards.ShardError(
                f"{source.path} was packed with tokenizer {source.manifest['tokenizer']['name']!r}, "
                f"{first.path} with {first.manifest['tokenizer']['name']!r} (their sha256 differ): "
                f"the same id would mean different text"
            )
