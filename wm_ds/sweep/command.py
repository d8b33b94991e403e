"""What `tools/sweep.py` does with sweeps: plan them, run what is not done, collect, print."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wm_ds.distributed.log import duration
from wm_ds.sweep import collect, slurm
from wm_ds.sweep.description import Sweep, SweepError, load
from wm_ds.sweep.measure import is_measured
from wm_ds.sweep.runs import Code, Run, code_version, runs_of
from wm_ds.sweep.task import Task
from wm_ds.sweep.work import alone_in, seconds_of, work


@dataclass
class Opened:
    """A sweep, its runs, and the results that are there."""

    path: str
    sweep: Sweep
    runs: list[Run]
    results: dict[str, Any]

    def collect(self) -> None:
        """Write down what is known."""
        self.results = collect.collect(self.sweep, self.path, self.runs, self.results)

    def tasks(self) -> Iterator[Task]:
        """The runs that the results do not hold."""
        for run in self.runs:
            if collect.known(self.results, run, self.sweep) is None:
                yield Task(run, self.sweep.measure)


def run(options: Any) -> int:
    """The command line's options to an exit code. Raises WmError."""
    if not options.sweeps:
        raise SweepError(
            "no sweep given; configs/sweeps/ has some, and --help says what can be done with one"
        )
    code = code_version()
    opened = [_open(path, options, code) for path in options.sweeps]
    _refuse_shared_results(opened)
    if options.plan:
        print(plan(opened))
        return 0
    tasks = _unique(opened)
    with ExitStack() as held:
        for folder in sorted({Path(one.sweep.runs).resolve() for one in opened}):
            held.enter_context(alone_in(folder))
        if options.slurm:
            return slurm.submit("+".join(Path(one.path).stem for one in opened), tasks, code)
        failed = _work(opened, tasks, code, options)
    for one in opened:
        print(table(one))
    if failed:
        first = failed[0]
        raise SweepError(
            f"{len(failed)} of {len(tasks)} runs are not done; the first: {first.run.arm} seed "
            f"{first.run.seed} {first.state}, {first.problem} (see {first.run.beside('.log')}); the same "
            "command goes on with them"
        )
    return 0


def _open(path: str, options: Any, code: Code) -> Opened:
    sweep = load(path, options.quick)
    runs = runs_of(sweep, path)
    results = collect.previous(sweep, path, replace=options.replace)
    if not options.accept_code:
        collect.check_code(runs, results, sweep, code)
    return Opened(path, sweep, runs, results)


def _work(opened: list[Opened], tasks: list[Task], code: Code, options: Any) -> list[Task]:
    """Train and measure; results are written after every run. Returns what failed."""

    def finished(task: Task) -> None:
        for one in opened:
            if any(run.folder == task.run.folder for run in one.runs):
                one.collect()

    failed = work(tasks, code, jobs=options.jobs, threads=options.threads, finished=finished)
    for one in opened:
        one.collect()
    return failed


def _unique(opened: list[Opened]) -> list[Task]:
    """Tasks of all sweeps, a shared run once: the shorter list of measuring is never enough for the other, so
    sweeps that share runs must measure alike."""
    tasks: dict[Path, Task] = {}
    for one in opened:
        for task in one.tasks():
            before = tasks.setdefault(task.run.folder, task)
            if before.measure != task.measure:
                raise SweepError(
                    f"{one.path}: its arm {task.run.arm} is the same run as {before.run.arm} of another "
                    "sweep, which measures otherwise; give both the same `measure`, or another folder `runs`"
                )
    return list(tasks.values())


def _refuse_shared_results(opened: list[Opened]) -> None:
    seen: dict[str, str] = {}
    for one in opened:
        other = seen.setdefault(one.sweep.results, one.path)
        if other != one.path:
            raise SweepError(f"{other} and {one.path} both write {one.sweep.results}; give one another name")


def plan(opened: list[Opened]) -> str:
    """Every run, its length and work, and how far it is."""
    lines = [f"{'arm':<28}{'seed':>5}{'steps':>8}{'tokens':>14}{'TFLOP':>10}  state"]
    whole = left = seconds = done_flops = 0.0
    folders = set()
    for one in opened:
        lines.append(f"{one.path}: {one.sweep.title}")
        for run in one.runs:
            state = _state(one, run)
            length = f"{run.steps:>8,}{run.tokens:>14,}{run.flops / 1e12:>10.1f}"
            lines.append(f"  {run.arm:<26}{run.seed:>5}{length}  {state}")
            if run.folder in folders:
                continue
            folders.add(run.folder)
            whole += run.flops
            left += 0.0 if state.startswith("done") else run.flops
            took = seconds_of(run.record(), "train")["wall_s"]
            if run.trained and took is not None:
                seconds += took
                done_flops += run.flops
    lines.append(f"{len(folders)} runs, {whole / 1e12:,.0f} TFLOP of training, {left / 1e12:,.0f} of it left")
    if seconds:
        speed = done_flops / seconds
        lines.append(
            f"at the {speed / 1e9:.1f} GFLOP/s of those that are trained, one process needs "
            f"{duration(left / speed)} for what is left, without measuring"
        )
    return "\n".join(lines)


def _state(one: Opened, run: Run) -> str:
    if collect.known(one.results, run, one.sweep) is not None:
        return "done (in the results)"
    if run.trained:
        return "done" if is_measured(run, one.sweep.measure) else "trained, to be measured"
    return f"begun ({run.folder})" if run.folder.exists() else "to be trained"


def table(one: Opened) -> str:
    """The results in a few columns."""
    lines = [
        f"{one.sweep.title} ({one.sweep.results})",
        f"{'arm':<28}{'runs':>6}{'perplexity':>18}{'exact':>10}{'TFLOP':>9}{'cache B/token':>15}{'hours':>8}",
    ]
    for name, arm in one.results["arms"].items():
        s, wanted = arm["summary"], len(arm["seeds"])
        if not arm["runs"]:
            lines.append(f"{name:<28}{'0/' + str(wanted):>6}   not run yet")
            continue
        p, ran = s["perplexity"], f"{len(arm['runs'])}/{wanted}"
        shown = f"{p['mean']:.3f}" + ("" if p["deviation"] is None else f" ± {p['deviation']:.3f}")
        lines.append(
            f"{name:<28}{ran:>6}{shown:>18}{s['exact_perplexity']['mean']:>10.3f}"
            f"{s['training_flops']['mean'] / 1e12:>9.1f}{s['cache_bytes_per_token']['mean']:>15,.0f}"
            f"{(s['wall_s']['mean'] or 0.0) / 3600:>8.2f}"
        )
    return "\n".join(lines)
