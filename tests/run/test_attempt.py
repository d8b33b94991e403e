"""The batch script's decisions, without SLURM."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from wm_ds.run.attempt import JobEnd, Patience, failure_report, finish
from wm_ds.run.claim import claim
from wm_ds.run.exit_codes import EXIT_CHECK_FAILED, EXIT_NO_PROGRESS, EXIT_STOP_FILE, EXIT_SUPERSEDED


def decide(attempt, code=0, job="7", **options):
    patience = Patience(options.pop("max_crashes", 5), options.pop("max_same_step", 3))
    return finish(attempt, JobEnd(job, code, **options), patience)


def test_decisions_on_good_ends(tmp_path):
    attempt = claim(tmp_path)
    (tmp_path / "stopped").write_text(json.dumps({"step": 5, "reason": "SIGTERM"}))
    assert decide(attempt)[:2] == ("requeue", 0)
    (tmp_path / "STOP").touch()
    assert decide(attempt)[:2] == ("exit", EXIT_STOP_FILE)
    (tmp_path / "done").write_text(json.dumps({"step": 9}))
    assert decide(attempt)[:2] == ("exit", 0)
    claim(tmp_path, lease_s=0)
    assert decide(attempt)[:2] == ("exit", EXIT_SUPERSEDED)


def test_an_earlier_marker_is_not_this_attempts_end(tmp_path):
    claim(tmp_path)
    (tmp_path / "stopped").write_text(json.dumps({"step": 5, "reason": "SIGTERM"}))
    second = claim(tmp_path, lease_s=0)
    verdict = decide(second, code=0)
    assert verdict.action == "requeue"
    assert "crash 1" in verdict.reason


def test_a_stop_before_the_start_is_no_crash(tmp_path):
    assert decide(claim(tmp_path), code=143, not_started=True)[:2] == ("requeue", 0)
    second = claim(tmp_path, lease_s=0)
    assert "crash 1" in decide(second, code=1).reason


@pytest.mark.parametrize(
    ("first", "verdict"),
    [
        (143, ("requeue", 0)),
        (138, ("requeue", 0)),
        (72, ("exit", 72)),
        (1, ("exit", 72)),
        (137, ("exit", 72)),
    ],
)
def test_a_check_that_failed_is_no_stop_whatever_srun_says(tmp_path, first, verdict):
    """srun ends the other ranks of a failed check by SIGTERM, and 143 is higher than the check's own code."""
    attempt = claim(tmp_path)
    attempt.record_failure(rank=1, exit_code=first, step=None)
    assert decide(attempt, code=143, not_started=True, max_crashes=0)[:2] == verdict


def test_starts_that_are_asked_to_stop_before_a_step_are_not_repeated_without_end(tmp_path):
    def start(marker=None, **options):
        attempt = claim(tmp_path, lease_s=0)
        if marker:
            (tmp_path / "stopped").write_text(json.dumps(marker))
        return decide(attempt, **options)

    idle = {"step": 5, "began": 5, "reason": "SIGUSR1"}
    busy = {"step": 6, "began": 5, "reason": "SIGUSR1"}
    assert start(not_started=True, asked_to_stop=True).action == "requeue"
    assert start(idle).action == "requeue"
    assert start(busy).action == "requeue", "a step: the count begins again"
    assert start(idle).action == "requeue"
    assert start(not_started=True, asked_to_stop=True).action == "requeue"
    action, code, reason = start(idle)
    assert (action, code) == ("exit", EXIT_NO_PROGRESS)
    assert "the last 3 starts" in reason
    assert "WM_GRACE_SECONDS" in reason


def test_preemption_before_a_step_is_always_repeated(tmp_path):
    for marker in (None, None, {"step": 5, "began": 5, "reason": "SIGTERM"}, None):
        attempt = claim(tmp_path, lease_s=0)
        if marker:
            (tmp_path / "stopped").write_text(json.dumps(marker))
        assert decide(attempt, code=0 if marker else 143, not_started=marker is None)[:2] == ("requeue", 0)


def test_exit_zero_without_a_marker_is_a_crash(tmp_path):
    assert decide(claim(tmp_path), max_crashes=0)[:2] == ("exit", 1)


def test_crashes_of_one_job_are_capped(tmp_path):
    verdicts = []
    for step in range(4):
        attempt = claim(tmp_path, lease_s=0)
        attempt.record_failure(rank=1, exit_code=137, step=step)
        verdicts.append(decide(attempt, code=143, max_crashes=2))
    assert [v.action for v in verdicts] == ["requeue", "requeue", "exit", "exit"]
    assert verdicts[2].code == 137, "the first failure's code, not srun's"
    # Another job for the same run: somebody has looked at it, and the count begins again.
    attempt = claim(tmp_path, lease_s=0)
    assert decide(attempt, code=1, job="8", max_crashes=2).action == "requeue"


def test_three_crashes_at_one_step_are_enough(tmp_path):
    actions = []
    for step in (4, 7, 7, 7):
        attempt = claim(tmp_path, lease_s=0)
        attempt.record_failure(rank=1, exit_code=1, step=step)
        actions.append(decide(attempt, code=1).action)
    assert actions == ["requeue", "requeue", "requeue", "exit"]


@pytest.mark.parametrize("code", [2, EXIT_CHECK_FAILED])
def test_what_a_person_must_mend_is_retried_only_later(tmp_path, code):
    attempt = claim(tmp_path, lease_s=0)
    failed = {"check_failed": code == EXIT_CHECK_FAILED}
    assert decide(attempt, code=code, restarts=0, **failed)[:2] == ("exit", code)
    assert decide(attempt, code=code, restarts=3, **failed).action == "requeue"


def test_the_report_shows_the_first_failures_traceback_once(tmp_path):
    attempt = claim(tmp_path)
    attempt.record_failure(rank=1, node="wm2", kind="exception", exit_code=1, step=7)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "5.0001.rank000.log").write_text("Traceback (most recent call last)\nConnectionError\n")
    (logs / "5.0001.rank001.log").write_text("fine\nTraceback (most recent call last)\nValueError: it\n")
    (logs / "5.0001.rank011.log").write_text("Traceback (most recent call last)\nConnectionError\n")
    report = "\n".join(failure_report(attempt, logs))
    assert report.count("Traceback") == 1
    assert "ValueError: it" in report
    assert "rank 1 on wm2, exception, exit code 1, step 7" in report


def test_command_line(tmp_path):
    def call(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "wm_ds.run.attempt", *arguments],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    assert call("claim", str(tmp_path), "--job", "5").stdout == f"1\n{tmp_path}/attempts/0001\n"
    crash = call("finish", str(tmp_path), "1", "--job", "5", "--srun-code", "3", "--max-crashes", "0")
    assert crash.stdout == "exit 3\n"
    assert "the cap is 0 retries" in crash.stderr
    readonly = call("claim", "/proc/nowhere")
    assert readonly.returncode == 1
    assert readonly.stderr.startswith("error: ")
    assert "Traceback" not in readonly.stderr
