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

Only the standard library is used: SLURM's batch script calls this file before any rank exists
(`python -m wm_ds.run.attempt claim|finish …`).
"""

import argparse
import contextlib
import json
import logging
import os
import re
import signal
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from wm_ds.errors import WmError, run_cli
from wm_ds.files import create, write_json

# Exit codes of a job beside those of the ranks themselves (docs/slurm.md explains each to the user).
EXIT_SUPERSEDED = 70
EXIT_HUNG = 71
EXIT_CHECK_FAILED = 72
EXIT_STOP_FILE = 73
EXIT_NO_PROGRESS = 74
_ASKED_TO_STOP = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)

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
        return _read(self.path("failure"))

    def record_end(self, **what: object) -> None:
        """Note how this attempt ended; `clean=True` says that no rank of it can be alive."""
        write_json(self.path("end"), {"time": _now(), **what})


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _read(path: Path) -> dict | None:
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
    (run_dir / "stopped").unlink(
        missing_ok=True
    )  # an earlier attempt's end must not be mistaken for this one's
    if earlier:
        _outwait(earlier[-1], mine, lease_s)
    mine.check()
    return mine


def _outwait(old: Attempt, mine: Attempt, lease_s: float) -> None:
    end, who = _read(old.path("end")), _read(old.path("json")) or {}
    if (end and end.get("clean")) or _process_is_gone(who):
        return
    seen, since, told = None, time.monotonic(), False
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
        if not told:
            told = True
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
    return (
        state in "ZX"
    )  # dead, though nobody has asked for its exit code: torchrun's ranks when it was killed


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
    number = os.environ.get("WM_ATTEMPT")
    if number:
        return Attempt(Path(run_dir), int(number))
    solo = solo or os.environ.get("LOCAL_WORLD_SIZE", "0") == os.environ.get("WORLD_SIZE", "1")
    if lease_s is None:
        lease_s = float(os.environ.get("WM_LEASE_SECONDS", DEFAULT_LEASE_S))
    return claim(run_dir, lease_s=lease_s, solo=solo, boot=boot_id())


# -- what the batch script decides with --------------------------------------------------------------------


class Verdict(NamedTuple):
    """What the batch script does after its ranks have ended: "requeue", or "exit" with `code`."""

    action: str
    code: int
    reason: str


class Patience(NamedTuple):
    """How often a job is started again."""

    max_crashes: int = 5
    """Crashes of one job that are retried."""
    max_same_step: int = 3
    """So many in a row at the same step are the data's fault or the program's, and no repetition helps."""


class JobEnd(NamedTuple):
    """How a job ended, as the batch script saw it."""

    job: str
    srun_code: int
    restarts: int = 0
    """How often SLURM has started this job again so far."""
    not_started: bool = False
    """The ranks were not started: a stop was asked for."""
    check_failed: bool = False
    """The check of the nodes ended with an error."""
    asked_to_stop: bool = False
    """The batch script was sent SIGUSR1."""


def finish(attempt: Attempt, end: JobEnd, patience: Patience) -> Verdict:
    """Tell how the attempt ended from what it left in the run directory, note it, and decide what follows.

    Starts are not repeated without end that were asked to stop (at the time limit) before they had taken a
    step.
    """
    run_dir, job, srun_code, max_same_step = attempt.run_dir, end.job, end.srun_code, patience.max_same_step
    not_started, check_failed = end.not_started, end.check_failed
    if attempt.superseded():
        return Verdict("exit", EXIT_SUPERSEDED, "a newer attempt has taken over the run directory")
    done, stopped = _read(run_dir / "done"), _read(run_dir / "stopped")
    if done is not None and srun_code == 0:
        attempt.record_end(result="done", job=job, step=done.get("step"), clean=True)
        return Verdict("exit", 0, f"the run is complete at step {done.get('step')}")
    if stopped is not None and srun_code == 0:
        reason, step = stopped.get("reason"), stopped.get("step")
        idle = step is not None and step == stopped.get("began")
        asked = end.asked_to_stop or reason in ("SIGUSR1", "time limit")
        attempt.record_end(
            result="stopped", job=job, step=step, reason=reason, clean=True, no_progress=idle and asked
        )
        if (run_dir / "STOP").exists():
            return Verdict(
                "exit", EXIT_STOP_FILE, f"stopped at step {step}: remove {run_dir / 'STOP'} to go on"
            )
        return _go_on(run_dir, job, max_same_step, f"stopped at step {step} ({reason})")
    failure = attempt.failure() or {}
    if not_started and failure.get("exit_code") not in (None, *_ASKED_TO_STOP):
        # srun's code is the highest: that of the ranks it ended, not of the one whose check had failed.
        not_started, check_failed = False, True
    if not_started:
        attempt.record_end(
            result="stopped",
            job=job,
            reason="before the ranks started",
            clean=True,
            no_progress=end.asked_to_stop,
        )
        return _go_on(run_dir, job, max_same_step, "stopped before the ranks started")
    code = EXIT_CHECK_FAILED if check_failed else int(failure.get("exit_code") or srun_code or 1)
    step = failure.get("step")
    attempt.record_end(result="crash", job=job, step=step, exit_code=code, clean=False)
    crashes = _crashes(run_dir, job)
    where = (
        f"crash {len(crashes)} of job {job}, {'before the first step' if step is None else f'at step {step}'}"
    )
    if (stop := _retry_is_useless(code, end.restarts, crashes, patience)) is not None:
        return Verdict("exit", code, f"{where}: {stop}")
    return Verdict("requeue", code, f"{where}; up to {patience.max_crashes} are retried")


def _go_on(run_dir: Path, job: str, most: int, how: str) -> Verdict:
    """Requeue after a stop, unless the last `most` starts of the job had no time for a single step."""
    last = _ends(run_dir, job)[-most:]
    if len(last) == most and all(end.get("no_progress") for end in last):
        return Verdict(
            "exit",
            EXIT_NO_PROGRESS,
            f"{how}; not retried, the last {most} starts were asked to stop before they had taken a step: "
            "give more time (--time), or lower WM_GRACE_SECONDS, which is how long before the limit that is",
        )
    return Verdict("requeue", 0, how)


def _ends(run_dir: Path, job: str) -> list[dict]:
    ends = (_read(attempt.path("end")) for attempt in attempts(run_dir))
    return [end for end in ends if end and end.get("job") == job]


def _crashes(run_dir: Path, job: str) -> list[dict]:
    return [end for end in _ends(run_dir, job) if end.get("result") == "crash"]


def _retry_is_useless(code: int, restarts: int, crashes: list[dict], patience: Patience) -> str | None:
    max_crashes, max_same_step = patience
    # At the first start somebody is watching, and has made a mistake; a run of weeks goes on trying.
    if code == 2 and restarts == 0:
        return "not retried, the configuration or the launch was refused (exit code 2)"
    if code == EXIT_CHECK_FAILED and restarts == 0:
        return "not retried, the nodes were refused"
    if len(crashes) > max_crashes:
        return f"not retried, the cap is {max_crashes} retries"
    last = crashes[-max_same_step:]
    if len(last) == max_same_step and len({str(end.get("step")) for end in last}) == 1:
        return f"not retried, the last {max_same_step} crashes were all at this step"
    return None


def failure_report(attempt: Attempt, logs: Path, lines: int = 60) -> list[str]:
    """What the main log shows of a crash: who failed first, and that rank's traceback or last lines."""
    failure = attempt.failure()
    report = []
    if failure and failure.get("exit_code") == EXIT_CHECK_FAILED:
        return []  # launch_check.py has said it all
    if failure is None:
        return ["no rank left a record of its end: the node or SLURM ended them"]
    rank, kind = failure.get("rank"), failure.get("kind")
    report.append(
        f"first failure: rank {rank} on {failure.get('node')}, {kind}, exit code {failure.get('exit_code')}, "
        f"{'before the first step' if failure.get('step') is None else 'step {}'.format(failure.get('step'))}"
    )
    found = sorted(logs.glob(f"*.{attempt.number:04d}.rank*.log"))
    mine = [path for path in found if re.search(rf"\.rank0*{rank}\.log$", path.name)]
    if kind == "hang":
        silent = [path.name for path in found if "stack dump of rank" not in path.read_text(errors="replace")]
        report.append(f"every rank's stack is in its own log, {logs}/*.{attempt.number:04d}.rank*.log")
        report += [f"no stack in {name}: that rank was stopped or lost" for name in silent]
    for path in mine[:1]:
        report += [f"--- {path}", *_tail(path.read_text(errors="replace"), lines)]
    return report


