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


def test_no_file_is_no_rows(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []
