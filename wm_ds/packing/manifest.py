"""One manifest over all shards of a plan: counts, checksums, and how the stream is cut into sequences."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from wm_ds.data import holdout as held_out
from wm_ds.data import shards
from wm_ds.packing.bad_records import EXAMPLES
from wm_ds.packing.plan import PLAN, PackError, filler_id, read_plan


def merge(root: Path, *, verify: bool, report: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Write the manifest over all shards of the plan; returns it.

    Raises PackError when shards are missing or nothing was packed, shards.ShardError (with `verify`) when one
    is damaged.
    """
    path = root / PLAN
    if not path.is_file():
        raise PackError(f"{root} has no {PLAN}: nothing was packed there")
    plan = read_plan(root)
    total = plan["units"]
    found = [shards.read_record(root, shards.shard_name(number)) for number in range(total)]
    records = [record for record in found if record is not None]
    missing = [number for number, record in enumerate(found) if record is None]
    if missing:
        some = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise PackError(
            f"{len(missing)} of {total} shards in {root} are missing ({some}); run the tasks that pack them "
            f"(shard i belongs to task i mod n), then merge again"
        )
    if verify:
        for record in records:
            shards.verify_shard(root, record, report)
    filled = [record for record in records if record["length"]]
    if not filled:
        counts = _summed(record["counts"] for record in records)
        raise PackError(
            f"nothing to pack: {counts['read']} records were read and none is a document with text "
            f"(empty: {counts['empty']}, bad: {dict(_summed(record['bad'] for record in records))})"
        )
    manifest = _manifest(root, plan, records, filled)
    for leftover in root.glob("*.tmp-*"):  # of killed attempts; nobody packs any more
        shards.remove(leftover)
    shards.write_json(root / shards.MANIFEST, manifest)
    return manifest


def _summed(dictionaries: Iterable[dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for dictionary in dictionaries:
        total.update(dictionary)
    return total


def _manifest(
    root: Path, plan: dict[str, Any], records: list[dict[str, Any]], filled: list[dict[str, Any]]
) -> dict[str, Any]:
    settings, tokenizer = plan["settings"], plan["tokenizer"]
    dtype = shards.token_dtype(tokenizer["vocab_size"])
    seq_len, length = settings["seq_len"], sum(record["length"] for record in filled)
    sequences = -(-length // seq_len) if settings["tail"] == "pad" else length // seq_len
    if not sequences:
        raise PackError(
            f"nothing to train on: the corpus is {length} positions, less than one sequence of {seq_len}, "
            f"and --tail drop leaves an incomplete one out; pack into another folder with --tail pad, a "
            f"smaller --seq-len or more text"
        )
    if settings["holdout"] >= sequences:
        raise PackError(
            f"--holdout {settings['holdout']} leaves nothing to train on: the corpus is {sequences} "
            f"sequences of {seq_len} ({length} positions); pack into another folder with a smaller "
            f"holdout or more text"
        )
    tokens = sum(record["tokens"] for record in filled)
    dropped = _tokens_from(root, filled, dtype, settings["align"], sequences * seq_len)
    counts = _summed(record["counts"] for record in records)
    bad = _summed(record["bad"] for record in records)
    inputs = [{**item, "documents": 0, "tokens": 0} for item in plan["inputs"]]
    for record in records:
        for part in record["inputs"]:
            for name in ("documents", "tokens"):
                inputs[part["input"]][name] += part[name]
    private = ("inputs", "counts", "bad", "bad_examples")
    manifest = {
        "format": shards.FORMAT,
        "version": shards.VERSION,
        "key": hashlib.sha256(
            json.dumps({**plan, "tokenizer_name": None}, sort_keys=True).encode()
        ).hexdigest(),
        "tokenizer": {"name": plan["tokenizer_name"], "sha256": tokenizer["sha256"]},
        "vocab_size": tokenizer["vocab_size"],
        "dtype": dtype.name,
        "eos_id": tokenizer["eos_id"],
        "eos_token": tokenizer["eos_token"],
        "filler_id": filler_id(tokenizer["eos_id"]),
        "seq_len": seq_len,
        "align": settings["align"],
        "tail": settings["tail"],
        "shuffle_seed": settings["shuffle_seed"],
        "sequences": sequences,
        "holdout": settings["holdout"],
        "holdout_by": settings.get("holdout_by", "row"),
        "counts": {
            "read": counts["read"],
            "written": sum(record["documents"] for record in filled),
            "empty": counts["empty"],
            "bad": bad.total(),
            "blank_lines": counts["blank_lines"],
            "text_bytes": counts["text_bytes"],
            "tokens": tokens,
            "filler": length - tokens,
            "dropped_tokens": dropped,
        },
        "bad": dict(sorted(bad.items())),
        "bad_examples": [example for record in records for example in record["bad_examples"]][:EXAMPLES],
        "settings": settings,
        "inputs": inputs,
        "shards": [
            {name: value for name, value in record.items() if name not in private} for record in filled
        ],
    }
    if manifest["holdout_by"] == "document":
        _hold_out_documents(root, manifest)
    return manifest


def _hold_out_documents(root: Path, manifest: dict[str, Any]) -> None:
    """Find the held-out documents' spans, write them beside the shards, and add to the manifest what they
    are and what they cost: data tokens that are in neither split, and rows that hold nothing else."""
    spans = held_out.find_spans(root, manifest)
    left_out = held_out.rows_without_data(spans, manifest).size
    if manifest["sequences"] - manifest["holdout"] - left_out < 1:
        raise PackError(
            f"--holdout {manifest['holdout']} --holdout-by document leaves nothing to train on: documents "
            f"in the held-out sequences fill the whole corpus ({manifest['sequences']} sequences); pack into "
            f"another folder with a smaller --holdout, more text, or --holdout-by row"
        )
    manifest["version"] = shards.HOLDOUT_VERSION
    manifest["holdout_spans_sha256"] = held_out.write_spans(root, spans)
    manifest["holdout_left_out"] = {
        "sequences": left_out,
        "positions": held_out.positions_left_out(spans, manifest),
    }


def _tokens_from(root: Path, records: list[dict[str, Any]], dtype: Any, align: int, position: int) -> int:
    """Data tokens (filler not counted) of the corpus at `position` and behind it."""
    tokens = 0
    stop = sum(record["length"] for record in records)
    for record in reversed(records):
        start = stop - record["length"]
        if stop <= position:
            break
        _, ends = shards.open_shard(root, record, dtype)
        starts, stops = shards.document_spans(ends, max(position - start, 0), record["length"], align)
        tokens += int((stops - starts).sum())
        stop = start
    return tokens
