"""Downstream tasks on the way (`evaluate.tasks`): what is wanted, who works on it, what came of it.

The trainer's rank 0 only writes down what it wants, and has one process at a time work beside it
(`python -m wm_ds.evaluate on-the-way RUN`), at low priority; in a job of slurm/pretrain.sbatch the batch
script submits a job instead (WM_EVALUATIONS=job). Nothing of it ends or stops training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from wm_ds.config.schema import Config, ConfigError
from wm_ds.distributed.host_group import Agreement
from wm_ds.errors import describe
from wm_ds.files import write_json
from wm_ds.run.evaluations_file import FOLDER, RUNNING, WANTED, append_row, read_evaluations, read_request

log = logging.getLogger(__name__)
ROOT = str(Path(__file__).parents[2])
# What a launcher says to the ranks; the evaluating process is none of them.
OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "WM_ATTEMPT",
)


def check_tasks(config: Config) -> None:
    """Ask the harness, in a process of its own, whether it knows the tasks and has their data; rank 0.

    Raises ConfigError with its answer.
    """
    e = config.evaluate
    if not e.tasks:
        return
    command = [sys.executable, "-m", "wm_ds.evaluate", "on-the-way", "--check", "--tasks", *e.tasks]
    command += ["--data", e.tasks_data] if e.tasks_data is not None else []
    patience = config.run.timeout_minutes * 60 / 2  # the other ranks wait for this one
    try:
        done = subprocess.run(
            command,
            env=_environment(),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=patience,
        )
    except subprocess.TimeoutExpired:
        log.warning("evaluate.tasks: the harness did not answer within %.0f s; not checked", patience)
        return
    if done.returncode:
        said = done.stderr.strip().splitlines()
        why = said[-1].removeprefix("error: ") if said else f"the check ended with {done.returncode}"
        raise ConfigError(f"evaluate.tasks = {e.tasks}: {why}")


class Evaluations:
    """The evaluations of one run, on its rank 0; elsewhere, and without tasks, no method does anything."""

    def __init__(self, config: Config, *, is_main: bool, begun: int) -> None:
        """`begun`: the step that this attempt goes on from. What earlier ones left is taken up."""
        self._settings, self._run = config.evaluate, Path(config.run.dir)
        self._board = config.log.tensorboard
        self._active = bool(config.evaluate.tasks) and is_main
        self._by_job = os.environ.get("WM_EVALUATIONS") == "job" and not config.evaluate.tasks_inline
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._due: int | None = None  # the step of a checkpoint that may not be published yet
        self._seen = 0  # rows of evaluations.jsonl that were reported
        self._problem: str | None = None
        if not self._active:
            return
        self._seen = len(read_evaluations(self._run))
        if not self._by_job:
            self._put_back()
        self.saved(begun)

    def saved(self, step: int, total: int | None = None) -> bool:
        """A checkpoint was saved, or its writing has begun: evaluate it if it is due, as the last one is.

        Returns whether training is to wait for that (`settle`); the same on all ranks.
        """
        every = self._settings.tasks_every
        if not self._settings.tasks or step == 0 or (step != total and (every is None or step % every)):
            return False
        if self._active and step not in {row["step"] for row in read_evaluations(self._run)}:
            self._due = step
        return self._settings.tasks_inline

    def poll(self) -> None:
        """Look after it; at the ends of log intervals. Never raises, says a problem of the disk once."""
        if not self._active:
            return
        try:
            self._report()
            self._look_after_process()
            self._want()
            self._start()
            self._problem = None
        except OSError as error:
            if self._problem is None:
                log.warning("evaluate.tasks: %s; training goes on", describe(error))
            self._problem = describe(error)

    @property
    def busy(self) -> bool:
        """Whether something is being evaluated, or waits for it; not while the disk takes nothing."""
        if self._problem is not None:
            return False
        return self._process is not None or any((self._run / name).exists() for name in (WANTED, RUNNING))

    def rolled_back(self, to: int) -> None:
        """The run went back to a step: what was said of later ones is void."""
        if not self._active:
            return
        self._due = None
        with contextlib.suppress(OSError):
            append_row(self._run, {"rollback": True, "to": to})
            self._seen = len(read_evaluations(self._run))
            for name in (WANTED, RUNNING):
                request = read_request(self._run / name)
                if request is not None and request["step"] > to:
                    if name == RUNNING:
                        self._end_process()
                    (self._run / name).unlink(missing_ok=True)

    def close(self, *, done: bool) -> None:
        """The run ends: say what is outstanding. Where it is done, the process goes on; else it ends."""
        self.poll()
        if not self._active:
            return
        left = [r["step"] for r in (read_request(self._run / n) for n in (RUNNING, WANTED)) if r is not None]
        if self._process is not None and not done:
            self._end_process()
            self._put_back()
        if not left:
            return
        steps = " and ".join(f"step {step}" for step in left)
        if self._by_job:
            log.info("the evaluation of %s is outstanding: a job of its own", steps)
        elif self._process is not None:
            said = self._run / FOLDER / "log.txt"
            log.info("the evaluation of %s goes on as process %d; %s", steps, self._process.pid, said)
        else:
            log.info("the evaluation of %s is outstanding: the next start takes it up", steps)

    def _report(self) -> None:
        rows = read_evaluations(self._run)
        for row in rows[self._seen :]:
            if "error" in row:
                log.warning("evaluation of step %d failed: %s; training goes on", row["step"], row["error"])
            else:
                log.info("evaluation of step %d: %s", row["step"], _in_words(row.get("tasks", {})))
        self._seen = len(rows)

    def _look_after_process(self) -> None:
        process = self._process
        if process is None:
            return
        late = time.monotonic() - self._started > self._settings.tasks_minutes * 60
        if process.poll() is None and not late:
            return
        request = read_request(self._run / RUNNING)
        if process.poll() is None:
            self._end_process()
            why = f"it took longer than evaluate.tasks_minutes = {self._settings.tasks_minutes:g}"
        else:
            why = f"its process ended with {process.returncode} ({self._run / FOLDER / 'log.txt'})"
        self._process = None
        if request is None and process.returncode:  # it never came to its work
            request = read_request(self._run / WANTED)
            (self._run / WANTED).unlink(missing_ok=True)
        (self._run / RUNNING).unlink(missing_ok=True)
        if request is not None:  # a process that has done its work leaves none
            append_row(self._run, {"step": request["step"], "error": why})
            self._report()

    def _want(self) -> None:
        """Write down the checkpoint that is due, once it is there."""
        if self._due is None:
            return
        name = f"step_{self._due:08d}"
        if not (self._run / "checkpoints" / name).is_dir():
            return
        e, before = self._settings, read_request(self._run / WANTED)
        request = {"step": self._due, "checkpoint": name, "tasks": e.tasks, "data": e.tasks_data}
        request |= {"limit": e.tasks_limit, "tensorboard": self._board}
        if before is not None and before["step"] != self._due:
            log.info("step %d is not evaluated: step %d is newer", before["step"], self._due)
        (self._run / FOLDER).mkdir(exist_ok=True)
        write_json(self._run / WANTED, request)
        self._due = None

    def _start(self) -> None:
        if self._by_job or self._process is not None or not (self._run / WANTED).exists():
            return
        with open(self._run / FOLDER / "log.txt", "ab") as said:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the run, which ends it then
            )
        self._started = time.monotonic()

    def _command(self) -> list[str]:
        found = [sys.executable, "-m", "wm_ds.evaluate", "on-the-way", str(self._run)]
        found += ["--parent", str(os.getpid())]
        return found if self._settings.tasks_inline else ["nice", "-n", "19", *found, "--cpu"]

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _put_back(self) -> None:
        """What a process was working on that is no more, to be taken up again; some times only."""
        request = read_request(self._run / RUNNING)
        with contextlib.suppress(OSError):
            if request is not None and not (self._run / WANTED).exists():
                os.replace(self._run / RUNNING, self._run / WANTED)
            (self._run / RUNNING).unlink(missing_ok=True)


def settle(evaluations: Evaluations, agreement: Agreement, beat: Callable[[], None]) -> None:
    """Wait until nothing is being evaluated (`evaluate.tasks_inline`): on all ranks alike."""
    evaluations.poll()
    while agreement.broadcast(evaluations.busy):
        beat()
        time.sleep(0.2)
        evaluations.poll()


def _in_words(tasks: dict[str, dict[str, float]]) -> str:
    return ", ".join(
        f"{task} {metric} {value:.4g}"
        for task, metrics in tasks.items()
        for metric, value in metrics.items()
        if "stderr" not in metric
    )


def _environment() -> dict[str, str]:
    """Of the evaluating process: no rank's, and with this program on its path."""
    found = {name: value for name, value in os.environ.items() if name not in OF_A_RANK}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, found.get("PYTHONPATH")]))
    return found
