"""Training and measuring the runs of sweeps, several at a time, each as processes of its own.

What is done is known from the disk alone: a run is trained where the trainer has left its marker, measured
where its file has every part. So after a kill the same command goes on, and what is finished is not run
again. A run that fails is reported and left; nothing is tried again unless a person starts the command again.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from wm_ds.config import load as configuration
from wm_ds.files import write_atomically, write_json
from wm_ds.sweep.description import SweepError
from wm_ds.sweep.measure import measure_command
from wm_ds.sweep.runs import Code, Run
from wm_ds.sweep.table import Table
from wm_ds.sweep.task import Task

POLL_S = 0.5
TRAINER = "wm_ds.train"
_UPCYCLE = Path(__file__).resolve().parents[2] / "tools" / "upcycle.py"
# Of a launch that this process may be part of; a run is a launch of its own.
_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WM_ATTEMPT")


@dataclass
class Working:
    """A process at work on a task."""

    task: Task
    what: str
    process: subprocess.Popen
    slot: int
    started: float


class Stopped(KeyboardInterrupt):
    """Somebody has asked to stop: Ctrl-C, or SIGTERM."""


def work(
    tasks: list[Task], code: Code, *, jobs: int, threads: int | None, finished: Callable[[Task], None]
) -> list[Task]:
    """Train and measure what is not done yet, `jobs` processes at a time; returns the tasks that failed.

    `threads`: of each process; None shares this machine's cores out. `finished` is called after each run.
    """
    if jobs < 1 or (threads is not None and threads < 1):
        raise SweepError(f"--jobs {jobs} and --threads {threads} must be at least 1")
    threads = threads or max(1, len(os.sched_getaffinity(0)) // jobs)
    table = Table(tasks)
    waiting = [task for task in tasks if _begin(task)]
    working: list[Working] = []
    with _told_to_stop(), table:
        try:
            while waiting or working:
                while len(working) < jobs and (task := next((t for t in waiting if t.ready), None)):
                    slot = min(set(range(jobs)) - {w.slot for w in working})
                    waiting.remove(task)
                    working.append(_start(task, code, slot, threads))
                    table.say(working[-1].task)
                if not working:
                    _give_up(waiting, table)
                    break
                for one in [w for w in working if _ended(w)]:
                    working.remove(one)
                    if one.task.state == "waiting":  # trained; to be measured at once
                        waiting.insert(0, one.task)
                        continue
                    table.say(one.task)
                    if one.task.state == "done":
                        finished(one.task)
                table.draw()
                time.sleep(POLL_S)
        except Stopped:
            _stop(working, table)
            raise
    return [task for task in tasks if task.state in ("failed", "stopped")]


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold `folder` for this process: two sweeps must not train one run. Raises SweepError."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise SweepError(
                f"another sweep is at work in {folder} (process {lock.read().strip() or '?'}); wait for it, "
                "or give both sweeps to one command"
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


def _begin(task: Task) -> bool:
    """Whether there is anything to do."""
    if task.next() is None:
        task.state = "done"
        return False
    return True


def _start(task: Task, code: Code, slot: int, threads: int) -> Working:
    run, what = task.run, task.next()
    assert what is not None
    environment = {k: v for k, v in os.environ.items() if k not in _LAUNCH}
    environment |= {"OMP_NUM_THREADS": str(threads), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    if torch.cuda.is_available():  # one GPU for each process at work
        environment["CUDA_VISIBLE_DEVICES"] = str(slot % torch.cuda.device_count())
    if what == "upcycle":
        write_files(run, code)
        command = upcycle_command(run)
    elif what == "train":
        write_files(run, code)
        command = [sys.executable, "-u", "-m", TRAINER, str(run.beside(".yaml"))]
    else:
        command = [sys.executable, "-u", *measure_command(run, task.measure)]
    with open(run.beside(".log"), "ab") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # a Ctrl-C is for us: we ask them once to save and stop
            preexec_fn=_end_with_parent,
        )
    task.state = {"upcycle": "upcycling", "train": "training", "measure": "measuring"}[what]
    return Working(task, what, process, slot, time.monotonic())


def _give_up(tasks: list[Task], table: Table) -> None:
    """Tasks whose beginning has failed."""
    for task in tasks:
        assert task.run.origin is not None
        task.state, task.problem = "failed", f"{task.run.origin.folder}, which it starts from, is not trained"
        table.say(task)


def upcycle_command(run: Run) -> list[str]:
    """What gives a run its step 0."""
    assert run.origin is not None
    command = [sys.executable, str(_UPCYCLE), str(run.origin.folder), str(run.beside(".yaml"))]
    return command if run.pool is None else [*command, "--pool", run.pool]


def write_files(run: Run, code: Code) -> None:
    """The run's configuration, and which code trains it, before its first attempt."""
    run.folder.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(run.beside(".yaml"), configuration.dump(run.config))
    record = run.record()
    record.update(code=record["code"] or code.digest, commit=record["commit"] or code.commit)
    if record["code"] != code.digest:  # accepted by the person who started this
        record.update(code=code.digest, commit=code.commit, mixed=True)
    write_json(run.beside(".record.json"), record, indent=1)


def _end_with_parent() -> None:
    """In the new process: SIGTERM once its parent is gone, however that died; the trainer saves and stops."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # 1: PR_SET_PDEATHSIG


def _ended(one: Working) -> bool:
    """Whether the process has ended; then its task's state and its seconds are written down."""
    pid, status, usage = os.wait4(one.process.pid, os.WNOHANG)
    if pid == 0:
        return False
    code = one.process.returncode = os.waitstatus_to_exitcode(status)
    run, task = one.task.run, one.task
    record = run.record()
    record["attempts"].append(
        {
            "what": one.what,
            "exit": code,
            "wall_s": round(time.monotonic() - one.started, 2),
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        }
    )
    write_json(run.beside(".record.json"), record, indent=1)
    following = task.next()
    if code != 0:
        task.state, task.problem = "failed", f"exit code {code}: {last_words(run.beside('.log'))}"
    elif following == one.what:  # the trainer ends with 0 where it was asked to stop
        task.state, task.problem = "stopped", last_words(run.beside(".log"))
    else:
        task.state = "done" if following is None else "waiting"
    return True


def last_words(log: Path) -> str:
    """The last error of a log, or its last line."""
    try:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return "no log"
    errors = [line for line in lines[-40:] if line.startswith("error:")]
    return (errors or lines or ["an empty log"])[-1][:300]


def _stop(working: list[Working], table: Table) -> None:
    """Ask all processes to save and stop, and wait until they have."""
    for one in working:
        with contextlib.suppress(ProcessLookupError):
            one.process.terminate()
    table.note(f"stopping: {len(working)} processes save; the same command goes on from there")
    while working:
        working = [one for one in working if not _ended(one)]
        time.sleep(0.1)


@contextlib.contextmanager
def _told_to_stop() -> Iterator[None]:
    """Ctrl-C and SIGTERM become `Stopped`, once; further ones do not hurt what is being saved."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        for again in before:
            signal.signal(again, signal.SIG_IGN)
        raise Stopped

    before: dict[signal.Signals, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def seconds_of(record: dict[str, Any], what: str) -> dict[str, float | None]:
    """Wall and CPU seconds of all attempts at training or measuring; None where nobody took them (SLURM)."""
    attempts = [a for a in record["attempts"] if a["what"] == what]
    if not attempts:
        return {"wall_s": None, "cpu_s": None}
    return {name: round(sum(a[name] for a in attempts), 1) for name in ("wall_s", "cpu_s")}
