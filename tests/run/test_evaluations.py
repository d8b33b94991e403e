"""Downstream tasks on the way: when, one at a time, and that nothing of it reaches training."""

import json
import logging
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.support.settings import repeatable
from wm_ds.config.load import load
from wm_ds.config.schema import Config, ConfigError
from wm_ds.run import evaluations
from wm_ds.run.evaluations import Evaluations
from wm_ds.run.evaluations_file import RUNNING, WANTED, append_row, read_evaluations

# What the evaluating process does, in short: takes what is wanted, writes a row, until nothing is.
WORKER = """
import json, os, sys, time
run, kind = sys.argv[1:]
wanted, running = run + "/evaluations/wanted.json", run + "/evaluations/running.json"
if kind == "broken":
    sys.exit(5)
while os.path.exists(wanted):
    os.replace(wanted, running)
    step = json.load(open(running))["step"]
    if kind == "killed":
        os.kill(os.getpid(), 9)
    while kind == "slow" and not os.path.exists(run + "/go"):
        time.sleep(0.01)
    row = {"step": step, "tasks": {"piqa": {"acc": 0.5, "acc_stderr": 0.1}}}
    open(run + "/evaluations.jsonl", "a").write(json.dumps(row) + chr(10))
    os.remove(running)
"""


def settings(folder: Path, *overrides: str) -> Config:
    path = folder / "run.yaml"
    raw = repeatable(folder, run__dir=str(folder / "run"), steps=40, checkpoint__every=10)
    path.write_text(yaml.safe_dump(raw))
    return load(path, ["evaluate.tasks=[piqa]", "evaluate.tasks_every=10", *overrides])


@pytest.fixture
def begin(tmp_path, monkeypatch, caplog):
    """Starts the evaluations of a run whose process is of some kind."""
    monkeypatch.delenv("WM_EVALUATIONS", raising=False)
    caplog.set_level(logging.INFO, "wm_ds")
    script = tmp_path / "worker.py"
    script.write_text(WORKER)

    def start(kind: str, *overrides: str, begun: int = 0) -> Evaluations:
        command = [sys.executable, "-S", str(script), str(tmp_path / "run"), kind]
        monkeypatch.setattr(Evaluations, "_command", lambda self: command)
        return Evaluations(settings(tmp_path, *overrides), is_main=True, begun=begun)

    return start


def publish(folder: Path, step: int) -> None:
    (folder / "run" / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)


def until(found: Evaluations, what) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        found.poll()
        time.sleep(0.01)


def lines(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_evaluations(folder / "run")]


def test_a_checkpoint_is_evaluated_once_it_is_there_and_said_when_it_was(tmp_path, begin, caplog):
    found = begin("quick")
    assert not found.saved(15)
    assert not found.saved(10)
    found.poll()
    assert not found.busy, "its checkpoint is not published yet"
    publish(tmp_path, 10)
    found.poll()
    assert found.busy
    until(found, lambda: not found.busy)
    assert steps(tmp_path) == [10]
    assert lines(caplog) == ["evaluation of step 10: piqa acc 0.5"]
    found.close(done=True)
    assert len(caplog.records) == 1
    # A start that goes on from there, or takes the step again, does not evaluate it again.
    again = begin("quick", begun=10)
    again.saved(10)
    again.poll()
    assert not again.busy
    assert len(caplog.records) == 1


def test_one_at_a_time_and_the_newest_waits(tmp_path, begin, caplog):
    found = begin("slow")
    for step in (10, 20, 30):
        publish(tmp_path, step)
        found.saved(step)
        found.poll()
        until(found, lambda: (tmp_path / "run" / RUNNING).exists())
    assert json.loads((tmp_path / "run" / RUNNING).read_text())["step"] == 10
    assert json.loads((tmp_path / "run" / WANTED).read_text())["step"] == 30
    (tmp_path / "run" / "go").touch()
    until(found, lambda: not found.busy)
    assert steps(tmp_path) == [10, 30]
    assert "step 20 is not evaluated: step 30 is newer" in lines(caplog)


@pytest.mark.parametrize(("kind", "said"), [("killed", "ended with -9"), ("broken", "ended with 5")])
def test_a_process_that_dies_is_one_line_and_the_next_one_is_tried(tmp_path, begin, caplog, kind, said):
    found = begin(kind)
    publish(tmp_path, 10)
    found.saved(10)
    until(found, lambda: steps(tmp_path))
    until(found, lambda: not found.busy)
    (line,) = lines(caplog)
    assert line.startswith(f"evaluation of step 10 failed: its process {said} (")
    assert line.endswith("training goes on")
    begin("quick")
    publish(tmp_path, 20)
    found.saved(20)
    until(found, lambda: steps(tmp_path) == [10, 20])


def test_one_that_takes_too_long_is_ended(tmp_path, begin, caplog):
    found = begin("slow", "evaluate.tasks_minutes=0.001")
    publish(tmp_path, 10)
    found.saved(10)
    until(found, lambda: steps(tmp_path))
    assert "it took longer than evaluate.tasks_minutes = 0.001" in lines(caplog)[0]
    assert not found.busy


def test_a_run_that_stops_ends_the_process_and_its_next_start_takes_the_checkpoint_up(
    tmp_path, begin, caplog
):
    found = begin("slow")
    publish(tmp_path, 10)
    found.saved(10)
    until(found, lambda: (tmp_path / "run" / RUNNING).exists())
    process = found._process
    found.close(done=False)
    assert process.poll() is not None, "no orphan"
    assert lines(caplog) == ["the evaluation of step 10 is outstanding: the next start takes it up"]
    again = begin("quick", begun=10)
    until(again, lambda: steps(tmp_path) == [10])


def test_a_run_that_is_done_says_what_is_outstanding_and_lets_it_end(tmp_path, begin, caplog):
    found = begin("slow")
    publish(tmp_path, 40)
    found.saved(40, total=40)
    until(found, lambda: (tmp_path / "run" / RUNNING).exists())
    process = found._process
    found.close(done=True)
    assert lines(caplog)[0].startswith(f"the evaluation of step 40 goes on as process {process.pid}; ")
    (tmp_path / "run" / "go").touch()
    assert process.wait(30) == 0
    assert steps(tmp_path) == [40]


def test_the_last_checkpoint_is_due_whatever_its_step(tmp_path, begin):
    found = begin("quick")
    publish(tmp_path, 37)
    found.saved(37, total=37)
    until(found, lambda: steps(tmp_path) == [37])


def test_going_back_makes_later_scores_void(tmp_path, begin):
    found = begin("quick")
    for step in (10, 20):
        publish(tmp_path, step)
        found.saved(step)
        until(found, lambda step=step: steps(tmp_path)[-1:] == [step])
    found.rolled_back(10)
    assert steps(tmp_path) == [10]
    found.saved(20)
    until(found, lambda: steps(tmp_path) == [10, 20])


def test_in_a_job_of_the_batch_script_only_the_wish_is_written_down(tmp_path, begin, monkeypatch, caplog):
    monkeypatch.setenv("WM_EVALUATIONS", "job")
    found = Evaluations(settings(tmp_path), is_main=True, begun=0)
    publish(tmp_path, 10)
    found.saved(10)
    found.poll()
    assert found._process is None
    request = json.loads((tmp_path / "run" / WANTED).read_text())
    assert (request["step"], request["tasks"], request["checkpoint"]) == (10, ["piqa"], "step_00000010")
    found.close(done=True)
    assert lines(caplog) == ["the evaluation of step 10 is outstanding: a job of its own"]


def test_without_tasks_and_on_other_ranks_nothing_happens(tmp_path):
    for found in (
        Evaluations(settings(tmp_path, "evaluate.tasks=[]"), is_main=True, begun=0),
        Evaluations(settings(tmp_path), is_main=False, begun=0),
    ):
        publish(tmp_path, len(list((tmp_path / "run" / "checkpoints").glob("*"))) + 10)
        found.saved(10)
        found.poll()
        found.rolled_back(0)
        found.close(done=True)
    assert not (tmp_path / "run" / "evaluations").exists()
    assert not (tmp_path / "run" / "evaluations.jsonl").exists()


def test_a_disk_that_takes_nothing_is_said_once(tmp_path, begin, monkeypatch, caplog):
    found = begin("quick")
    publish(tmp_path, 10)
    found.saved(10)

    def full(*_, **__):
        raise OSError(28, "No space left on device", "wanted.json")

    monkeypatch.setattr(evaluations, "write_json", full)
    for _ in range(3):
        found.poll()
    assert lines(caplog) == ["evaluate.tasks: wanted.json: No space left on device; training goes on"]
    assert not found.busy, "nobody waits for it"


def test_half_lines_and_foreign_ones_are_left_out(tmp_path):
    append_row(tmp_path, {"step": 1, "tasks": {}})
    with open(tmp_path / "evaluations.jsonl", "ab") as file:
        file.write(b'[1]\n{"step": "2"}\n\xff\n{"step": 3, "ta')
    assert [row["step"] for row in read_evaluations(tmp_path)] == [1]
    assert read_evaluations(tmp_path / "nowhere") == []


def test_what_cannot_be_is_refused_with_both_values(tmp_path):
    for override, said in {
        "evaluate.tasks_every=15": "evaluate.tasks_every = 15 is no multiple of checkpoint.every = 10",
        "checkpoint.every=null": "evaluate.tasks_every = 10 is no multiple of checkpoint.every = None",
        "evaluate.tasks_every=null": "evaluate.tasks_every says at which steps; it is not set",
    }.items():
        with pytest.raises(ConfigError, match=said):
            settings(tmp_path, override)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("evaluate.tasks=[piqa, nonsense]", "has no task 'nonsense'"),
        ("evaluate.tasks_data=DATA", "no local data for task piqa: DATA/piqa does not exist"),
    ],
)
def test_the_harness_is_asked_before_the_start(tmp_path, override, said):
    config = settings(tmp_path, override.replace("DATA", str(tmp_path)))
    with pytest.raises(ConfigError, match=said.replace("DATA", str(tmp_path))):
        evaluations.check_tasks(config)
