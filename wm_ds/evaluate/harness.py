"""Downstream tasks with EleutherAI's lm-evaluation-harness, used as a library.

The tasks, prompts and metrics are the harness's own; what is ours is the model behind them (scheduled_lm.py).
With `data` the same tasks read local files, not the Hub:

    DIR/TASK/SPLIT.jsonl    TASK as the harness names it, SPLIT "test" or "validation", one record a line with
                            the columns of the Hub's data set; lambada/ and wikitext2/ are found as well, and
                            any *.jsonl whose name holds the split's

Requests longer than the model's rows (W tokens) follow one rule, see `ScheduledLM`: what is to be scored or
answered stays, what stands before it loses tokens on its left, and every request that was cut is counted.
"""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from lm_eval import evaluate
from lm_eval.tasks import TaskManager

from wm_ds.errors import WmError
from wm_ds.evaluate.scheduled_lm import ScheduledLM

# The paper's suite (§4.3) and the split that each task is scored on.
PAPER = {
    "lambada_openai": "test",
    "wikitext": "test",
    "piqa": "validation",
    "hellaswag": "validation",
    "arc_easy": "test",
    "arc_challenge": "test",
    "openbookqa": "test",
    "winogrande": "validation",
    "boolq": "validation",
}
FOLDERS = {"lambada_openai": "lambada", "wikitext": "wikitext2"}
SEEDS = (0, 1234, 1234)  # of random, NumPy and torch, as the harness's own command sets them


class HarnessError(WmError, ValueError):
    """A task or its local data cannot be used; the message is one line."""


@cache
def manager() -> TaskManager:
    """The harness's index of tasks; reading it takes seconds."""
    return TaskManager()


def find_tasks(names: list[str]) -> list[str]:
    """Task names, "paper" standing for the paper's suite. Raises HarnessError for unknown ones."""
    wanted = [task for name in names for task in (PAPER if name == "paper" else [name])]
    for name in wanted:
        if name not in manager().task_index:
            raise HarnessError(f"lm-evaluation-harness has no task {name!r}")
    return list(dict.fromkeys(wanted))


def local_files(name: str, data: Path) -> dict[str, str]:
    """Split -> file of a task's local data. Raises HarnessError where there is none or can be none."""
    entry = manager().task_index[name]
    kind = entry.kind.name
    if kind in ("GROUP", "TAG"):
        raise HarnessError(f"{name} is the name of several tasks; with local data, name the tasks themselves")
    if kind != "TASK" or entry.yaml_path is None:
        raise HarnessError(f"task {name} is a program and cannot be given local data; run it without --data")
    split = PAPER.get(name)
    folders = [folder for folder in (data / name, data / FOLDERS.get(name, name)) if folder.is_dir()]
    if not folders:
        raise HarnessError(f"no local data for task {name}: {data / name} does not exist")
    files: dict[str, str] = {}
    for wanted in [split] if split else ["train", "validation", "test"]:
        found = sorted(folders[0].glob(f"*{wanted}*.jsonl"), key=lambda p: (p.stem != wanted, p.name))
        if found:
            files[wanted] = str(found[0].resolve())
    if not files:
        raise HarnessError(f"no local data for task {name}: {folders[0]} holds no {split or 'SPLIT'}.jsonl")
    return files


def local_task(name: str, data: Path, folder: Path) -> str:
    """A task file in `folder` that is the stock task but for the place of its data; returns its path."""
    files, stock = local_files(name, data), manager().task_index[name].yaml_path
    assert stock is not None  # local_files takes tasks that are written in YAML
    task: dict[str, Any] = {
        "include": str(Path(stock).resolve()),
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "num_fewshot": 0,
    }
    task["dataset_kwargs"] = {"data_files": files}
    for key, split in (("training", "train"), ("validation", "validation"), ("test", "test")):
        task[f"{key}_split"] = split if split in files else None
    task["fewshot_split"] = None
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(task))  # JSON is YAML
    return str(path)


@dataclass
class Scores:
    """What the tasks gave: each part is by task.

    `results` has metric -> value; a metric behind a filter of the task is called METRIC,FILTER as in the
    harness. `cuts` has, for tasks with requests longer than the rows, what was done -> number of requests.
    `errors` has the message of every task that failed.
    """

    results: dict[str, dict[str, float]] = field(default_factory=dict)
    cuts: dict[str, dict[str, int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def run(lm: ScheduledLM, tasks: list[str], *, data: Path | None = None, limit: int | None = None) -> Scores:
    """Zero-shot scores, one task after another: one that fails does not end the others.

    Raises HarnessError where a task's data cannot be opened, before the first request runs.
    """
    scores = Scores()
    with tempfile.TemporaryDirectory() as scratch:
        entries = [name if data is None else local_task(name, data, Path(scratch)) for name in tasks]
        opened = [open_task(name, entry) for name, entry in zip(tasks, entries)]
        for name, task in zip(tasks, opened):
            random.seed(SEEDS[0])
            numpy.random.seed(SEEDS[1])
            torch.manual_seed(SEEDS[2])
            lm.cuts.clear()
            try:
                # Not simple_evaluate, which besides describes the machine and asks git about the folder.
                found = evaluate(lm, task, limit=limit, bootstrap_iters=0, log_samples=False)
                scores.results |= numbers(name, {**found["results"], **found.get("groups", {})})
            except Exception as error:  # a library's, about any part of the task's records
                scores.errors[name] = one_line(error)
            scores.cuts |= {name: dict(+lm.cuts)} if +lm.cuts else {}
    return scores


def open_task(name: str, entry: str) -> Any:
    """The task with its data, without examples in its prompts. Raises HarnessError."""
    try:
        found = manager().load(entry)
    except Exception as error:  # datasets, the Hub, the task's own code
        raise HarnessError(f"task {name} cannot be opened: {one_line(error)}") from error
    for task in found["tasks"].values():
        task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEEDS[1])
    return found


def numbers(name: str, found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Task -> metric -> value of the harness's results. Raises HarnessError where a task has no number."""
    results = {
        task: {
            key.removesuffix(",none"): float(value)
            for key, value in metrics.items()
            if "," in key and isinstance(value, int | float)
        }
        for task, metrics in found.items()
    }
    if not any(results.values()):
        raise HarnessError(f"the harness gave no number for {name}")
    return {task: metrics for task, metrics in results.items() if metrics}


def one_line(error: BaseException) -> str:
    """The kind of an exception and the first lines of its text and of its causes' texts."""
    said: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        said += str(cause).strip().splitlines()[:1]
        cause = cause.__cause__
    return ": ".join([type(error).__name__, *dict.fromkeys(said)])


def table(scores: Scores) -> str:
    """One line a metric, then one for each way in which requests did not fit."""
    lines = [f"{'task':<18}{'metric':<32}{'value':>10}"]
    for name, metrics in scores.results.items():
        lines += [f"{name:<18}{key:<32}{value:>10.4f}" for key, value in metrics.items()]
    for name, cuts in scores.cuts.items():
        lines += [f"{name}: {count:,} request{'s' * (count > 1)} {what}" for what, count in cuts.items()]
    return "\n".join(lines)
