"""The batch script's two commands: claim an attempt, and decide what follows when its ranks have ended.

`python -m wm_ds.run.attempt claim|finish …`, called by slurm/pretrain.sbatch. `finish` reads from the run
directory how the attempt ended, notes it, and answers whether the job is to be started again. Jobs that were
submitted with an earlier checkout call it by the same words. Only the standard library is used.
"""

import argparse
import logging
import os
import re
import signal
import sys
from pathlib import Path
from typing import NamedTuple

from wm_ds.errors import run_cli
from wm_ds.run.claim import DEFAULT_LEASE_S, Attempt, SupersededError, attempts, claim, read_note
from wm_ds.run.exit_codes import EXIT_CHECK_FAILED, EXIT_NO_PROGRESS, EXIT_STOP_FILE, EXIT_SUPERSEDED

_ASKED_TO_STOP = (128 + signal.SIGTERM, 128 + signal.SIGUSR1)


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
    run_dir, job, not_started, check_failed = attempt.run_dir, end.job, end.not_started, end.check_failed
    if attempt.superseded():
        return Verdict("exit", EXIT_SUPERSEDED, "a newer attempt has taken over the run directory")
    done, stopped = read_note(run_dir / "done"), read_note(run_dir / "stopped")
    if done is not None and end.srun_code == 0:
        attempt.record_end(result="done", job=job, step=done.get("step"), clean=True)
        return Verdict("exit", 0, f"the run is complete at step {done.get('step')}")
    if stopped is not None and end.srun_code == 0:
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
        return _go_on(run_dir, job, patience.max_same_step, f"stopped at step {step} ({reason})")
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
        return _go_on(run_dir, job, patience.max_same_step, "stopped before the ranks started")
    code = EXIT_CHECK_FAILED if check_failed else int(failure.get("exit_code") or end.srun_code or 1)
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
    ends = (read_note(attempt.path("end")) for attempt in attempts(run_dir))
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
