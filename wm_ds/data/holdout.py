"""Held-out rows by document: which parts of the stream training must not see.

A held-out row usually begins and ends inside documents that other rows share. With `--holdout-by document`
the whole of every document that has a token in a held-out row is held out: the packer finds these *spans*
of the stream once, and the loader shows training rows without them. Shards are the same either way.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from wm_ds import files
from wm_ds.data import shards, shuffle

FILE = "holdout_spans.bin"  # int64 pairs: first position of a span, first position behind it


def held_out_rows(sequences: int, holdout: int, shuffle_seed: int) -> np.ndarray:
    """Sequence numbers in stream order (int64, sorted) of the last `holdout` in the shuffled order."""
    order = np.arange(sequences - holdout, sequences, dtype=np.int64)
    return np.sort(shuffle.permute(order, sequences, shuffle_seed))


def find_spans(root: Path, manifest: dict[str, Any]) -> np.ndarray:
    """Spans [K, 2] of the stream, apart and sorted, that all documents in held-out rows take up.

    The filler behind a span's last document belongs to it. `manifest` needs no spans of its own yet.
    """
    dtype, align, seq_len = (
        shards.token_dtype(manifest["vocab_size"]),
        manifest["align"],
        manifest["seq_len"],
    )
    rows = held_out_rows(manifest["sequences"], manifest["holdout"], manifest["shuffle_seed"])
    found: list[tuple[int, int]] = []
    shard_start = 0
    for record in manifest["shards"]:
        shard_stop = shard_start + record["length"]
        _, ends = shards.open_shard(root, record, dtype)
        first = np.searchsorted(rows, shard_start // seq_len)
        last = np.searchsorted(rows, (shard_stop - 1) // seq_len, side="right")
        for row in rows[first:last].tolist():
            low = max(row * seq_len - shard_start, 0)
            high = min((row + 1) * seq_len - shard_start, record["length"])
            span = _documents_span(ends, low, high, align)
            if span is not None:
                found.append((shard_start + span[0], shard_start + span[1]))
        shard_start = shard_stop
    spans = _united(found)
    return np.minimum(spans, manifest["sequences"] * seq_len)  # a dropped tail is in no row


def _documents_span(ends: np.ndarray, low: int, high: int, align: int) -> tuple[int, int] | None:
    """From the first to behind the last document with a token in [low, high), filler behind it included."""
    first = int(np.searchsorted(ends, low, side="right"))
    last = int(np.searchsorted(ends, high, side="left"))
    if last == ends.size or (last > 0 and shards.align_up(int(ends[last - 1]), align) >= high):
        last -= 1  # it begins behind the row
    if first > last:
        return None
    start = shards.align_up(int(ends[first - 1]), align) if first else 0
    return start, shards.align_up(int(ends[last]), align)


def _united(spans: list[tuple[int, int]]) -> np.ndarray:
    united: list[list[int]] = []
    for start, stop in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1][1] = max(united[-1][1], stop)
        else:
            united.append([start, stop])
    return np.array(united, dtype=np.int64).reshape(-1, 2)


def rows_without_data(spans: np.ndarray, manifest: dict[str, Any]) -> np.ndarray:
    """Sequence numbers (int64, sorted) of rows that lie inside a span and are not held out: training has no
    use for them."""
    inside = rows_inside(spans, manifest, manifest["seq_len"])
    return np.setdiff1d(
        inside, held_out_rows(manifest["sequences"], manifest["holdout"], manifest["shuffle_seed"])
    )


def rows_inside(spans: np.ndarray, manifest: dict[str, Any], seq_len: int) -> np.ndarray:
    """Numbers (int64, sorted) of the stream's rows of `seq_len` tokens that lie inside one of the spans."""
    length = sum(record["length"] for record in manifest["shards"])
    stream = manifest["sequences"] * manifest["seq_len"]
    rows = -(-stream // seq_len)
    inside: list[np.ndarray] = []
    for start, stop in spans.tolist():
        stop = rows * seq_len if stop >= min(length, stream) else stop  # behind the corpus is filler
        inside.append(np.arange(-(-start // seq_len), min(stop // seq_len, rows), dtype=np.int64))
    return np.concatenate([np.empty(0, dtype=np.int64), *inside])


def with_held_out_rows(spans: np.ndarray, manifest: dict[str, Any]) -> np.ndarray:
    """Spans [K, 2], apart and sorted, of all that training must not see: `spans` and the rows held out. For
    training rows that are longer than these, and would hold some of them."""
    rows = held_out_rows(manifest["sequences"], manifest["holdout"], manifest["shuffle_seed"])
    held = np.stack([rows, rows + 1], axis=1) * manifest["seq_len"]
    return _united([(low, high) for low, high in np.concatenate([spans, held]).tolist()])


def positions_left_out(spans: np.ndarray, manifest: dict[str, Any]) -> int:
    """Positions of the spans that are in no held-out row: training does not see them, nor does evaluation."""
    seq_len = manifest["seq_len"]
    rows = held_out_rows(manifest["sequences"], manifest["holdout"], manifest["shuffle_seed"])
    total = np.concatenate([[0], np.cumsum(spans[:, 1] - spans[:, 0])])

    def below(positions: np.ndarray) -> np.ndarray:
        begun = np.searchsorted(spans[:, 0], positions, side="right")
        stops = np.concatenate([[0], spans[:, 1]])[begun]
        return total[begun] - np.maximum(stops - positions, 0)

    return int(total[-1] - (below((rows + 1) * seq_len) - below(rows * seq_len)).sum())


def write_spans(root: Path, spans: np.ndarray) -> str:
    """Write the spans beside the shards; returns their sha256 for the manifest."""
    data = spans.astype("<i8").tobytes()
    files.write_atomically(root / FILE, data)
    return hashlib.sha256(data).hexdigest()


def read_spans(root: Path, manifest: dict[str, Any]) -> np.ndarray:
    """The spans [K, 2] of a folder whose manifest says `holdout_by` "document", else none.

    Raises ShardError if the file is missing or is not the one that the manifest names.
    """
    if manifest.get("holdout_by", "row") == "row":
        return np.empty((0, 2), dtype=np.int64)
    path = root / FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise shards.ShardError(f"{path} is missing; the manifest names it") from None
    if hashlib.sha256(data).hexdigest() != manifest["holdout_spans_sha256"]:
        raise shards.ShardError(
            f"{path} is damaged: training could see held-out documents; remove it and manifest.json, then "
            f"run the same pack_data command again"
        )
    return np.frombuffer(data, dtype="<i8").astype(np.int64).reshape(-1, 2)
