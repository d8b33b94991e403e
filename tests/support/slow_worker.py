"""One rank of a run in which one rank computes slowly; it also asks for a profile on the way."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

SLOW_RANK = 2
SECONDS = 0.4  # a forward


def trainer(arguments: list[str], run_dir: str, env: dict[str, str], log: str) -> None:
    """As `python -m wm_ds.train ARGUMENTS` would be."""
    from tests.support import checkpoint_worker
    from wm_ds.engine.engine import Engine
    from wm_ds.engine.loss import TokenLoss

    forward, step = TokenLoss.forward, Engine.step

    def slow(self: Any, *inputs: Any, **options: Any) -> Any:
        if self.training and os.environ["RANK"] == str(SLOW_RANK):
            time.sleep(SECONDS)
        return forward(self, *inputs, **options)

    def asking(self: Any, *inputs: Any) -> Any:
        if self.steps == 6 and self.world.is_main:
            (Path(run_dir) / "PROFILE").touch()
        return step(self, *inputs)

    TokenLoss.forward, Engine.step = slow, asking
    checkpoint_worker.trainer(arguments, None, env, log)
