"""The list of runs, as a person reads it."""

from __future__ import annotations

import json

import pytest

from tests.run.test_state import make_run
from tools import runs
from wm_ds.run.claim import claim


@pytest.fixture
def folder(tmp_path):
    """A new run, one that is at work, one that has failed, and one that is complete."""
    make_run(tmp_path / "new")
    claim(make_run(tmp_path / "sweeps/at_work", steps=3), lease_s=0.01).touch()
    failed = claim(
        make_run(tmp_path / "sweeps/with_a_name_that_is_longer_than_others", steps=2), lease_s=0.01
    )
    failed.record_failure(kind="error", step=3, exit_code=1, error="the disk is full")
    done = make_run(tmp_path / "done", steps=10)
    (done / "done").write_text('{"step": 10}')
    claim(done, lease_s=0.01).record_end(result="done", step=10)
    return tmp_path


def test_a_line_for_each_run_those_that_matter_first(folder, capsys):
    assert runs.main([str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[1] for line in lines if not line.startswith("    ")] == [
        "state",
        "running",
        "failed",
        "new",
        "done",
    ]
    assert lines[1].split()[:7] == ["sweeps/at_work", "running", "3/10", "4.7000", "50", "-", "1"]
    assert lines[2].startswith("…hat_is_longer_than_others  failed")
    assert lines[3] == "    at step 3: the disk is full"


def test_some_states_only_and_json(folder, capsys):
    assert runs.main([str(folder), "--state", "done,running", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(run["path"].rpartition("/")[2], run["step"]) for run in found] == [("at_work", 3), ("done", 10)]
    assert runs.main([str(folder), "--state", "stale"]) == 0
    assert capsys.readouterr().out == "none of 4 runs is stale\n"


def test_what_cannot_be_listed(folder, tmp_path, capsys):
    assert runs.main([str(folder), "--state", "dead"]) == 1
    assert "--state dead: there is no such state; choose of running, " in capsys.readouterr().err
    (folder / "new/config.yaml").write_text("[1]")
    assert runs.main([str(folder)]) == 1
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 5  # the others are listed all the same
    assert captured.err == f"error: {folder}/new/config.yaml is damaged, or no run's\n"
    (tmp_path / "empty").mkdir()
    assert runs.main([str(tmp_path / "empty")]) == 1
    assert "holds no run" in capsys.readouterr().err
