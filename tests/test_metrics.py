"""What a person sees of a run: metrics.jsonl, TensorBoard, the terminal's lines and live view, refusals."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
import threading
import types
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.config.test_load import changed
from tests.support.terminal import read_to_the_end
from wm_ds import metrics
from wm_ds.config import load as configuration
from wm_ds.config.stages import plan
from wm_ds.distributed import log as terminal
from wm_ds.distributed.process_group import World
from wm_ds.engine.engine import StepResult
from wm_ds.metrics import Metrics, duration, last_step
from wm_ds.plan.flops import Flops
from wm_ds.run import trackers
from wm_ds.run.metrics_file import read_metrics

pytestmark = [pytest.mark.alone, pytest.mark.usefixtures("log_as_before")]

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
SECONDS = {"forward": 0.1, "backward": 0.2, "optimizer": 0.3, "communication": 0.4}


def sink(folder: Path, *, rank: int = 0, attempt: int = 1, begun: int = 0, **log: Any) -> Metrics:
    changes = {"run__dir": str(folder), "log": {"every": 2, **log}, "steps": 4, "batch__global_batch": 100}
    stages = plan(configuration.parse(changed(**changes)), 10)  # 1000 tokens a step
    world = World(rank, rank, 2, CPU, "gloo")
    flops = Flops(3e6, 4e6)
    terminal.start()
    m = Metrics(stages, attempt=attempt, world=world, begun=begun)
    m.enter(stages.at(1), flops)
    m.start()
    return m


def result(step: int, loss: float = 3.0, **fields: Any) -> StepResult:
    return StepResult(step, loss, 1.5, 1e-3 * step, 900, seconds=SECONDS, **fields)


def play(m: Metrics) -> None:
    """A plain step, one with details, a spike, a step without a finite loss; an evaluation in between."""
    m.step(result(1), total_tokens=900, data_s=0.5, extra={})
    details = {"residuals": [0.5, 0.25], "router_entropy": {"key": [0.1], "value": [0.2]}}
    m.step(result(2, 2.5), total_tokens=1800, data_s=0.5, extra=details)
    m.evaluation(2, {"holdout_loss": 2.75, "holdout_loss_double_passes": 2.5}, 640, 0.1)
    m.step(result(3, 9.0, spike=7.5, samples=[4, 5]), total_tokens=2700, data_s=0.5, extra={})
    skipped = result(4, math.nan, skipped="loss is nan", samples=[6, 7])
    m.step(skipped, total_tokens=3600, data_s=0.5, extra={"residuals": [math.nan, math.inf]})
    m.close()


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_every_step_has_a_row_with_what_it_was(tmp_path):
    play(sink(tmp_path))
    first, second, evaluation, spike, skipped = rows(tmp_path)
    fixed = {"attempt": 1, "step": 1, "loss": 3.0, "grad_norm": 1.5, "lr": 1e-3, "tokens": 900}
    assert fixed.items() <= first.items()
    assert first["time"] == {"data": 0.5, **SECONDS}
    assert first["tokens_per_s"] > 0
    # 3 and 4 MFLOP a token, 1000 tokens, two devices
    work = first["hardware_tflops_per_device"] / first["model_tflops_per_device"]
    assert work == pytest.approx(4 / 3, rel=1e-3)
    assert "mfu" not in first, "the peak of this processor is not known"
    assert second["residuals"] == [0.5, 0.25]
    assert (evaluation["holdout_loss"], evaluation["holdout_loss_double_passes"]) == (2.75, 2.5)
    assert (evaluation["step"], evaluation["holdout_tokens"]) == (2, 640)
    assert (spike["spike"], spike["samples"]) == (7.5, [4, 5])
    assert (skipped["loss"], skipped["skipped"], skipped["samples"]) == ("nan", "loss is nan", [6, 7])
    assert skipped["residuals"] == ["nan", "inf"]


def test_utilisation_is_work_over_the_devices_peak(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics.process_group, "peak_flops", lambda device: 1e12)
    play(sink(tmp_path))
    row = rows(tmp_path)[0]
    assert row["mfu"] == pytest.approx(row["model_tflops_per_device"], rel=1e-3)
    assert row["hfu"] == pytest.approx(row["hardware_tflops_per_device"], rel=1e-3)


def test_tensorboard_has_the_same_scalars(tmp_path):
    play(sink(tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found["loss"] == [(1, 3.0), (2, 2.5), (3, 9.0)], "NaN is no point of a curve"
    assert found["lr"] == [(s, pytest.approx(1e-3 * s)) for s in (1, 2, 3, 4)]
    assert found["time/backward"] == [(s, pytest.approx(0.2)) for s in (1, 2, 3, 4)]
    assert found["residuals/0"] == [(2, 0.5)]
    assert found["router_entropy/value/0"] == [(2, pytest.approx(0.2))]
    assert found["holdout_loss"] == [(2, 2.75)]
    assert {"grad_norm", "tokens", "tokens_per_s", "step_s", "spike"} <= found.keys()
    assert "step" not in found


def test_a_border_of_stages_is_marked_and_work_is_the_stages_own(tmp_path, monkeypatch):
    """Two steps of 1000 tokens, two of twice as many at half of the FLOPs; a resume says nothing again."""
    seconds = count()  # every step takes one
    monkeypatch.setattr(metrics, "time", types.SimpleNamespace(perf_counter=lambda: next(seconds)))
    monkeypatch.setattr(metrics.process_group, "peak_flops", lambda device: 1e12)
    changes = {"run__dir": str(tmp_path), "steps": 4, "batch__global_batch": 100}
    two = [{"until": 2}, {"batch": {"global_batch": 200}}]
    stages = plan(configuration.parse(changed(**changes, stages=two)), 10)
    for attempt, begun in ((1, 0), (2, 3)):
        m = Metrics(stages, attempt=attempt, world=World(0, 0, 2, CPU, "gloo"), begun=begun)
        m.enter(stages.at(max(1, begun)), Flops(3e6, 4e6) if begun == 0 else Flops(1.5e6, 2e6))
        m.start()
        for step in range(begun + 1, 5):
            if step == 3:
                m.enter(stages.at(3), Flops(1.5e6, 2e6))
            m.step(result(step), total_tokens=900 * step, data_s=0.0, extra={})
        m.close()
    found = rows(tmp_path)
    assert [row["stage"] for row in found] == [0, 0, 1, 1, 1]
    # 3 MFLOP x 1000 tokens, then 1.5 x 2000, on two devices of 1 TFLOP/s
    assert [row["mfu"] for row in found] == pytest.approx([0.0015] * 5, rel=1e-3)
    assert [row["step_s"] for row in found[:3]] == [1, 1, 1]
    assert m._steps_left(1) * 2000 == 1000 + 2 * 2000
    assert m._steps_left(3) == 1
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    texts = events.Tensors("border/text_summary")
    assert [(text.step, text.tensor_proto.string_val[0].decode()) for text in texts] == [
        (1, "stages.0: steps 1 to 2, 100 x 10 tokens a step"),
        (3, "stages.1: steps 3 to 4, 200 x 10 tokens a step"),
    ]
    assert [event.value for event in events.Scalars("stage")][:4] == [0, 0, 1, 1]


def test_steps_that_a_kill_made_void_are_no_points_of_tensorboard(tmp_path):
    """Killed at step 17 and gone on from 10: 30 steps are 30 points, as the second attempt had them."""
    for attempt, begun, last in ((1, 0, 17), (2, 10, 30)):
        m = sink(tmp_path, attempt=attempt, begun=begun)
        for step in range(begun + 1, last + 1):
            m.step(result(step, float(attempt)), total_tokens=900 * step, data_s=0.0, extra={})
        m.close()
    points = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [point.step for point in points] == list(range(1, 31))
    assert [point.value for point in points] == [1.0] * 10 + [2.0] * 20


def test_a_rollback_is_one_row_and_takes_tensorboard_back(tmp_path, caplog):
    m = sink(tmp_path)
    with caplog.at_level("INFO", "wm_ds"):
        for step in (1, 2, 3):
            m.step(result(step, 3.0 + step), total_tokens=900 * step, data_s=0.5, extra={})
        m.rolled_back(3, 1, (2, 3), 1)
        m.step(result(2, 2.0), total_tokens=1800, data_s=0.5, extra={"batch": 4})
        m.close()
    text = (
        "step 3: too many spikes in a row; back to the checkpoint of step 1, and batches 2 to 3 of the data"
    )
    assert caplog.text.count(text) == 1
    done = {"at": 3, "batches": [2, 3], "number": 1}
    assert rows(tmp_path)[3] == {"attempt": 1, "step": 1, "rollback": done}
    standing = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["loss"] for row in standing if "loss" in row] == [4.0, 2.0]
    points = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("loss")
    assert [(point.step, point.value) for point in points] == [(1, 4.0), (2, 2.0)]


def test_tensorboard_can_be_left_out(tmp_path):
    play(sink(tmp_path, tensorboard=False))
    assert not (tmp_path / "tensorboard").exists()
    assert len(rows(tmp_path)) == 5


def test_other_ranks_write_and_say_nothing(tmp_path, capsys):
    m = sink(tmp_path, rank=1)
    play(m)
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys):
    play(sink(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("step ") and "tokens/s" in line]
    assert [re.match(r"step (\d)/4  loss", line)[1] for line in steps] == ["1", "2", "4"]  # log.every = 2
    assert "step 3: loss 9.0000 is 7.5 sigma above its mean; samples [4, 5]" in lines
    assert "step 4: skipped, loss is nan; samples [6, 7]" in lines
    assert any(
        line.startswith("step 2: holdout loss 2.7500, holdout loss double passes 2.5") for line in lines
    )
    assert not any("\r" in line or "\x1b" in line for line in lines)


def test_a_terminal_gets_a_live_view(tmp_path):
    """On a real pseudo-terminal: the bar is redrawn in place, and messages scroll above it."""
    program = (
        "import pathlib, sys; from tests import test_metrics as t; "
        "m = t.sink(pathlib.Path(sys.argv[1])); t.play(m)"
    )
    import pty

    main, side = pty.openpty()
    env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "160"}
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=side,
        stderr=subprocess.DEVNULL,
        env=env,
        cwd=ROOT,
    )
    os.close(side)
    text = read_to_the_end(main).decode()
    assert child.wait(60) == 0
    assert "step 4/4" in text
    assert "\x1b[" in text, "nothing was redrawn in place"
    assert "samples [6, 7]" in text
    assert len(rows(tmp_path)) == 5


def test_an_interrupted_line_and_replayed_steps(tmp_path):
    """After a kill, the file may end in half a line; steps that are taken again are marked."""
    play(sink(tmp_path))
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"attempt": 1, "step": 5, "lo')
    assert last_step(tmp_path / "metrics.jsonl") == 4
    with open(tmp_path / "damaged.jsonl", "wb") as file:
        file.write(b'{"step": 3, "loss": 1}\n\xff\xfe\n{"step": 2, "loss": 1}\n')
    assert last_step(tmp_path / "damaged.jsonl") == 3
    m = sink(tmp_path, attempt=2)
    m.step(result(4), total_tokens=3600, data_s=0.0, extra={})
    m.step(result(5), total_tokens=4500, data_s=0.0, extra={})
    m.close()
    *_, half, again, new = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert half.endswith('"lo')
    assert (json.loads(again)["attempt"], json.loads(again)["replayed"]) == (2, True)
    assert "replayed" not in json.loads(new)


def test_a_missing_wandb_is_refused_on_all_ranks_and_none_waits(tmp_path):
    """Every rank by itself, before it meets the others: nobody hangs waiting for a rank that has left."""
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(changed(run__dir=str(tmp_path / "run"), log__wandb="project")))
    ranks = []
    for rank in range(2):
        env = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "wm_ds.train", str(path), f"deepspeed={ROOT}/ds_configs/zero2.json"]
        ranks.append(subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True))
    for rank in ranks:
        _, stderr = rank.communicate(timeout=120)
        assert rank.returncode == 2
        assert (
            stderr.strip().splitlines()[-1].startswith("error: log.wandb = 'project' but the package wandb")
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.4, "9s"), (312, "5m 12s"), (7620, "2h 07m"), (3 * 86400 + 4 * 3600 + 5, "3d 04h"), (math.inf, "?")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


class FakeWandb(types.ModuleType):
    """As much of the package as is called; `fails` happens in init, `log_fails` in log."""

    def __init__(self, fails: Any = None, log_fails: Any = None) -> None:
        super().__init__("wandb")
        self.fails, self.log_fails, self.begun, self.logged = fails, log_fails, [], []
        self.finished = 0

    def Settings(self, **settings: Any) -> dict[str, Any]:
        return settings

    def init(self, **options: Any) -> FakeWandb:
        if isinstance(self.fails, BaseException):
            raise self.fails
        if self.fails is not None:
            self.fails()
        self.begun.append(options)
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        if self.log_fails is not None:
            self.log_fails()
        self.logged.append(step)

    def finish(self) -> None:
        self.finished += 1


def test_wandb_ids_are_of_the_run_not_of_its_folders_name(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for folder in ("a/run", "b/run", "a/run"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        play(sink(tmp_path / folder, wandb="project"))
    first, second, again = (options["id"] for options in fake.begun)
    assert first == again != second
    assert {(o["name"], o["project"], o["resume"]) for o in fake.begun} == {("run", "project", "allow")}
    # The third attempt takes the first one's steps again: they are there.
    assert fake.logged == [1, 2, 2, 3, 4] * 2
    assert fake.finished == 3


def lost() -> None:
    raise RuntimeError("connection\nlost")


@pytest.mark.parametrize("how", ["no key", "exit", "silence", "later", "later silence"])
def test_wandb_is_never_fatal_and_costs_no_minutes(tmp_path, monkeypatch, capsys, how):
    gone = threading.Event()
    fails = {"no key": RuntimeError("no API key\nconfigured"), "exit": SystemExit(1), "silence": gone.wait}
    log_fails = {"later": lost, "later silence": gone.wait}
    fake = FakeWandb(fails.get(how), log_fails.get(how))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(trackers, "SECONDS", 0.2 if "silence" in how else 20)
    play(sink(tmp_path, wandb="project"))
    gone.set()
    told = [line for line in "".join(capsys.readouterr()).splitlines() if "Weights & Biases" in line]
    why = {
        "no key": "no Weights & Biases in this attempt: no API key configured (training goes on",
        "exit": "no Weights & Biases in this attempt: 1 (training goes on",
        "silence": "no Weights & Biases in this attempt: no answer within 0.2 s (training goes on",
        "later": "step 1: no more Weights & Biases: connection lost",
        "later silence": "step 1: no more Weights & Biases: no answer within 0.2 s",
    }
    assert len(told) == 1
    assert why[how] in told[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize("code", [0, 3])
def test_a_hook_of_wandb_that_waits_for_ever_does_not_keep_the_process(code):
    """Its exit code is the run's, what was printed is there, and hooks that do end are waited for."""
    program = (
        "import atexit, sys, threading\n"
        "from wm_ds.run import trackers\n"
        "trackers.SECONDS, sys.modules['wandb'] = 0.3, trackers\n"
        "atexit.register(threading.Event().wait)\n"
        "atexit.register(print, 'a hook that ends', flush=True)\n"
        f"trackers.end({code})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, "a hook that ends\n"), done.stderr


class FakeMlflow(types.ModuleType):
    """As much of the package as is called: one server, for all clients."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.entities = types.ModuleType("mlflow.entities")
        self.entities.Metric = lambda name, value, now, step: (name, value, step)
        self.experiments, self.runs, self.status = {}, [], []

    def MlflowClient(self) -> FakeMlflow:
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return self.experiments.get(name)

    def create_experiment(self, name: str) -> str:
        self.experiments[name] = types.SimpleNamespace(experiment_id=name)
        return name

    def create_run(self, experiment: str, run_name: str) -> Any:
        self.runs.append([])
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=str(len(self.runs) - 1)))

    def update_run(self, run: str, status: str) -> None:
        self.status.append((run, status))

    def log_batch(self, run: str, metrics: list[tuple]) -> None:
        self.runs[int(run)] += metrics

    def set_terminated(self, run: str) -> None:
        self.status.append((run, "FINISHED"))


def test_mlflow_goes_on_in_its_run_and_doubles_no_step(tmp_path, monkeypatch):
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", fake.entities)
    play(sink(tmp_path, mlflow="paper"))
    again = sink(tmp_path, mlflow="paper", attempt=2, begun=2)
    for step in (3, 4, 5):
        again.step(result(step, 2.0), total_tokens=step * 900, data_s=0.5, extra={})
    again.close()
    assert list(fake.experiments) == ["paper"]
    (logged,) = fake.runs
    losses = [(step, value) for name, value, step in logged if name == "loss"]
    assert losses == [(1, 3.0), (2, 2.5), (3, 9.0), (5, 2.0)]  # step 4 had no number
    assert ("holdout_loss", 2.75, 2) in logged
    assert ("time/forward", 0.1, 1) in logged
    assert fake.status == [("0", "RUNNING"), ("0", "FINISHED")] * 2


def test_mlflow_itself_takes_what_is_sent(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed: the fake stands in")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "server").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    folder = tmp_path / "run"
    folder.mkdir()
    play(sink(folder, mlflow="paper"))
    play(sink(folder, mlflow="paper", attempt=2))
    client = mlflow.MlflowClient()
    run = client.get_run((folder / "mlflow_run").read_text().strip())
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 3.0), (2, 2.5), (3, 9.0)]


class FullDisk:
    """A raw file whose disk takes `room` bytes, then none; room may be given later."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def close(self) -> None:
        self.file.close()


def test_a_full_disk_costs_rows_and_one_line_but_not_the_run(tmp_path, capsys):
    m = sink(tmp_path)
    disk = m._file = FullDisk(m._file, 100)  # less than a row
    for step in (1, 2):
        m.step(result(step), total_tokens=900, data_s=0.5, extra={})
    disk.room = 10_000
    m.step(result(3), total_tokens=900, data_s=0.5, extra={})
    m.close()
    half, row = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(half) == 100
    assert json.loads(row)["step"] == 3
    told = [line for line in "".join(capsys.readouterr()).splitlines() if "No space left" in line]
    why = "metrics.jsonl: No space left on device; training goes on, without rows from step 1 on "
    why += "until there is room"
    assert told == [why]


def test_rows_begin_when_the_file_can_be_opened(tmp_path, capsys):
    """A folder stands in its place for a while, as a disk may be full for a while."""
    (tmp_path / "metrics.jsonl").mkdir()
    m = sink(tmp_path, tensorboard=False)
    m.step(result(1), total_tokens=900, data_s=0.5, extra={})
    (tmp_path / "metrics.jsonl").rmdir()
    m.step(result(2), total_tokens=1800, data_s=0.5, extra={})
    m.close()
    assert [row["step"] for row in rows(tmp_path)] == [2]
    told = [line for line in "".join(capsys.readouterr()).splitlines() if "metrics.jsonl" in line]
    assert told == [
        "metrics.jsonl: Is a directory; training goes on, without rows from step 1 on until there is room"
    ]


def test_a_damaged_file_of_rows_is_no_obstacle(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 3, "loss": 1.0}\n\xff\xfe\0 rubbish')
    assert last_step(tmp_path / "metrics.jsonl") == 3
    m = sink(tmp_path, attempt=2)
    m.step(result(4), total_tokens=900, data_s=0.5, extra={})
    m.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_bytes().splitlines()[-1])["step"] == 4


def test_tensorboard_that_fails_is_left(tmp_path, monkeypatch, capsys):
    m = sink(tmp_path, tensorboard=True)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(m._tensorboard, "add_scalar", full)
    play(m)
    told = [line for line in "".join(capsys.readouterr()).splitlines() if "TensorBoard" in line]
    assert len(told) == 1
    assert "step 1: no more TensorBoard in this attempt" in told[0]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 5
