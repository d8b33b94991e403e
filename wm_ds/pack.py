"""Packing a corpus: plan -> one shard per unit, in any number of processes -> one manifest.

The plan is a function of inputs and settings: units of about equal size, numbered. A unit becomes the shard of
its number, whoever packs it; a published shard is never touched again. So the result does not depend on
workers, on tasks, or on how often the work was interrupted, and to resume means to do what is not there.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from . import documents, shards
from .documents import Input, Piece, PieceReader, Reading
from .encode import Encoder, TokenizerSpec, copy_tokenizer, make_encoder

PLAN = "plan.json"
TOKENIZER = "tokenizer"  # a copy, so that the data can be decoded without its source
_BATCH_BYTES = 1 << 20  # text handed to the encoder at once: large enough to hide Python, small in memory
_EXAMPLES = 5  # bad records whose place is kept, per shard and in the manifest
_SMALLEST_UNIT, _LARGEST_UNIT, _UNITS = 1 << 20, 256 << 20, 64


class PackError(RuntimeError):
    """Packing cannot go on; the message says what, where and what to do."""


@dataclass(frozen=True)
class Settings:
    """What, besides the inputs and the tokenizer, decides the packed bytes and how they are cut.

    seq_len: positions of a training sequence. align: every document starts at a multiple of it.
    tail: "pad" fills the last sequence with masked filler, "drop" leaves an incomplete one out.
    holdout: sequences of the split `holdout`. shuffle_seed: names the order whose end is held out.
    shard_bytes: input bytes a shard is made of; None: by the size of the corpus.
    """

    seq_len: int
    align: int = 8
    tail: str = "pad"
    holdout: int = 0
    shuffle_seed: int = 0
    text_field: str = "text"
    txt_split: str = "file"
    shard_bytes: int | None = None


@dataclass(frozen=True)
class BadRecords:
    """The policy for records that are no document. Not part of the plan: it never changes a good record."""

    skip: bool = False
    allow_truncated: bool = False

    def allows(self, reason: str) -> bool:
        return self.skip or (self.allow_truncated and reason == "truncated")


@dataclass(frozen=True)
class Plan:
    settings: Settings
    inputs: list[Input]
    units: list[list[Piece]]
    tokenizer: TokenizerSpec

    def bytes_of(self, units: list[int]) -> int:
        return sum(piece.size for number in units for piece in self.units[number])

    def description(self) -> dict[str, Any]:
        """Everything that the result depends on; its hash is the key of the output folder."""
        tokenizer = self.tokenizer
        return {
            "format": shards.FORMAT,
            "version": shards.VERSION,
            "settings": asdict(self.settings),
            "tokenizer": {
                "sha256": tokenizer.sha256,
                "vocab_size": tokenizer.vocab_size,
                "eos_id": tokenizer.eos_id,
                "eos_token": tokenizer.eos_token,
            },
            "inputs": [
                {
                    "name": item.name,
                    "bytes": item.size,
                    **({"dataset": item.identity} if item.identity else {}),
                }
                for item in self.inputs
            ],
            "units": len(self.units),
        }

    def key(self) -> str:
        return hashlib.sha256(json.dumps(self.description(), sort_keys=True).encode()).hexdigest()


def filler_id(eos_id: int) -> int:
    """The id between aligned documents: not EOS, so that EOS ids in a raw stream count its documents."""
    return 0 if eos_id != 0 else 1


def make_plan(inputs: list[Input], tokenizer: TokenizerSpec, settings: Settings) -> Plan:
    """Check the settings and cut the inputs into units. Raises PackError for settings that cannot work."""
    if settings.seq_len < 2:
        raise PackError(f"--seq-len {settings.seq_len} must be at least 2")
    if settings.align < 1 or settings.seq_len % settings.align:
        raise PackError(
            f"--seq-len {settings.seq_len} is not a multiple of --align {settings.align}: a document that goes on "
            f"in the next sequence could not keep its alignment; choose an align that divides it"
        )
    if settings.holdout < 0:
        raise PackError(f"--holdout {settings.holdout} is negative")
    if settings.shard_bytes is None:
        # From the size of the inputs, never from workers or tasks: enough units for many processes in a
        # small corpus, few enough files in a large one.
        total = sum(item.size for item in inputs)
        settings = replace(settings, shard_bytes=min(max(total // _UNITS, _SMALLEST_UNIT), _LARGEST_UNIT))
    elif settings.shard_bytes < 1:
        raise PackError(f"--shard-bytes {settings.shard_bytes} must be positive")
    assert settings.shard_bytes is not None
    reading = Reading(settings.text_field, settings.txt_split)
    return Plan(settings, inputs, documents.cut(inputs, settings.shard_bytes, reading), tokenizer)


# ------------------------------------------------------------------------------------------ one unit


class BadRecordError(PackError):
    """A record is bad and the policy is to stop."""


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
    counts: Counter[str] = Counter()
    problems: Counter[str] = Counter()
    examples: list[dict[str, str]] = []
    per_input: list[dict[str, int]] = []
    source: list[dict[str, Any]] = []
    with shards.ShardWriter(
        root,
        number,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        filler_id=filler_id(tokenizer.eos_id),
        align=settings.align,
    ) as writer:
        texts: list[str] = []
        waiting = 0

        def write() -> None:
            nonlocal waiting
            before = writer.tokens
            ids, offsets = encoder.encode(texts)
            lengths = offsets[1:] - offsets[:-1]
            if not lengths.all():  # text that the tokenizer's normaliser swallows whole has no tokens either
                counts["empty"] += int((lengths == 0).sum())
                offsets = offsets[[0, *(lengths.nonzero()[0] + 1)]]
            writer.add(ids, offsets)
            texts.clear()
            waiting = 0
            progress(0, writer.tokens - before)

        for piece in plan.units[number]:
            item = plan.inputs[piece.input]
            documents_before, tokens_before = writer.documents, writer.tokens
            reader = PieceReader(item, piece, reading, lambda size: progress(size, 0))
            mtime = os.stat(item.name).st_mtime_ns if item.kind != "dataset" else None
            for record in reader:
                if record.problem == documents.BLANK:
                    counts["blank_lines"] += 1
                    continue
                counts["read"] += 1
                if record.problem is not None:
                    problems[record.problem] += 1
                    if len(examples) < _EXAMPLES or not bad.allows(record.problem):
                        examples.append(_example(item, piece, record))
                    if not bad.allows(record.problem):
                        raise BadRecordError(_describe_bad(examples[-1]))
                elif not record.text:
                    counts["empty"] += 1
                else:
                    texts.append(record.text)
                    waiting += len(record.text)
                    counts["text_bytes"] += (
                        len(record.text) if record.text.isascii() else len(record.text.encode())
                    )
                    if waiting >= _BATCH_BYTES:
                        write()
            if texts:
                write()
            per_input.append(
                {
                    "input": piece.input,
                    "documents": writer.documents - documents_before,
                    "tokens": writer.tokens - tokens_before,
                }
            )
            source.append({**asdict(piece), "mtime_ns": mtime, "sha256": reader.digest()})
        extra = {
            "counts": {name: counts[name] for name in ("read", "empty", "blank_lines", "text_bytes")},
            "bad": dict(sorted(problems.items())),
            "bad_examples": examples,
            "inputs": per_input,
        }
        return writer.publish(extra, {"pieces": source})


def _example(item: Input, piece: Piece, record: documents.Record) -> dict[str, str]:
    if item.kind == "parquet":
        place = f"{item.name}, row {record.where} from row group {piece.start}"
    elif item.kind == "dataset":
        place = f"{item.name}, shard {piece.start}, row {record.where}"
    else:
        place = f"{item.name}:{documents.lines_before(item, piece) + record.where + 1}"
    return {"place": place, "reason": record.problem or "", "detail": record.detail}


def _describe_bad(example: dict[str, str]) -> str:
    return (
        f"bad record at {example['place']}: {example['reason']} ({example['detail']}). Correct it, or run again "
        f"with --on-bad-record skip to leave such records out and count them"
    )


# ------------------------------------------------------------------------------------------ processes

_worker: dict[str, Any] = {}


def _start_worker(plan: Plan, root: Path, bad: BadRecords, progress: Any, parent: int) -> None:
    _worker.update(plan=plan, root=root, bad=bad, progress=progress, encoder=make_encoder(plan.tokenizer))

    def leave_with_parent() -> None:
        # A parent killed by SIGKILL cannot end its workers, and they would wait for work for ever.
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


def _work(number: int) -> dict[str, Any]:
    counters = _worker["progress"]

    def progress(size: int, tokens: int) -> None:
        # A unit's own two cells: no lock that a killed worker could keep for ever.
        counters[2 * number] += size
        counters[2 * number + 1] += tokens

    return pack_unit(_worker["plan"], number, _worker["root"], _worker["encoder"], _worker["bad"], progress)


def pack_units(
    plan: Plan,
    numbers: list[int],
    root: Path,
    bad: BadRecords,
    workers: int,
    report: Callable[[int, int, int], None],
) -> None:
    """Pack the given units. report(bytes, tokens, units done) is called about twice a second.

    Of several failing units the first one's error is raised, so that the message does not depend on the
    number of workers; later units are given up. Raises PackError when a worker process dies.
    """
    context = multiprocessing.get_context("spawn")
    counters = context.RawArray("q", 2 * len(plan.units))

    def poll(done: int) -> None:
        report(sum(counters[0::2]), sum(counters[1::2]), done)

    if workers == 1 or len(numbers) == 1:
        _pack_here(plan, numbers, root, bad, counters, poll)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(workers, len(numbers)),
        mp_context=context,
        initializer=_start_worker,
        initargs=(plan, root, bad, counters, os.getpid()),
    )
    failures: dict[int, BaseException] = {}
    done = 0
    remaining = iter(numbers)
    running: dict[Future[dict[str, Any]], int] = {}

    def submit_next() -> None:
        number = next(remaining, None)
        if number is not None and not failures:
            running[pool.submit(_work, number)] = number

    try:
        # One unit waits beside those being packed: enough to keep workers busy, and after a failure few
        # units later than it are begun.
        for _ in range(workers + 1):
            submit_next()
        while running and not (failures and min(running.values()) > min(failures)):
            finished, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in finished:
                number = running.pop(future)
                error = future.exception()
                if isinstance(error, BrokenProcessPool):
                    raise PackError(
                        "a worker process died (killed, or out of memory?); the published shards are intact, "
                        "run the same command again to go on"
                    ) from None
                if error is not None:
                    failures[number] = error
                else:
                    done += 1
                submit_next()
            poll(done)
    finally:
        unfinished = bool(running)
        pool.shutdown(wait=not unfinished, cancel_futures=True)
        if unfinished:  # workers hold nothing that a later run would miss
            ours = set(multiprocessing.active_children()) - others
            for process in ours:
                process.terminate()
            for process in ours:
                process.join()
    if failures:
        raise failures[min(failures)]


def _pack_here(
    plan: Plan, numbers: list[int], root: Path, bad: BadRecords, counters: Any, poll: Callable[[int], None]
) -> None:
    """The same without processes, for one worker."""
    encoder = make_encoder(plan.tokenizer)
    last = time.monotonic()

    for done, number in enumerate(numbers):

        def progress(size: int, tokens: int, done: int = done) -> None:
            nonlocal last
            counters[0] += size
            counters[1] += tokens
            if time.monotonic() - last > 0.5:
                last = time.monotonic()
                poll(done)

        pack_unit(plan, number, root, encoder, bad, progress)
    poll(len(numbers))


def default_workers() -> int:
    return len(os.sched_getaffinity(0))


# ------------------------------------------------------------------------------------------ the folder


@contextmanager
def _lock(root: Path, task: int) -> Iterator[None]:
    """Refuse two packers on one task of a folder. Where the file system has no locks there is none: what two
    packers of the same task do to each other is at worst an error, since their shards are the same."""
    with open(root / f".lock-{task}", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PackError(
                f"another pack_data is at work in {root} (task {task}); wait for it or end it"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
        yield
        Path(file.name).unlink(missing_ok=True)


def prepare(plan: Plan, root: Path) -> None:
    """Make the output folder this plan's, or check that it is. Raises PackError naming what differs."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / PLAN
    description = json.loads(json.dumps(plan.description()))
    if not path.exists():
        strangers = [
            entry.name for entry in root.iterdir() if not entry.name.startswith((".lock-", "tokenizer"))
        ]
        if strangers:
            raise PackError(
                f"{root} holds other files ({', '.join(sorted(strangers)[:3])}); choose an empty folder"
            )
        copy_tokenizer(plan.tokenizer, root / TOKENIZER)
        shards.write_json(path, {"tokenizer_name": plan.tokenizer.name, **description})
    found = json.loads(path.read_text(encoding="utf-8"))
    differences = list(_differences(found, description))
    if differences:
        raise PackError(
            f"{root} was begun with other inputs or settings: {'; '.join(differences[:5])}"
            f"{f' and {len(differences) - 5} more' if len(differences) > 5 else ''}. "
            f"Repeat the first command, or choose another folder"
        )


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for part in ("settings", "tokenizer"):
        for name, value in new[part].items():
            if old[part].get(name) != value:
                yield f"{part} {name} was {old[part].get(name)!r}, is now {value!r}"
    for name in ("format", "version"):
        if old[name] != new[name]:
            yield f"{name} was {old[name]!r}, is now {new[name]!r}"
    before, after = ({item["name"]: item for item in side["inputs"]} for side in (old, new))
    for name in before.keys() | after.keys():
        if name not in after:
            yield f"input {name} is missing now"
        elif name not in before:
            yield f"input {name} is new"
        elif before[name] != after[name]:
            yield f"input {name} changed: it had {before[name]['bytes']} bytes, now {after[name]['bytes']}"
    if before.keys() == after.keys() and list(before) != list(after):
        yield "the inputs are in another order"


