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
    """waiting, upcycling, training, measuring, done, stopped, failed."""
    problem: str | None = None

    @property
    def ready(self) -> bool:
        """Whether the run that it starts from, if any, is trained."""
        origin = self.run.origin
        return origin is None or origin.trained or self.run.begun

    def next(self) -> str | None:
        """What comes next: "upcycle", "train", "measure", or nothing."""
        if not self.run.trained:
            return "train" if self.run.begun else "upcycle"
        return None if is_measured(self.run, self.measure) else "measure"
