"""When to stop: a signal to any one rank, a STOP file, or the wall clock, agreed by all ranks at one step.

A rank that leaves the loop alone leaves the others in a collective for ever, so nobody acts on what it has
noticed by itself. Each rank notes it as a number, one all-reduce takes the largest, and all act on that.
"""

import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

from wm_ds.distributed.host_group import Agreement

# In order of precedence: when ranks noticed different things in the same step, the last one counts.
REASONS = ("", "STOP file", "time limit", "SIGUSR1", "SIGTERM", "save failed")
STOP_FILE = "STOP"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_FILE_CHECK_INTERVAL_S = 1.0  # a stat on a busy network file system may take milliseconds


class Stopping:
    """Notices reasons to stop on this rank and agrees on them with all others.

    `time_limit_s` counts from `started` (seconds of `time.monotonic()`, default: now); choose it smaller than
    the job's limit by the time that a save takes. Signal handlers are installed by `install()` only, on the
    main thread, and only take a note.
    """

    def __init__(
        self,
        run_dir: str | Path,
        agreement: Agreement,
        *,
        time_limit_s: float | None = None,
        started: float | None = None,
    ) -> None:
        if time_limit_s is not None and time_limit_s <= 0:
            raise ValueError(
                f"time_limit_s is {time_limit_s}, must be above 0 seconds (leave it out for no limit)"
            )
        self._agreement = agreement
        self._stop_file = Path(run_dir) / STOP_FILE
        started = time.monotonic() if started is None else started
        self._deadline = None if time_limit_s is None else started + time_limit_s
        self._signal_code = 0
        self._next_file_check = 0.0
        self._stop_file_seen = False

    def install(self, signals: Iterable[signal.Signals] = SIGNALS) -> None:
        """Note these signals instead of dying from them."""
        for number in signals:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal_code = max(self._signal_code, REASONS.index(signal.Signals(number).name))

    def check(self, *, save_failed: bool = False) -> str | None:
        """The agreed reason to stop, or None; the same on all ranks. Call on all of them after every step.

        `save_failed` takes this rank's failed background save along, so that all ranks end at the same step.
        """
        code = self._agreement.maximum(self._local_code(save_failed))
        return REASONS[code] or None

    def _local_code(self, save_failed: bool) -> int:
        if save_failed:
            return REASONS.index("save failed")
        if self._signal_code:
            return self._signal_code
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            return REASONS.index("time limit")
        if self._agreement.rank == 0 and not self._stop_file_seen and now >= self._next_file_check:
            self._next_file_check = now + _FILE_CHECK_INTERVAL_S
            self._stop_file_seen = self._stop_file.exists()
        return REASONS.index("STOP file") if self._stop_file_seen else 0


def write_marker(run_dir: str | Path, marker: str, content: dict) -> None:
    """Publish RUN_DIR/`marker` (`stopped` or `done`) by rename, with JSON content. Rank 0, after the save."""
    path = Path(run_dir) / marker
    part = path.with_name(f".{marker}.{os.getpid()}")
    part.write_text(json.dumps(content) + "\n")
    os.replace(part, path)


def clear_markers(run_dir: str | Path) -> None:
    """Remove the markers of an earlier attempt, so that this attempt's end is not mistaken. Rank 0 only."""
    for marker in ("stopped", "done"):
        (Path(run_dir) / marker).unlink(missing_ok=True)
