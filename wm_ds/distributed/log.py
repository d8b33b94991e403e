"""What a person sees at the terminal: standard library logging, filtered by rank here and nowhere else.

Every module has `log = logging.getLogger(__name__)`; one that is run by `python -m` writes its name out.
`info` is the run's story and comes from rank 0 alone; `warning` and above come from every rank, which writes
them when they are about itself. Programs call `start`.
"""

from __future__ import annotations

import logging
import math
import os
import sys
from typing import Literal


class _Terminal(logging.Handler):
    """The text alone: `info` to standard output or error, warnings and errors to standard error.

    A terminal that is gone or a pipe that nobody reads any more ends no run: metrics.jsonl has it all.
    """

    def __init__(self, rank: int, story: Literal["stdout", "stderr"]) -> None:
        super().__init__(logging.INFO)
        self.rank, self.story = rank, story

    def emit(self, record: logging.LogRecord) -> None:
        if self.rank and record.levelno < logging.WARNING:
            return
        # Looked up at every line: a progress bar puts its own stream there while it stands.
        stream = getattr(sys, self.story if record.levelno < logging.WARNING else "stderr")
        try:
            stream.write(record.getMessage() + "\n")
            stream.flush()
        except OSError:
            pass


def start(story: Literal["stdout", "stderr"] = "stdout") -> None:
    """Show what wm_ds logs, from now on; again: with other settings.

    The rank is RANK of the environment, 0 without it. `story`: where rank 0's `info` goes; standard error in
    programs whose result is what they print.
    """
    logger = logging.getLogger("wm_ds")
    for handler in [h for h in logger.handlers if isinstance(h, _Terminal)]:
        logger.removeHandler(handler)
    rank = os.environ.get("RANK", "0")
    logger.addHandler(_Terminal(int(rank) if rank.isdecimal() else 0, story))
    logger.setLevel(logging.INFO)


def duration(seconds: float) -> str:
    """`3d 04h`, `2h 07m`, `5m 12s`, `9s`."""
    if not math.isfinite(seconds):
        return "?"
    s = max(0, round(seconds))
    if s >= 86400:
        return f"{s // 86400}d {s % 86400 // 3600:02d}h"
    if s >= 3600:
        return f"{s // 3600}h {s % 3600 // 60:02d}m"
    return f"{s // 60}m {s % 60:02d}s" if s >= 60 else f"{s}s"
