"""The watchdog of a rank: ends it when the run hangs, fails, or has been taken over, and says why.

A rank that waits for another in a collective waits for ever, or for the library's half an hour, and then dies
with a message about the collective. The stacks of all ranks are what tells why, so:

- the loop calls `beat(step)`; without a beat for `timeout_s` a rank asks all ranks for their stacks, all
  write them to their own logs within seconds, and the run ends with exit code 71;
- an exception that nobody catches is noted as the attempt's first failure before anything is torn down, and
  the process ends at once: clean-up code of a broken run may itself wait for the other ranks;
- a rank that still waits some seconds after another one has failed ends too: on GPUs nothing else wakes it;
- a rank whose attempt has been superseded ends with exit code 70;
- SIGUSR2 dumps this rank's stacks and the run goes on.

One thread does all that. A C thread of faulthandler stands behind it for the case that a library hangs while
it holds Python's lock.
"""

import contextlib
import errno
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import TracebackType

from wm_ds.distributed import environment
from wm_ds.errors import WmError, describe, one_line
from wm_ds.run.claim import Attempt, SupersededError
from wm_ds.run.exit_codes import EXIT_HUNG, EXIT_SUPERSEDED

log = logging.getLogger(__name__)
DEFAULT_TIMEOUT_S = 1200.0  # less than the collectives' own timeout (run.timeout_minutes), which says less
FAILURE_GRACE_S = 10.0
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)
NOTE_DELAY_S = 3.0  # longer than rank.sh waits


def configured_timeout_s() -> float:
    """Seconds without progress after which a run counts as hung: WM_HANG_TIMEOUT, else twenty minutes."""
    return environment.seconds("WM_HANG_TIMEOUT", DEFAULT_TIMEOUT_S)


class Watchdog:
    """Watches this process from a thread, from `start()` to `stop()`.

    `poll_s` seconds pass at most until a rank notices another's hang or a newer attempt.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        rank: int = 0,
        local_rank: int = 0,
        world: int = 1,
        timeout_s: float | None = None,
        poll_s: float | None = None,
    ) -> None:
        self.attempt, self.rank, self.world = attempt, rank, world
        self.timeout_s = configured_timeout_s() if timeout_s is None else timeout_s
        if self.timeout_s <= 0:
            raise ValueError(f"the hang timeout is {self.timeout_s} s, must be above 0")
        self.poll_s = min(5.0, self.timeout_s / 5) if poll_s is None else poll_s
        self.step: int | None = None
        self._touches = local_rank == 0  # one rank per node is enough to say that the attempt lives
        self._beat = time.monotonic()
        self._armed = 0.0
        self._failure_seen: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._progress: int | None = None

    def start(self) -> "Watchdog":
        """Begin to watch. On the main thread, before the process group exists: its set-up may hang too."""
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR2, all_threads=True)
        path = os.environ.get("WM_PROGRESS_FILE")
        if path:  # node-local memory that outlives a SIGKILL of this process; rank.sh reads it
            self._progress = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
        sys.excepthook = self._on_exception
        self.beat()
        if self._touches:
            self.attempt.touch()
        self._thread.start()
        return self

    def beat(self, step: int | None = None) -> None:
        """The main thread lives; `step` is the one it now works on. Cheap: call it for every batch."""
        self._beat = now = time.monotonic()
        if step is not None and step != self.step:
            self.step = step
            if self._progress is not None:
                with contextlib.suppress(OSError):  # the node's memory is full: only this note is lost
                    os.pwrite(self._progress, f"{step:<20d}\n".encode(), 0)
        if now - self._armed > self.timeout_s / 10:
            self._armed = now
            faulthandler.dump_traceback_later(self.timeout_s + 2 * self.poll_s, exit=True)

    def stop(self) -> None:
        """Stop watching: the run is over."""
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        sys.excepthook = sys.__excepthook__
        if self._progress is not None:
            os.close(self._progress)
            self._progress = None
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * self.poll_s)

    def note_error(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As the `__exit__` of a context: what the person is told that the run ends on is noted, too."""
        if isinstance(error, WmError) and not isinstance(error, SupersededError):
            self._note("error", 1, error=one_line(str(error)))

    def _watch(self) -> None:
        while not self._ended.wait(self.poll_s):
            try:
                self._look()
            except OSError as error:
                # A short failure of the file server must not end a run; a lasting one will stop the loop.
                log.warning(f"watchdog: {error}")

    def _look(self) -> None:
        if self.attempt.superseded():
            log.warning(f"attempt {self.attempt.number} has been superseded by a newer one: this rank ends")
            os._exit(EXIT_SUPERSEDED)
        if self._touches:
            self.attempt.touch()
        silence = time.monotonic() - self._beat
        if silence > self.timeout_s:
            self._note("hang", EXIT_HUNG)
            self.attempt.path("hang").touch()
            self._dump(f"no progress for {silence:.0f} s, the limit is {self.timeout_s:g} s")
        if self.attempt.path("hang").exists():
            self._dump("another rank reported a hang")
        if self.attempt.path("failure").exists():
            self._failure_seen = self._failure_seen or time.monotonic()
            if time.monotonic() - self._failure_seen > FAILURE_GRACE_S:
                log.warning(f"another rank of attempt {self.attempt.number} has failed: this rank ends")
                os._exit(1)

    def _dump(self, why: str) -> None:
        """Write all stacks, leave the other ranks the time to do the same, and end."""
        log.warning(f"stack dump of rank {self.rank} on {socket.gethostname()}, step {self.step}: {why}")
        faulthandler.dump_traceback(all_threads=True)
        faulthandler.cancel_dump_traceback_later()
        time.sleep(2 * self.poll_s + 1)
        os._exit(EXIT_HUNG)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._beat = float("inf")  # from here on it is no hang
        faulthandler.cancel_dump_traceback_later()
        if isinstance(error, OSError) and (error.filename is not None or error.errno in _DISK):
            print(f"error: {describe(error)}", file=sys.stderr, flush=True)  # no fault of this program
        else:
            traceback.print_exception(kind, error, trace)
        if self.world > 1:
            # When another rank was killed, its lost connection arrives here first; the note about the kill is
            # made within this time. Our own sockets close only after our note, so no rank overtakes it.
            time.sleep(NOTE_DELAY_S)
        self._note("exception", 1)
        if self.world > 1 and not issubclass(kind, KeyboardInterrupt):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _note(self, kind: str, code: int, **more: object) -> None:
        with contextlib.suppress(OSError):
            where = {"rank": self.rank, "node": socket.gethostname(), "step": self.step}
            self.attempt.record_failure(**where, kind=kind, exit_code=code, **more)
