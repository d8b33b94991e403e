"""The state of a run, from what its directory holds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from wm_ds.run.claim import Attempt, claim
from wm_ds.run.state import SILENT_S, StateError, newest_checkpoint, runs_below, state_of

NOW = 2_000_000_000.0


def make_run(folder: Path, *, steps: int = 0, total: int = 10) -> Path:
    """A run's directory with rows of `steps` steps, without an attempt."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("model: {family: vanilla}\n")
    (folder / "history.json").write_text(json.dumps({"stages": [{"last": 4}, {"last": total}]}))
    for step in range(1, steps + 1):
        row = {"step": step, "loss": 5.0 - step / 10, "tokens": 100 * step, "tokens_per_s": 50.0}
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
    return folder


def started(folder: Path, silent_s: float = 0.0) -> Attempt:
    """An attempt whose ranks were seen so many seconds before NOW."""
    attempt = claim(folder, lease_s=0.01)
    attempt.touch()
    os.utime(attempt.path("alive"), (NOW - silent_s,) * 2)
    return attempt


def test_a_new_run(tmp_path):
    found = state_of(make_run(tmp_path / "run"), NOW)
    assert (found.state, found.step, found.total, found.attempts) == ("new", None, 10, 0)


def test_a_running_one_and_one_that_has_fallen_silent(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    for step in (2, 3):
        (run / f"checkpoints/step_{step:08d}").mkdir(parents=True)
    (run / "checkpoints/.step_00000009.part").mkdir()
    attempt = started(run, SILENT_S - 1)
    found = state_of(run, NOW)
    assert (found.state, found.step, found.total) == ("running", 3, 10)
    assert (found.loss, found.tokens, found.tokens_per_s) == (4.7, 300, 50.0)
    assert (found.checkpoint, found.attempts) == (3, 1)
    os.utime(attempt.path("alive"), (NOW - SILENT_S - 1,) * 2)
    found = state_of(run, NOW)
    assert (found.state, found.reason) == ("stale", "its last attempt ended without a word")


def test_age_is_that_of_the_last_sign(tmp_path):
    run = make_run(tmp_path / "run", steps=1)
    attempt = started(run, 40.0)
    for path in (run / "metrics.jsonl", run / "config.yaml", attempt.path("json")):
        os.utime(path, (NOW - 1000,) * 2)
    assert state_of(run, NOW).age_s == pytest.approx(40.0)


@pytest.mark.parametrize(
    ("note", "end", "state", "reason"),
    [
        (None, {"result": "done", "step": 10}, "done", None),
        (None, {"result": "stopped", "reason": "SIGTERM"}, "stopped", "SIGTERM"),
        (None, {"result": "crash", "step": 7, "exit_code": 9}, "failed", "at step 7: exit code 9"),
        ({"kind": "hang", "step": 4, "exit_code": 71}, None, "failed", "at step 4: hang, exit code 71"),
        (
            {"kind": "error", "step": 4, "exit_code": 1, "error": "the disk is full"},
            {"result": "crash", "step": 4, "exit_code": 1},
            "failed",
            "at step 4: the disk is full",
        ),
    ],
)
def test_how_it_ended(tmp_path, note, end, state, reason):
    run = make_run(tmp_path / "run", steps=3)
    attempt = started(run)
    if note:
        attempt.record_failure(**note)
    if end:
        attempt.record_end(**end)
    found = state_of(run, NOW)
    assert (found.state, found.reason) == (state, reason)


def test_a_later_attempt_counts(tmp_path):
    run = make_run(tmp_path / "run", steps=3)
    started(run).record_end(result="crash", exit_code=1, clean=True)
    assert state_of(run, NOW).state == "failed"
    started(run)
    found = state_of(run, NOW)
    assert (found.state, found.attempts) == ("running", 2)


@pytest.mark.parametrize("content", [None, b"\xff\x00", b"[1]\n", b"model: {"])
def test_a_damaged_record_is_said(tmp_path, content):
    run = make_run(tmp_path / "run")
    (run / "config.yaml").unlink()
    if content is not None:
        (run / "config.yaml").write_bytes(content)
    with pytest.raises(StateError, match=r"config\.yaml"):
        state_of(run, NOW)


def test_damaged_rows_and_histories_only_lack(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "history.json").write_text('{"stages": []}')
    (run / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": "nan", "tokens": 5}\n{"ste')
    found = state_of(run, NOW)
    assert (found.step, found.total, found.loss, found.tokens) == (1, None, None, 5)


def test_runs_are_found_below_a_folder_and_not_inside_of_one_another(tmp_path):
    for name in ("b", "a/deep", "a/other", ".hidden"):
        make_run(tmp_path / name)
    make_run(tmp_path / "b/checkpoints/inner")
    (tmp_path / "text").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    found = [str(path.relative_to(tmp_path)) for path in runs_below(tmp_path)]
    assert found == ["a/deep", "a/other", "b"]
    assert list(runs_below(tmp_path / "b")) == [tmp_path / "b"]


def test_no_checkpoint_is_none(tmp_path):
    assert newest_checkpoint(tmp_path) is None
