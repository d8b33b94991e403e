"""Attempts: which launch of a run may write its directory, and what became of each.

A run of weeks is many launches of the same command: preempted, at its time limit, crashed, started by hand.
Each launch claims the next number before it does anything else:

  attempts/0007.json      the claim: who, where, when
  attempts/0007.alive     touched by the ranks while they live (see watchdog.py)
  attempts/0007.failure   the first rank that failed, written by whoever notices first
  attempts/0007.hang      a rank's request that all ranks dump their stacks
  attempts/0007.end       how it ended

The claim is made by exclusive creation, so numbers are unique on every file system that a cluster has, and
an attempt is superseded from the moment a higher number exists: it then must not write any more, and its
ranks end themselves (watchdog.py). That leaves the seconds in which an old rank has not looked yet: a node
that lost its connection to SLURM goes on training while the job is started again elsewhere. So whoever claims
waits until the attempt before has ended by itself or has been silent for `lease_s`.

Only the standard library is used: SLURM's batch script claims before any rank exists (attempt.py).
"""

import contextlib
import json
import logging
import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from wm_ds.distributed import environment
from wm_ds.errors import WmError
from wm_ds.files import create, write_json

log = logging.getLogger(__name__)
DEFAULT_LEASE_S = 90.0  # network file systems show a changed time stamp up to 60 s late
_CLAIM = re.compile(r"(\d{4,})\.json")


class SupersededError(WmError, RuntimeError):
    """A newer attempt has claimed the run directory; this one must stop without writing."""


@dataclass(frozen=True)
class Attempt:
    """One launch of the run in `run_dir`; `number` counts from 1 and names it in logs and metrics."""

    run_dir: Path
    number: int

    def path(self, suffix: str) -> Path:
        """The attempt's file with this suffix."""
        return self.run_dir / "attempts" / f"{self.number:04d}.{suffix}"

    def superseded(self) -> bool:
        """Whether a newer attempt exists. One stat: numbers are handed out without gaps."""
        return Attempt(self.run_dir, self.number + 1).path("json").exists()

    def check(self) -> None:
        """Raise SupersededError if a newer attempt exists. Call before publishing in the run directory."""
        if self.superseded():
            raise SupersededError(
                f"attempt {self.number} of {self.run_dir} has been superseded by a newer one and must not "
                f"write; see {self.path('json').parent}"
            )

    def touch(self) -> None:
        """Say that a rank of this attempt lives. The file server's clock counts, not this machine's."""
        self.path("alive").touch()

    def record_failure(self, **what: object) -> bool:
        """Note that a rank failed. Only the first note of an attempt is kept: True if it was this one."""
        return create(self.path("failure"), json.dumps(what) + "\n")

    def failure(self) -> dict | None:
        """The first failure of this attempt, None if there is none."""
        return read_note(self.path("failure"))

    def record_end(self, **what: object) -> None:
        """Note how this attempt ended; `clean=True` says that no rank of it can be alive."""
        write_json(self.path("end"), {"time": _now(), **what})


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def read_note(path: Path) -> dict | None:
    """A small JSON file of the run directory; None where there is none, or none that can be read."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def attempts(run_dir: str | Path) -> list[Attempt]:
    """All attempts of the run, oldest first."""
    folder = Path(run_dir) / "attempts"
    names = [match for path in folder.glob("*.json") if (match := _CLAIM.fullmatch(path.name))]
    return [Attempt(Path(run_dir), number) for number in sorted(int(match.group(1)) for match in names)]


def claim(
    run_dir: str | Path,
    *,
    lease_s: float = DEFAULT_LEASE_S,
    **who: object,
) -> Attempt:
    """Become the newest attempt of the run, and return when the one before can no longer write.

    Waits up to `lease_s` seconds of silence of the attempt before, unless that one has ended cleanly or its
    only process, on this very machine, is gone. Raises SupersededError when a yet newer attempt comes.
    """
    run_dir = Path(run_dir)
    (run_dir / "attempts").mkdir(parents=True, exist_ok=True)
    while True:
        earlier = attempts(run_dir)
        mine = Attempt(run_dir, earlier[-1].number + 1 if earlier else 1)
        claimed = {"time": _now(), "host": socket.gethostname(), "pid": os.getpid(), **who}
        if create(mine.path("json"), json.dumps(claimed) + "\n"):
            break
    # How an earlier attempt ended must not be taken for how this one does.
    (run_dir / "stopped").unlink(missing_ok=True)
    if earlier:
        _outwait(earlier[-1], mine, lease_s)
    mine.check()
    return mine


def _outwait(old: Attempt, mine: Attempt, lease_s: float) -> None:
    end, who = read_note(old.path("end")), read_note(old.path("json")) or {}
    if (end and end.get("clean")) or _process_is_gone(who):
        return
    seen, since, warned = None, time.monotonic(), False
    while True:
        with contextlib.suppress(FileNotFoundError):
            stamp = old.path("alive").stat().st_mtime
            if seen is None:  # both stamps are the file server's, so no clock of a node matters
                since -= max(0.0, mine.path("json").stat().st_mtime - stamp)
            elif stamp != seen:
                since = time.monotonic()
            seen = stamp
        if seen is None:  # it never had a rank
            return
        if time.monotonic() - since >= lease_s or _process_is_gone(who):
            return
        if not warned:
            warned = True
            log.warning(
                f"attempt {old.number} ({_describe(who)}) did not end by itself; "
                f"attempt {mine.number} waits until it has ended, or been silent for {lease_s:g} s",
            )
        mine.check()
        time.sleep(min(1.0, lease_s / 10))


def _describe(who: dict) -> str:
    return ", ".join(f"{key} {who[key]}" for key in ("job", "nodes", "host") if who.get(key))


def _process_is_gone(who: dict) -> bool:
    """Whether a claim was made by rank 0 of a run on this machine alone (`solo`), and it is dead."""
    if not who.get("solo") or who.get("boot") != boot_id():
        return False
    try:
        os.kill(int(who["pid"]), 0)
        state = Path(f"/proc/{who['pid']}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return True
    except (OSError, KeyError, ValueError, IndexError):
        return False
    return state in "ZX"  # dead, and nobody has asked for its exit code: so are a killed torchrun's ranks


def boot_id() -> str:
    """Names this boot of this machine and this process namespace: within it, a process id is one process."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


def join(run_dir: str | Path, *, solo: bool = False, lease_s: float | None = None) -> Attempt:
    """The attempt this process belongs to: WM_ATTEMPT of the batch script, else a new claim.

    Without a batch script (torchrun, a single process) rank 0 calls this and hands the number to the others.
    `solo` says that no rank lives on another machine; LOCAL_WORLD_SIZE of torchrun and rank.sh says it too.
    Then nothing is waited for when this process is dead: rank 0 alone publishes.
    """
    number = environment.whole("WM_ATTEMPT", 0)
    if number:
        return Attempt(Path(run_dir), number)
    solo = solo or os.environ.get("LOCAL_WORLD_SIZE", "0") == os.environ.get("WORLD_SIZE", "1")
    if lease_s is None:
        lease_s = environment.seconds("WM_LEASE_SECONDS", DEFAULT_LEASE_S)
    return claim(run_dir, lease_s=lease_s, solo=solo, boot=boot_id())
