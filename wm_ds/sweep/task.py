"""A run of a sweep and how far it is."""

from __future__ import annotations

from dataclasses import dataclass

from wm_ds.sweep.description import Measure
from wm_ds.sweep.measure import is_measured
from wm_ds.sweep.runs import Run


@dataclass
class Task:
    """A run and what is still to be done with it."""

    run: Run
    measure: Measure
    state: str = "waiting"
    """waiting, training, measuring, done, stopped, failed."""
    problem: str | None = None

    def next(self) -> str | None:
        """What comes next: "train", "measure", or nothing."""
        if not self.run.trained:
            return "train"
        return None if is_measured(self.run, self.measure) else "measure"