def check_sources(plan: Plan, root: Path, numbers: list[int]) -> None:
    """Compare published shards' inputs with today's files: by time, and by content where the time differs."""
    reading = Reading(plan.settings.text_field, plan.settings.txt_split)
    for number in numbers:
        path = root / shards.shard_name(number) / "source.json"
        for entry in json.loads(path.read_text(encoding="utf-8"))["pieces"]:
            item = plan.inputs[entry["input"]]
            if entry["mtime_ns"] in (None, os.stat(item.name).st_mtime_ns):
                continue
            piece = Piece(entry["input"], entry["start"], entry["stop"], entry["size"])
            reader = PieceReader(item, piece, reading, lambda _: None)
            for _ in reader:
                pass
            if reader.digest() != entry["sha256"]:
                raise PackError(
                    f"input {item.name} changed after {shards.shard_name(number)} was packed from it; "
                    f"restore it, or pack into another folder"
                )


def task_units(plan: Plan, task: int, tasks: int) -> list[int]:
    return list(range(task, len(plan.units), tasks))


def pack(
    plan: Plan,
    root: Path,
    *,
    bad: BadRecords,
    workers: int,
    task: int = 0,
    tasks: int = 1,
    report: Callable[[int, int, int], None] = lambda *_: None,
) -> None:
    """Pack this task's units that are not yet published."""
    prepare(plan, root)
    with _lock(root, task):
        mine = task_units(plan, task, tasks)
        _remove_leftovers(root, mine)
        records = {number: shards.read_record(root, shards.shard_name(number)) for number in mine}
        for record in records.values():
            for example in record["bad_examples"] if record else ():
                if not bad.allows(example["reason"]):
                    raise BadRecordError(_describe_bad(example))
        check_sources(plan, root, [number for number, record in records.items() if record])
        todo = [number for number in mine if not records[number]]
        if not todo:
            return
        try:
            pack_units(plan, todo, root, bad, workers, report)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            count = sum((root / shards.shard_name(number)).is_dir() for number in mine)
            raise PackError(
                f"no space left in {root}: {count} of {len(mine)} shards are published and stay valid; "
                f"free space and run the same command again"
            ) from error
        finally:
            _remove_leftovers(root, mine)


