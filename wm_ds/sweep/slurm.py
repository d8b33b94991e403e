"""Sweeps as arrays of SLURM jobs: a list of runs, one a line, that slurm/submit.sh takes.

Columns, separated by tabs: configuration, run directory, file of what is measured, settings of the measuring.
Two arrays are submitted over it: training, and for each of its tasks measuring, once that task is trained.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from wm_ds.files import write_atomically
from wm_ds.sweep.description import SweepError
from wm_ds.sweep.runs import Code
from wm_ds.sweep.task import Task
from wm_ds.sweep.work import upcycle_command, write_files

ROOT = Path(__file__).resolve().parents[2]


def submit(name: str, tasks: list[Task], code: Code) -> int:
    """Submit what is not done, with the settings of slurm/env.sh; the exit code.

    `name`: of the list and of the jobs' logs, beside the runs.
    """
    left = [task for task in tasks if task.next() is not None]
    if not left:
        print("nothing is left to run; the same command without --slurm collects the results")
        return 0
    for task in left:
        write_files(task.run, code)
        if task.ready and task.next() == "upcycle" and subprocess.run(upcycle_command(task.run)).returncode:
            raise SweepError(f"{task.run.folder}: its step 0 could not be made; the reason is above")
    later = [task for task in left if not task.ready]
    left = [task for task in left if task.ready]
    if later:
        print(
            f"{len(later)} runs start from others that are not trained: the same command again, once they are"
        )
    if not left:
        return 0
    path = left[0].run.folder.resolve().parent / f"{name}.list"
    write_atomically(path, "".join("\t".join(columns(task)) + "\n" for task in left))
    submitted = subprocess.run(["bash", "slurm/submit.sh", "--list", str(path)], cwd=ROOT)
    if submitted.returncode:
        raise SweepError(f"slurm/submit.sh refused the {len(left)} runs of {path}; its reason is above")
    print(f"{len(left)} runs of {path}; once they are done, the same command without --slurm collects them")
    return 0


def columns(task: Task) -> list[str]:
    """A run's line of the list."""
    run = task.run
    paths = [run.beside(".yaml"), run.folder, run.beside(".measured.json")]
    return [*(str(path.resolve()) for path in paths), json.dumps(task.measure.model_dump())]
