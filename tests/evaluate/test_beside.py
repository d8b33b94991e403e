"""The process beside a run: its rows are what lm-eval gives; what fails is a row."""

import json
import shutil
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.evaluate.test_harness import local_data
from wm_ds.evaluate import __main__ as evaluate
from wm_ds.evaluate import beside, tasks
from wm_ds.evaluate.harness import HarnessError
from wm_ds.evaluate.perplexity import alone
from wm_ds.run.evaluations_file import RUNNING, WANTED, read_evaluations


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """A run that is written to."""
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.fixture
def data(tmp_path) -> Path:
    return local_data(tmp_path / "data")


def step_of(run: Path) -> int:
    return max(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))


def want(run: Path, data: Path, name: str = WANTED, **more) -> int:
    (run / "evaluations").mkdir(exist_ok=True)
    step = more.pop("step", step_of(run))
    request = {"step": step, "checkpoint": f"step_{step:08d}", "tasks": ["piqa"], "data": str(data)}
    request |= {"limit": 1, "tensorboard": True}
    (run / name).write_text(json.dumps(request | more))
    return step


def test_a_row_has_the_scores_of_lm_eval_and_tensorboard_has_them_at_the_step(copy, data):
    step = want(copy, data)
    assert evaluate.main(["on-the-way", str(copy)]) == 0
    (row,) = read_evaluations(copy)
    question = tasks.Question(copy, ["piqa"], step=step, data=data, limit=1)
    expected = tasks.evaluate(question, alone())[0]["results"]
    assert row["tasks"] == expected
    assert "acc" in row["tasks"]["piqa"]
    assert (row["step"], row["checkpoint"]) == (step, f"step_{step:08d}")
    assert not (copy / WANTED).exists()
    assert not (copy / RUNNING).exists()
    events = EventAccumulator(str(copy / "tensorboard" / "evaluations"))
    events.Reload()
    (point,) = events.Scalars("tasks/piqa/acc")
    assert (point.step, point.value) == (step, expected["piqa"]["acc"])


def test_what_cannot_be_evaluated_is_a_row_and_no_error(copy, data):
    want(copy, data, step=77)
    beside.work(copy, alone())
    want(copy, data, tasks=["nonsense"])
    beside.work(copy, alone())
    errors = {row["step"]: row["error"] for row in read_evaluations(copy)}
    assert errors[77] == "the checkpoint was removed before it was read"
    assert "has no task 'nonsense'" in errors[step_of(copy)]


def test_what_a_killed_process_left_is_taken_up_but_not_for_ever(copy, data):
    want(copy, data, RUNNING, tries=2)
    beside.work(copy, alone())
    assert read_evaluations(copy)[0]["error"] == "the evaluating process was ended 2 times at it"
    (copy / "evaluations.jsonl").unlink()
    want(copy, data, RUNNING, tries=1)
    beside.work(copy, alone())
    assert "acc" in read_evaluations(copy)[0]["tasks"]["piqa"]


def test_the_check_before_a_start(data, tmp_path, capsys):
    beside.check(["piqa", "hellaswag"], data)
    with pytest.raises(HarnessError, match="has no task 'nonsense'"):
        beside.check(["nonsense"], None)
    with pytest.raises(HarnessError, match="no local data for task piqa"):
        beside.check(["piqa"], tmp_path / "nowhere")
    assert evaluate.main(["on-the-way", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path} is no run directory (no config.yaml)\n"
