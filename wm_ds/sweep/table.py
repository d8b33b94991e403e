"""What a person sees of sweeps at work: one live table on a terminal, quiet lines elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from wm_ds.distributed.log import duration
from wm_ds.run.metrics_file import tail
from wm_ds.sweep.task import Task

DRAW_S = 2.0
LINE_S = 300.0  # between lines of progress where there is no terminal


class Table:
    """Use as a context. Nothing that it shows is kept; all of it is read from the disk."""

    def __init__(self, tasks: list[Task]) -> None:
        self._tasks = tasks
        self._live: Any = None
        self._drawn, self._lined, self._began = 0.0, time.monotonic(), time.monotonic()

    def __enter__(self) -> Table:
        if sys.stdout.isatty():
            from rich.live import Live

            self._live = Live(self._render(), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
            self._live.stop()

    def say(self, task: Task) -> None:
        """A task has come into another state."""
        run = task.run
        text = f"{run.arm} seed {run.seed}: {task.state}"
        if task.state == "training":
            text += f", {run.steps} steps, {run.flops / 1e12:.1f} TFLOP ({run.folder})"
        if task.problem:
            text += f"; {task.problem}; see {run.beside('.log')}"
        if self._live is None or task.problem:
            self.note(text)

    def note(self, text: str) -> None:
        """A line that stays."""
        if self._live is None:
            print(text, flush=True)
        else:
            self._live.console.print(text, markup=False, highlight=False)

    def draw(self) -> None:
        """Show where everything is, if it is time to."""
        now = time.monotonic()
        if self._live is not None and now - self._drawn >= DRAW_S:
            self._drawn = now
            self._live.update(self._render(), refresh=True)
        elif self._live is None and now - self._lined >= LINE_S:
            self._lined = now
            for task in self._tasks:
                if task.state == "training":
                    step, loss, eta = progress(task.run.folder, task.run.steps)
                    shown = "" if loss is None else f", loss {loss:.3f}, ETA {eta}"
                    self.note(f"{task.run.arm} seed {task.run.seed}: step {step} of {task.run.steps}{shown}")
            self.note(self._summary())

    def _summary(self) -> str:
        done = sum(task.run.flops for task in self._tasks if task.state == "done")
        whole = sum(task.run.flops for task in self._tasks)
        count = sum(task.state == "done" for task in self._tasks)
        return (
            f"{count} of {len(self._tasks)} runs done, {done / max(whole, 1):.0%} of the FLOPs; "
            f"{duration(time.monotonic() - self._began)} so far"
        )

    def _render(self) -> Any:
        from rich.table import Table as RichTable

        table = RichTable("arm", "seed", "state", "step", "loss", "ETA", caption=self._summary())
        shown = [task for task in self._tasks if task.state not in ("waiting", "done")]
        waiting = [task for task in self._tasks if task.state == "waiting"]
        for task in shown + waiting[: max(0, 12 - len(shown))]:
            step, loss, eta = progress(task.run.folder, task.run.steps)
            cells = [f"{step}/{task.run.steps}" if step else f"-/{task.run.steps}"]
            cells += ["" if loss is None else f"{loss:.3f}", eta if task.state == "training" else ""]
            table.add_row(task.run.arm, str(task.run.seed), task.state, *cells)
        more = len(waiting) - max(0, 12 - len(shown))
        if more > 0:
            table.add_row(f"… {more} more", "", "waiting", "", "", "")
        return table


def progress(folder: Path, steps: int) -> tuple[int, float | None, str]:
    """A run's last step, its loss there, and how long it still takes at the speed of its last steps."""
    rows = [row for row in tail(folder / "metrics.jsonl") if "loss" in row]
    if not rows:
        return 0, None, "?"
    last = rows[-1]
    times = [row["step_s"] for row in rows[-20:] if "step_s" in row]
    loss = last["loss"] if isinstance(last["loss"], int | float) else None
    left = (steps - last["step"]) * sum(times) / len(times) if times else float("nan")
    return last["step"], loss, duration(left)