def _remove_leftovers(root: Path, numbers: list[int]) -> None:
    """Half-written shards of killed attempts."""
    names = {shards.shard_name(number) for number in numbers}
    for leftover in root.glob("shard-*.tmp-*"):
        if leftover.name.partition(".")[0] in names:
            shutil.rmtree(leftover, ignore_errors=True)


# ------------------------------------------------------------------------------------------ the manifest


def merge(root: Path, *, verify: bool, report: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Write the manifest over all shards of the plan; returns it.

    Raises PackError when shards are missing or nothing was packed, shards.ShardError (with `verify`) when one
    is damaged.
    """
    path = root / PLAN
    if not path.is_file():
        raise PackError(f"{root} has no {PLAN}: nothing was packed there")
    plan = json.loads(path.read_text(encoding="utf-8"))
    settings, tokenizer = plan["settings"], plan["tokenizer"]
    total = plan["units"]
    records = [shards.read_record(root, shards.shard_name(number)) for number in range(total)]
    missing = [number for number, record in enumerate(records) if record is None]
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
    if settings["holdout"] >= sequences:
        raise PackError(
            f"--holdout {settings['holdout']} leaves nothing to train on: the corpus is {sequences} sequences of "
            f"{seq_len} ({length} positions); pack into another folder with a smaller holdout or more text"
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
    return {
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
        "bad_examples": [example for record in records for example in record["bad_examples"]][:_EXAMPLES],
        "settings": settings,
        "inputs": inputs,
        "shards": [
            {name: value for name, value in record.items() if name not in private} for record in filled
        ],
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
