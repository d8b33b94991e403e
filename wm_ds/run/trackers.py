"""Servers elsewhere that draw a run's curves: Weights & Biases and MLflow. Both are optional packages.

Whatever these libraries raise, and however long their servers are silent: they cost a line on the terminal
and the curves there, never the run. An attempt goes on in the remote run that the first one began; which one
that is stands in the run directory.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from wm_ds.config.schema import Config, ConfigError
from wm_ds.errors import WmError, describe, one_line
from wm_ds.files import write_atomically

log = logging.getLogger(__name__)
SECONDS = 20  # for a server to answer


class _RecordError(WmError):
    """The note of the remote run cannot be read or written."""


@dataclass(frozen=True)
class Tracker:
    """A run at a server: its name for people, and what is called there."""

    name: str
    log: Callable[[dict[str, float], int], object]
    finish: Callable[[], object]

    def tell(self, values: dict[str, float], step: int) -> bool:
        """Send a step's numbers; False, and one line that says why, where the server is given up."""
        problem = bounded(lambda: self.log(values, step))[1]
        if problem is not None:
            log.warning("step %d: no more %s: %s", step, self.name, problem)
        return problem is None

    def close(self) -> None:
        """End the remote run."""
        problem = bounded(self.finish)[1]
        if problem is not None:
            log.warning("%s got no proper end: %s", self.name, problem)


def check(config: Config) -> None:
    """Raise ConfigError where a configured package is not installed; on every rank, before ranks meet."""
    for package, said, install in (
        ("wandb", config.log.wandb, "wandb"),
        ("mlflow", config.log.mlflow, "mlflow-skinny"),
    ):
        if said:
            try:
                __import__(package)
            except ImportError:
                raise ConfigError(
                    f"log.{package} = {said!r} but the package {package} is not installed: "
                    f"pip install {install}, or leave log.{package} out"
                ) from None


def open_trackers(config: Config) -> list[Tracker]:
    """Those that the run names and that answer."""
    folder, found = Path(config.run.dir), []
    for name, project, begin, hint in (
        (
            "Weights & Biases",
            config.log.wandb,
            _begin_wandb,
            "`wandb login` sets a key, WANDB_MODE=offline keeps it on this machine",
        ),
        (
            "MLflow",
            config.log.mlflow,
            _begin_mlflow,
            "MLFLOW_TRACKING_URI names the server, or a folder on this machine",
        ),
    ):
        if not project:
            continue
        tracker, problem = bounded(lambda: begin(project, folder))  # noqa: B023 (called at once)
        if problem is None:
            found.append(tracker)
        else:
            log.warning("no %s in this attempt: %s (training goes on; %s)", name, problem, hint)
    return found


def _begin_wandb(project: str, folder: Path) -> Tracker:
    """Its id is made once, so that runs whose folders have the same name are told apart."""
    import wandb

    run = wandb.init(
        project=project,
        name=folder.name,
        id=_recorded(folder / "wandb_id", lambda: secrets.token_hex(8)),
        resume="allow",
        dir=str(folder),
        settings=wandb.Settings(init_timeout=SECONDS, login_timeout=SECONDS),
    )
    return Tracker("Weights & Biases", lambda values, step: run.log(values, step=step), run.finish)


def _begin_mlflow(experiment: str, folder: Path) -> Tracker:
    """The server is the one that MLFLOW_TRACKING_URI names; it gives the run its id."""
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client = MlflowClient()

    def begin() -> str:
        there = client.get_experiment_by_name(experiment)
        number = client.create_experiment(experiment) if there is None else there.experiment_id
        return client.create_run(number, run_name=folder.name).info.run_id

    run = _recorded(folder / "mlflow_run", begin)
    client.update_run(run, status="RUNNING")

    def tell(values: dict[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        client.log_batch(run, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    return Tracker("MLflow", tell, lambda: client.set_terminated(run))


def _recorded(path: Path, make: Callable[[], str]) -> str:
    """What stands in the note, made where there is none."""
    try:
        if not path.exists():
            write_atomically(path, make() + "\n")
        return path.read_text().strip()
    except OSError as error:
        raise _RecordError(describe(error)) from None
    except UnicodeDecodeError:
        raise _RecordError(f"{path} is damaged; remove it") from None


def bounded(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `call` returns, or why there is nothing; given up after SECONDS."""
    answer: list[tuple[Any, str | None]] = []

    def work() -> None:
        try:
            answer.append((call(), None))
        except BaseException as error:  # SystemExit, too, is no reason to end a run
            answer.append((None, one_line(str(error)) or type(error).__name__))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return answer[0] if answer else (None, f"no answer within {SECONDS} s")


def end(code: int) -> NoReturn:
    """End the process with exit code `code`, also where the libraries' own hooks wait for an answer for ever.

    Threads that are not daemons are waited for as always; the hooks that follow have SECONDS.
    """
    if {"wandb", "mlflow"} & sys.modules.keys():
        leaving = threading.Event()

        def last() -> None:
            leaving.wait()
            time.sleep(SECONDS)
            os._exit(code)

        # Started here: no thread begins any more once hooks run; ours, the newest, runs before theirs.
        threading.Thread(target=last, daemon=True).start()
        atexit.register(leaving.set)
    sys.exit(code)
