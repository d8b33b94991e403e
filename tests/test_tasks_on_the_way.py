"""The trainer and the real harness: scores of saved checkpoints, beside a run and inline."""

from pathlib import Path

import pytest

from tests.evaluate.test_harness import local_data
from tests.support import toy_corpus
from tests.support.checkpoint_launch import metric_rows, train_run
from tests.support.settings import trainable
from wm_ds.evaluate import tasks
from wm_ds.evaluate.perplexity import alone
from wm_ds.run.evaluations_file import read_evaluations

pytestmark = [pytest.mark.alone, pytest.mark.slow]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("data")
    data = toy_corpus.packed(folder, 300, "--seq-len", 64, "--holdout", 8)
    return trainable(
        data,
        steps=4,
        run__timeout_minutes=10.0,
        evaluate={
            **{"every": None, "sequences": 4, "double_passes": False},
            **{"tasks": ["piqa"], "tasks_every": 2, "tasks_data": str(local_data(folder / "tasks"))},
        },
    )


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in metric_rows(run) if "loss" in row]


def test_inline_every_due_checkpoint_is_scored_and_the_run_is_the_same(tmp_path, config):
    train_run(tmp_path, config, "run", 2, "evaluate.tasks_inline=true", timeout_s=400)
    train_run(tmp_path, config, "plain", 2, "evaluate.tasks=[]")
    rows = read_evaluations(tmp_path / "run")
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        question = tasks.Question(
            tmp_path / "run", ["piqa"], step=row["step"], data=Path(config["evaluate"]["tasks_data"])
        )
        assert row["tasks"] == tasks.evaluate(question, alone())[0]["results"]
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    # A start of the complete run has nothing to evaluate.
    train_run(tmp_path, config, "run", 2, "evaluate.tasks_inline=true", timeout_s=280)
    assert len((tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()) == 2
