"""One unit of the plan becomes one shard: read, encode, publish."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wm_ds.data import shards
from wm_ds.packing import documents
from wm_ds.packing.bad_records import EXAMPLES, BadRecordError, BadRecords, describe, example
from wm_ds.packing.documents import PieceReader, Reading, Record
from wm_ds.packing.inputs import Piece
from wm_ds.packing.plan import Plan, filler_id, modification_stamp
from wm_ds.packing.tokenizer import Encoder

_BATCH_BYTES = 1 << 20  # text handed to the encoder at once: large enough to hide Python, small in memory
_BATCH_TEXTS = 4096  # and no more texts than this: an encoding of one word takes a kilobyte, too


def pack_unit(
    plan: Plan,
    number: int,
    root: Path,
    encoder: Encoder,
    bad: BadRecords,
    progress: Callable[[int, int], None],
) -> dict[str, Any]:
    """Read, encode and publish unit `number` as the shard of that number; returns its record.

    progress(bytes read, tokens written) is called now and then. Raises BadRecordError at the first bad record
    that the policy does not allow, OSError when the disk refuses.
    """
    settings, tokenizer = plan.settings, plan.tokenizer
    reading = Reading(settings.text_field, settings.txt_split)
    with shards.ShardWriter(
        root,
        number,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        filler_id=filler_id(tokenizer.eos_id),
        align=settings.align,
    ) as writer:
        unit = _Unit(writer, encoder, bad, progress)
        per_input: list[dict[str, int]] = []
        source: list[dict[str, Any]] = []
        for piece in plan.units[number]:
            item = plan.inputs[piece.input]
            documents_before, tokens_before = writer.documents, writer.tokens
            reader = PieceReader(item, piece, reading, lambda size: progress(size, 0))
            modified = modification_stamp(item)
            for record in reader:
                unit.take(record, item, piece)
            unit.write()
            per_input.append(
                {
                    "input": piece.input,
                    "documents": writer.documents - documents_before,
                    "tokens": writer.tokens - tokens_before,
                }
            )
            source.append({**asdict(piece), "mtime_ns": modified, "sha256": reader.digest()})
        return writer.publish(unit.record() | {"inputs": per_input}, {"pieces": source})


class _Unit:
    """What a unit's records add up to; texts wait until there are enough for one call of the encoder."""

    def __init__(
        self,
        writer: shards.ShardWriter,
        encoder: Encoder,
        bad: BadRecords,
        progress: Callable[[int, int], None],
    ) -> None:
        self._writer, self._encoder, self._bad, self._progress = writer, encoder, bad, progress
        self._counts: Counter[str] = Counter()
        self._problems: Counter[str] = Counter()
        self._examples: list[dict[str, str]] = []
        self._texts: list[str] = []
        self._waiting = 0

    def take(self, record: Record, item: Any, piece: Piece) -> None:
        """One record of the input. Raises BadRecordError for a bad one that the policy does not allow."""
        if record.problem == documents.BLANK:
            self._counts["blank_lines"] += 1
            return
        self._counts["read"] += 1
        if record.problem is not None:
            self._note_problem(record.problem, record, item, piece)
        elif not record.text:
            self._counts["empty"] += 1
        else:
            text = record.text
            self._texts.append(text)
            self._waiting += len(text)
            self._counts["text_bytes"] += len(text) if text.isascii() else len(text.encode())
            if self._waiting >= _BATCH_BYTES or len(self._texts) >= _BATCH_TEXTS:
                self.write()

    def _note_problem(self, problem: str, record: Record, item: Any, piece: Piece) -> None:
        self._problems[problem] += 1
        allowed = self._bad.allows(problem)
        if len(self._examples) < EXAMPLES or not allowed:
            self._examples.append(example(item, piece, record))
        if not allowed:
            raise BadRecordError(describe(self._examples[-1]))

    def write(self) -> None:
        """Encode the texts that wait, and add them to the shard."""
        if not self._texts:
            return
        before = self._writer.tokens
        ids, offsets = self._encoder.encode(self._texts)
        lengths = offsets[1:] - offsets[:-1]
        if not lengths.all():  # text that the tokenizer's normaliser swallows whole has no tokens either
            self._counts["empty"] += int((lengths == 0).sum())
            offsets = offsets[[0, *(lengths.nonzero()[0] + 1)]]
        self._writer.add(ids, offsets)
        self._texts.clear()
        self._waiting = 0
        self._progress(0, self._writer.tokens - before)

    def record(self) -> dict[str, Any]:
        """Counts, bad records and examples of them."""
        names = ("read", "empty", "blank_lines", "text_bytes")
        return {
            "counts": {name: self._counts[name] for name in names},
            "bad": dict(sorted(self._problems.items())),
            "bad_examples": self._examples,
        }
