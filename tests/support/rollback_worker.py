"""One rank of a run whose data has a bad stretch: in some batches of the order every label is one odd token.

Killed, if asked to, when it comes to a certain function for the first time.
"""

from __future__ import annotations

import os
import signal
from typing import Any

ODD = 3  # a byte that the corpus does not hold


def trainer(arguments: list[str], bad: list[int], kill_at: str | None, env: dict, log: str) -> None:
    """As `python -m wm_ds.train ARGUMENTS` would be; `bad`: numbers in the order; `kill_at`: see KILLS."""
    from tests.support import checkpoint_worker
    from wm_ds.data.loader import StagedBatches
    from wm_ds.engine import engine

    engine.SPIKE_WARMUP = 6
    original = StagedBatches.batch

    def batch(self: Any, b: int, *arguments: Any, **options: Any) -> Any:
        found = original(self, b, *arguments, **options)
        if self.left_out.batch(b + 1) in bad:
            for part in found:
                part["labels"][part["labels"] >= 0] = ODD
        return found

    StagedBatches.batch = batch
    if kill_at is not None:
        owner, name = KILLS[kill_at]()
        setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    checkpoint_worker.trainer(arguments, None, env, log)


def _rollback() -> Any:
    from wm_ds import rollback

    return rollback


def _metrics() -> Any:
    from wm_ds.metrics import Metrics

    return Metrics


KILLS = {
    "before anything is done": lambda: (_rollback(), "go_back"),
    "before it is written down": lambda: (_rollback().directory, "amend"),
    "before the first step": lambda: (_metrics(), "rolled_back"),
}