def _tail(text: str, lines: int) -> list[str]:
    """The last traceback or stack dump of a log, else its end."""
    starts = [text.rfind("Traceback (most recent call last)"), text.rfind("stack dump of rank")]
    if max(starts) >= 0:
        return text[text.rfind("\n", 0, max(starts)) + 1 :].splitlines()[:lines]
    return text.splitlines()[-20:]


def main(arguments: list[str] | None = None) -> int:
    """The batch script's command line; returns the exit code."""
    return run_cli(run, arguments)


def run(arguments: list[str] | None = None) -> int:
    """The command, its errors as exceptions."""
    parser = argparse.ArgumentParser(prog="python -m wm_ds.run.attempt", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser(
        "claim",
        help="once the attempt before is over, print a new one's number, and its files' path without suffix",
    )
    end = commands.add_parser("finish", help="print `requeue` or `exit CODE`, and the reasons on stderr")
    for sub in (start, end):
        sub.add_argument("run_dir", type=Path)
        sub.add_argument("--job", default=os.environ.get("SLURM_JOB_ID", "none"))
    start.add_argument("--lease", type=float, default=DEFAULT_LEASE_S)
    end.add_argument("number", type=int)
    end.add_argument("--srun-code", type=int, required=True)
    end.add_argument("--max-crashes", type=int, default=5)
    end.add_argument("--max-same-step", type=int, default=3)
    end.add_argument(
        "--not-started", action="store_true", help="the ranks were not started, a stop was asked for"
    )
    end.add_argument("--asked-to-stop", action="store_true", help="the batch script was sent SIGUSR1")
    end.add_argument("--check-failed", action="store_true", help="the check of the nodes ended with an error")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s")  # to standard error: the answers are on standard output
    try:
        if options.command == "claim":
            nodes, restarts = os.environ.get("SLURM_JOB_NODELIST"), os.environ.get("SLURM_RESTART_COUNT", "0")
            mine = claim(
                options.run_dir, lease_s=options.lease, job=options.job, restarts=restarts, nodes=nodes
            )
            print(mine.number)
            print(mine.path("json").with_suffix(""))  # of which the batch script makes the names of its files
            return 0
        attempt = Attempt(options.run_dir, options.number)
        end_of_job = JobEnd(
            job=options.job,
            srun_code=options.srun_code,
            restarts=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            not_started=options.not_started,
            check_failed=options.check_failed,
            asked_to_stop=options.asked_to_stop,
        )
        verdict = finish(attempt, end_of_job, Patience(options.max_crashes, options.max_same_step))
        if verdict.code not in (0, EXIT_SUPERSEDED, EXIT_STOP_FILE, EXIT_NO_PROGRESS):
            for line in failure_report(attempt, options.run_dir / "logs"):
                print(line, file=sys.stderr)
        print(verdict.reason, file=sys.stderr)
        print(verdict.action, verdict.code)
        return 0
    except SupersededError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_SUPERSEDED


if __name__ == "__main__":
    sys.exit(main())
