"""Packing: every unit of the plan becomes a published shard, in any number of processes.

A published shard is never touched again, and a unit's shard does not depend on other units. So the result
does not depend on workers, on tasks, or on how often the work was interrupted, and to resume means to do what
is not there yet.
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wm_ds.data import shards
from wm_ds.packing.bad_records import BadRecordError, BadRecords, describe
from wm_ds.packing.documents import PieceReader, Reading
from wm_ds.packing.plan import PackError, Plan, check_sources, prepare
from wm_ds.packing.quicktok import QuicktokEncoder, build, check
from wm_ds.packing.tokenizer import Encoder, make_encoder
from wm_ds.packing.unit import pack_unit

# ------------------------------------------------------------------------------------------ processes

_worker: dict[str, Any] = {}


def _encoder(plan: Plan, fast: Path | None) -> Encoder:
    return QuicktokEncoder(plan.tokenizer, fast) if fast else make_encoder(plan.tokenizer)


def _start_worker(
    plan: Plan, root: Path, fast: Path | None, bad: BadRecords, progress: Any, parent: int
) -> None:
    _worker.update(plan=plan, root=root, bad=bad, progress=progress, encoder=_encoder(plan, fast))

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
    fast: Path | None,
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
        _pack_here(plan, numbers, root, fast, bad, counters, poll)
        return
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        min(workers, len(numbers)),
        mp_context=context,
        initializer=_start_worker,
        initargs=(plan, root, fast, bad, counters, os.getpid()),
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
                error = _failure(future)
                if error is None:
                    done += 1
                else:
                    failures[number] = error
                submit_next()
            poll(done)
    finally:
        _shut_down(pool, others, unfinished=bool(running))
    if failures:
        raise failures[min(failures)]


def _failure(future: Future[dict[str, Any]]) -> BaseException | None:
    """Why a unit was not packed. Raises PackError where its worker has died."""
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        raise PackError(
            "a worker process died (killed, or out of memory?); the published shards are intact, "
            "run the same command again to go on"
        ) from None
    return error


def _shut_down(pool: ProcessPoolExecutor, others: set[Any], *, unfinished: bool) -> None:
    """End the workers; `others` are children of this process that are not ours."""
    pool.shutdown(wait=not unfinished, cancel_futures=True)
    if unfinished:  # workers hold nothing that a later run would miss
        ours = set(multiprocessing.active_children()) - others
        for process in ours:
            process.terminate()
        for process in ours:
            process.join()


def _pack_here(
    plan: Plan,
    numbers: list[int],
    root: Path,
    fast: Path | None,
    bad: BadRecords,
    counters: Any,
    poll: Callable[[int], None],
) -> None:
    """The same without processes, for one worker."""
    encoder = _encoder(plan, fast)
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


def sample(plan: Plan, units: int = 16, characters: int = 1 << 16) -> list[str]:
    """Texts from the beginnings of units all over the corpus, at most `characters` of each unit."""
    texts = []
    reading = Reading(plan.settings.text_field, plan.settings.txt_split)
    for number in range(0, len(plan.units), max(1, len(plan.units) // units)):
        left = characters
        piece = plan.units[number][0]
        for record in PieceReader(plan.inputs[piece.input], piece, reading, lambda _: None):
            if record.text:
                texts.append(record.text[:left])
                left -= len(texts[-1])
            if left <= 0:
                break
    return texts


def default_workers() -> int:
    """As many as this process may use cores."""
    return len(os.sched_getaffinity(0))


# ------------------------------------------------------------------------------------------ one task


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


def task_units(plan: Plan, task: int, tasks: int) -> list[int]:
    """The units of one of several tasks."""
    return list(range(task, len(plan.units), tasks))


def unpublished(root: Path, numbers: list[int]) -> list[int]:
    """Those of the units that have no shard yet."""
    return [number for number in numbers if not (root / shards.shard_name(number)).is_dir()]


def pack(
    plan: Plan,
    root: Path,
    *,
    bad: BadRecords,
    workers: int,
    task: int = 0,
    tasks: int = 1,
    report: Callable[[int, int, int], None] = lambda *_: None,
) -> dict[str, int]:
    """Pack this task's units that are not yet published; returns counts of all of the task's shards.

    report: see pack_units. Raises PackError when the folder is another plan's, an input changed, a record is
    bad, a worker dies or the disk is full.
    """
    prepare(plan, root)
    with _lock(root, task):
        mine = task_units(plan, task, tasks)
        _remove_leftovers(root, mine)
        records = {number: shards.read_record(root, shards.shard_name(number)) for number in mine}
        for record in filter(None, records.values()):
            refused = [reason for reason in record["bad"] if not bad.allows(reason)]
            if refused:  # packed with another policy
                places = [e for e in record["bad_examples"] if e["reason"] in refused]
                unknown = {
                    "place": f"an input of {record['name']}",
                    "reason": refused[0],
                    "detail": "skipped before",
                }
                raise BadRecordError(describe([*places, unknown][0]))
        check_sources(plan, root, [number for number, record in records.items() if record])
        todo = [number for number in mine if not records[number]]
        try:
            fast = None
            if todo and plan.settings.encoder == "quicktok":
                fast = root / f".encoder-{task}"
                build(plan.tokenizer, fast)
                check(plan.tokenizer, fast, sample(plan))
            if todo:
                pack_units(plan, todo, root, fast, bad, workers, report)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            count = len(mine) - len(unpublished(root, mine))
            raise PackError(
                f"no space left in {root}: {count} of {len(mine)} shards are published and stay valid; "
                f"free space and run the same command again"
            ) from error
        finally:
            _remove_leftovers(root, mine)
            shutil.rmtree(root / f".encoder-{task}", ignore_errors=True)
        done = [shards.read_record(root, shards.shard_name(number)) for number in mine]
    return {
        "shards": len(done),
        **{name: sum(r[name] for r in done if r) for name in ("documents", "tokens")},
        "bad": sum(sum(r["bad"].values()) for r in done if r),
    }


def _remove_leftovers(root: Path, numbers: list[int]) -> None:
    """Half-written shards of killed attempts."""
    names = {shards.shard_name(number) for number in numbers}
    for leftover in root.glob(".shard-*.tmp-*"):
        if leftover.name.split(".")[1] in names:
            shutil.rmtree(leftover, ignore_errors=True)
