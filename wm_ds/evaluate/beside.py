"""Evaluating a run's checkpoints while it trains: what `python -m wm_ds.evaluate on-the-way RUN` does.

It works through what the trainer wants (run/evaluations.py), newest first, one at a time, and ends when
there is nothing more. Scores become rows of RUN/evaluations.jsonl and points of TensorBoard at the
checkpoint's step, in RUN/tensorboard/evaluations, a folder of their own: TensorBoard stops reading a file
once there is a newer one beside it. What goes wrong with a checkpoint is a row, too.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

from wm_ds.distributed.process_group import World
from wm_ds.errors import WmError, one_line
from wm_ds.evaluate import harness, tasks
from wm_ds.files import write_json
from wm_ds.run.evaluations_file import FOLDER, RUNNING, WANTED, append_row, read_evaluations, read_request

log = logging.getLogger(__name__)
TRIES = 2  # of one checkpoint, where the evaluating process was killed
ENDED = 143  # as if by SIGTERM


def check(names: list[str], data: Path | None) -> None:
    """Raise HarnessError where a task is not known, or has no local data."""
    for name in harness.find_tasks(names):
        if data is not None:
            harness.local_files(name, data)


def work(run_dir: Path, world: World, parent: int | None = None) -> None:
    """Evaluate what is wanted of the run until nothing is; what fails is a row.

    parent: the trainer's process. Where it ends and the run is not done, so does this one.
    """
    folder = run_dir / FOLDER
    folder.mkdir(exist_ok=True)
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent, run_dir), daemon=True).start()
    with open(folder / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("%s: another process evaluates it", run_dir)
            return
        while (request := _take(run_dir)) is not None:
            row = _evaluated(run_dir, request, world)
            append_row(run_dir, row)
            (run_dir / RUNNING).unlink(missing_ok=True)
            log.info("step %d: %s", row["step"], row.get("error") or row["tasks"])


def _take(run_dir: Path) -> dict[str, Any] | None:
    """The next request, from now on the running one. One whose process was killed is taken up again."""
    request = read_request(run_dir / RUNNING)
    if request is None:
        try:
            os.replace(run_dir / WANTED, run_dir / RUNNING)
        except FileNotFoundError:
            return None
        request = read_request(run_dir / RUNNING)
        if request is None:
            return None
    tries = int(request.get("tries", 0)) + 1
    write_json(run_dir / RUNNING, request | {"tries": tries})
    return request | {"tries": tries}


def _evaluated(run_dir: Path, request: dict[str, Any], world: World) -> dict[str, Any]:
    """The row of a request."""
    began, step = time.monotonic(), request["step"]
    row: dict[str, Any] = {"step": step}
    if request["tries"] > TRIES:
        return row | {"error": f"the evaluating process was ended {TRIES} times at it"}
    done = [known for known in read_evaluations(run_dir) if known["step"] == step and "tasks" in known]
    if done:
        return done[0]
    data = None if request["data"] is None else Path(request["data"])
    try:
        question = tasks.Question(run_dir, request["tasks"], step=step, data=data, limit=request["limit"])
        report, _ = tasks.evaluate(question, world)
    except (WmError, OSError) as error:
        gone = not (run_dir / "checkpoints" / request["checkpoint"]).is_dir()
        said = "the checkpoint was removed before it was read" if gone else one_line(str(error))
        return row | {"error": said}
    except Exception as error:  # of a library, or memory: a row says so, and the next one may succeed
        return row | {"error": f"{type(error).__name__}: {one_line(str(error))}"}
    row |= {"tasks": report["results"], "checkpoint": request["checkpoint"]}
    row["seconds"] = round(time.monotonic() - began, 1)
    if report["errors"]:
        failures = [f"{name}: {said}" for name, said in report["errors"].items()]
        row |= {"failed": report["errors"]} if report["results"] else {"error": "; ".join(failures)}
    if request["tensorboard"] and report["results"]:
        _to_tensorboard(run_dir, step, report["results"])
    return row


def _to_tensorboard(run_dir: Path, step: int, results: dict[str, dict[str, float]]) -> None:
    from torch.utils.tensorboard import SummaryWriter

    try:
        with SummaryWriter(str(run_dir / "tensorboard" / "evaluations")) as board:
            for task, metrics in results.items():
                for metric, value in metrics.items():
                    board.add_scalar(f"tasks/{task}/{metric}", value, step)
    except Exception as error:  # optional, the row is not
        log.warning("no TensorBoard: %s", one_line(str(error)))


def _end_with(parent: int, run_dir: Path) -> None:
    """End this process where the trainer has, unless it was done: the next start takes the request up."""
    while True:
        time.sleep(1.0)
        if os.getppid() != parent and not (run_dir / "done").exists():
            os._exit(ENDED)
