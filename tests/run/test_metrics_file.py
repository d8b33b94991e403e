"""Which rows of metrics.jsonl stand."""

import json

from wm_ds.run.metrics_file import read_metrics


def write(path, rows, tail=""):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return path


def test_repeated_steps_are_the_later_attempts(tmp_path):
    """Attempt 1 was killed at step 5 and its last checkpoint was step 3; attempt 2 went back to step 1."""
    rows = [{"attempt": 1, "step": s, "loss": 10 + s} for s in range(1, 6)]
    rows += [{"attempt": 1, "step": 3, "holdout_loss": 9.0}]
    rows += [{"attempt": 2, "step": s, "loss": 20 + s} for s in range(4, 8)]
    rows += [{"attempt": 3, "step": s, "loss": 30 + s} for s in range(7, 9)]
    path = write(tmp_path / "metrics.jsonl", rows, tail='{"attempt": 3, "step": 9, "lo')
    found = [(row["attempt"], row["step"]) for row in read_metrics(path) if "loss" in row]
    assert found == [(1, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6), (3, 7), (3, 8)]
    assert [row["holdout_loss"] for row in read_metrics(path) if "holdout_loss" in row] == [9.0]


def test_steps_that_a_rollback_takes_again_are_the_later_ones(tmp_path):
    """Attempt 1 went back from 5 to 3, was killed at 6; attempt 2 began at 4 and went back from 6 to 4."""
    rows = [{"attempt": 1, "step": s, "loss": 10 + s} for s in range(1, 6)]
    rows += [{"attempt": 1, "step": 3, "rollback": {"from": 5}}]
    rows += [{"attempt": 1, "step": s, "loss": 20 + s} for s in range(4, 7)]
    rows += [{"attempt": 2, "step": s, "loss": 30 + s} for s in range(5, 7)]
    rows += [{"attempt": 2, "step": 4, "rollback": {"from": 6}}]
    path = write(tmp_path / "metrics.jsonl", rows)
    losses = [row["loss"] for row in read_metrics(path) if "loss" in row]
    assert losses == [11, 12, 13, 24], "killed before it took a step again"
    path = write(path, [*rows, {"attempt": 2, "step": 5, "loss": 45}])
    assert [row["loss"] for row in read_metrics(path) if "loss" in row] == [11, 12, 13, 24, 45]
    assert [row["step"] for row in read_metrics(path) if "rollback" in row] == [3, 4]
    path = write(path, [*rows, {"attempt": 3, "step": 2, "loss": 52}])
    assert [row.get("loss") for row in read_metrics(path)] == [11, 52], "no rollback of a past that is void"


def test_no_file_is_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []
