"""The policy for records that are no document, and how one is named to a person."""

from __future__ import annotations

from dataclasses import dataclass

from wm_ds.packing.documents import Record, lines_before
from wm_ds.packing.inputs import Input, Piece
from wm_ds.packing.plan import PackError

EXAMPLES = 5  # bad records whose place is kept


@dataclass(frozen=True)
class BadRecords:
    """The policy for records that are no document. Not part of the plan: it never changes a good record."""

    skip: bool = False
    allow_truncated: bool = False

    def allows(self, reason: str) -> bool:
        """Whether a record that is bad for `reason` is left out and counted, instead of ending the run."""
        return self.skip or (self.allow_truncated and reason == "truncated")


class BadRecordError(PackError):
    """A record is bad and the policy is to stop."""


def example(item: Input, piece: Piece, record: Record) -> dict[str, str]:
    """Where a bad record is and what is wrong with it: place, reason, detail."""
    if item.kind == "parquet":
        place = f"{item.name}, row {record.where} from row group {piece.start}"
    elif item.kind == "arrow":
        place = f"{item.name}, row {record.where}"
    elif item.kind == "dataset":
        place = f"{item.name}, shard {piece.start}, row {record.where}"
    else:
        place = f"{item.name}:{lines_before(item, piece) + record.where + 1}"
    return {"place": place, "reason": record.problem or "", "detail": record.detail}


def describe(example: dict[str, str]) -> str:
    """The error line for a bad record, with the ways to go on."""
    way = (
        "--allow-truncated to take what the file still holds"
        if example["reason"] == "truncated"
        else "--on-bad-record skip to leave such records out and count them"
    )
    return (
        f"bad record at {example['place']}: {example['reason']} ({example['detail']}). Correct it, or run "
        f"again with {way}"
    )
