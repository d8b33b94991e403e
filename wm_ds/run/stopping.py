"""When to stop: a signal to any one rank, a STOP file, or the wall clock, agreed by all ranks at one step.

A rank that leaves the loop alone leaves the others in a collective for ever, so nobody acts on what it has
noticed by itself. Each rank notes it as a number, one all-reduce takes the largest, and all act on that.
"""

import contextlib
import errno
import os
import signal
import termios
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from wm_ds.distributed.host_group import Agreement
from wm_ds.files import write_json

# In order of precedence: when ranks noticed different things in the same step, the last one counts.
REASONS = ("", "STOP file", "time limit", "SIGUSR1", "SIGHUP", "SIGINT", "SIGTERM", "save failed")
STOP_FILE = "STOP"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
# One press, two signals: torchrun passes on the Ctrl-C that its ranks have had from the terminal already.
SAME_KEY_S = 1.0
_FILE_CHECK_INTERVAL_S = 1.0  # a stat on a busy network file system may take milliseconds


class Signals:
    """Notes the signals that ask this process to stop, from `install()` on, instead of dying from them.

    A second Ctrl-C ends the process at once; any other signal may come as often as it likes (SLURM and the
    batch script repeat theirs). `speaks`: say so at the first Ctrl-C; one rank at a terminal is enough.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        self.code = 0
        """Of the weightiest one so far, an index of REASONS; 0: none."""
        self._speaks = speaks
        self._pressed: float | None = None
        self._before: dict[int, Any] = {}

    def install(self, signals: Iterable[signal.Signals] = SIGNALS) -> "Signals":
        """Handle them from now on; on the main thread.

        A hang-up or Ctrl-C that was ignored before stays ignored: that is what nohup and `&` do.
        """
        for number in signals:
            kept = number in (signal.SIGHUP, signal.SIGINT) and signal.getsignal(number) is signal.SIG_IGN
            if not kept:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def restore(self) -> None:
        """Handle them as before `install`."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.code = max(self.code, REASONS.index(signal.Signals(number).name))
        if number == signal.SIGHUP:
            _leave_lost_terminal()
        if number != signal.SIGINT:
            return
        now = time.monotonic()
        if self._pressed is None:
            self._pressed = now
            self._say(
                "Ctrl-C: the run saves and stops after this step; once more ends it at once, without saving"
            )
        elif now - self._pressed > SAME_KEY_S:
            self._say("Ctrl-C again: ended at once; the run goes on from its last checkpoint")
            os._exit(128 + number)

    def _say(self, text: str) -> None:
        if self._speaks:
            # Not through Python's buffers: the signal may have come while one was being written.
            with contextlib.suppress(OSError):
                os.write(2, f"\n{text}\n".encode())


def _leave_lost_terminal() -> None:
    """Write to nowhere in place of a terminal that hung up.

    Else the next line of whoever prints one is an error, and ends the run before it has saved.
    """
    for descriptor in (0, 1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


class Stopping:
    """Notices reasons to stop on this rank and agrees on them with all others.

    `time_limit_s` counts from `started` (seconds of `time.monotonic()`, default: now); choose it smaller than
    the job's limit by the time that a save takes. `signals` have been noted since the process began; without
    them, from `install()` on, on the main thread.
    """

    def __init__(
        self,
        run_dir: str | Path,
        agreement: Agreement,
        *,
        time_limit_s: float | None = None,
        started: float | None = None,
        signals: Signals | None = None,
    ) -> None:
        if time_limit_s is not None and time_limit_s <= 0:
            raise ValueError(
                f"time_limit_s is {time_limit_s}, must be above 0 seconds (leave it out for no limit)"
            )
        self._agreement = agreement
        self._stop_file = Path(run_dir) / STOP_FILE
        started = time.monotonic() if started is None else started
        self._deadline = None if time_limit_s is None else started + time_limit_s
        self._signals = signals or Signals()
        self._next_file_check = 0.0
        self._stop_file_seen = False

    def install(self, signals: Iterable[signal.Signals] = SIGNALS) -> None:
        """Note these signals instead of dying from them."""
        self._signals.install(signals)

    def before_the_first_step(self) -> str | None:
        """The signal that any rank has had by now, or None; the same on all ranks.

        A limit or a STOP file counts from the first step on, so that every start takes one.
        """
        return REASONS[self._agreement.maximum(self._signals.code)] or None

    def check(self, *, save_failed: bool = False) -> str | None:
        """The agreed reason to stop, or None; the same on all ranks. Call on all of them after every step.

        `save_failed` takes this rank's failed background save along, so that all ranks end at the same step.
        """
        code = self._agreement.maximum(self._local_code(save_failed))
        return REASONS[code] or None

    def _local_code(self, save_failed: bool) -> int:
        if save_failed:
            return REASONS.index("save failed")
        if self._signals.code:
            return self._signals.code
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            return REASONS.index("time limit")
        if self._agreement.rank == 0 and not self._stop_file_seen and now >= self._next_file_check:
            self._next_file_check = now + _FILE_CHECK_INTERVAL_S
            self._stop_file_seen = self._stop_file.exists()
        return REASONS.index("STOP file") if self._stop_file_seen else 0


def write_marker(run_dir: str | Path, marker: str, content: dict) -> None:
    """Publish RUN_DIR/`marker` (`stopped` or `done`) by rename, with JSON content. Rank 0, after the save."""
    write_json(Path(run_dir) / marker, content)


def clear_markers(run_dir: str | Path) -> None:
    """Remove the markers of an earlier attempt, so that this attempt's end is not mistaken. Rank 0 only."""
    for marker in ("stopped", "done"):
        (Path(run_dir) / marker).unlink(missing_ok=True)
