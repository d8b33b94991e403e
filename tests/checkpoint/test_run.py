"""Checkpoints of the real trainer: WhiteMatter on packed data, stopped, killed, resumed, at other sizes."""

import json
import os
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.support import toy_corpus
from tests.support.checkpoint_launch import finish, launch_run, logs, metric_rows, step, train_run
from tests.support.settings import ROOT, trainable
from tools.reshape_checkpoint import main as reshape_checkpoint
from wm_ds.checkpoint.directory import list_checkpoints
from wm_ds.checkpoint.format import read_manifest
from wm_ds.checkpoint.manager import find_latest, load_weights, read_tensor, verify

pytestmark = pytest.mark.alone

STEPS = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict:
    data = toy_corpus.packed(tmp_path_factory.mktemp("data"), 400, "--seq-len", 32, "--holdout", 8)
    return trainable(data, steps=STEPS)


def losses(run_dir: Path) -> dict[int, float]:
    """Training loss by step; of a step that was taken twice, the last."""
    return {row["step"]: row["loss"] for row in metric_rows(run_dir) if "loss" in row}


def holdout(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["holdout_loss"] for row in metric_rows(run_dir) if "holdout_loss" in row}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory, config) -> Path:
    base = tmp_path_factory.mktemp("unbroken")
    train_run(base, config, "run", 2)
    return base / "run"


def wait_for(folder: Path, run_dir: Path, number: int) -> None:
    deadline = time.monotonic() + 90
    while not (run_dir / "metrics.jsonl").exists() or number not in losses(run_dir):
        assert time.monotonic() < deadline, logs(folder)
        time.sleep(0.01)


@pytest.mark.parametrize("ending", ["SIGUSR1", "SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.slow)])
def test_stopped_or_killed_run_continues_bitwise(tmp_path, config, unbroken, ending):
    """A signal to rank 1: both save one step and exit 0 with a marker; a kill: neither. Then as unbroken."""
    ranks, folder = launch_run(tmp_path, config, "run", 2)
    run_dir = tmp_path / "run"
    wait_for(folder, run_dir, 3)
    os.kill(ranks[1].pid, getattr(signal, ending))
    codes = finish(ranks, 90)
    if ending == "SIGKILL":
        assert codes[1] == -signal.SIGKILL
        assert codes[0] not in (0, None), logs(folder)
        assert not (run_dir / "stopped").exists()
    else:
        assert codes == [0, 0], logs(folder)
        marker = json.loads((run_dir / "stopped").read_text())
        assert marker["reason"] == ending
        assert find_latest(run_dir) == step(run_dir, marker["step"])
        assert max(losses(run_dir)) == marker["step"]
    train_run(tmp_path, config, "run", 2)
    assert (run_dir / "done").exists()
    assert not (run_dir / "stopped").exists()
    assert losses(run_dir) == losses(unbroken)
    assert holdout(run_dir) == holdout(unbroken)
    mine, theirs = read_manifest(step(run_dir, STEPS)), read_manifest(step(unbroken, STEPS))
    fragments = [name for name in theirs.files if name.endswith(".safetensors")]
    assert len(fragments) == 2
    for name in fragments:
        assert mine.files[name]["sha256"] == theirs.files[name]["sha256"], name
    assert (step(run_dir, STEPS) / "client.json").read_text() == (
        step(unbroken, STEPS) / "client.json"
    ).read_text()


def test_a_profiled_run_is_the_unprofiled_one_bitwise(tmp_path, config, unbroken):
    profiled = ("profile.steps=[3, 5]", "profile.ranks=[0, 1]", "profile.memory=true")
    train_run(tmp_path, config, "run", 2, *profiled)
    assert losses(tmp_path / "run") == losses(unbroken)
    mine, theirs = (read_manifest(step(run, STEPS)) for run in (tmp_path / "run", unbroken))
    assert {n: r for n, r in mine.files.items() if "safetensors" in n} == {
        n: r for n, r in theirs.files.items() if "safetensors" in n
    }
    written = {path.name for path in (tmp_path / "run" / "profiles" / "step_00000003").iterdir()}
    for rank in (0, 1):
        assert f"rank_{rank:05d}.memory.json" in written
        assert {f"rank_{rank:05d}.trace.json", f"rank_{rank:05d}.trace.json.gz"} & written


def test_a_run_whose_folder_is_lost_goes_on_from_its_mirror_bitwise(tmp_path, config, unbroken):
    far = tmp_path / "far"
    mirrored = f"checkpoint.mirror=file://{far}"
    train_run(tmp_path, config, "run", 2, mirrored, "run.time_limit_minutes=0.0001")
    assert json.loads((tmp_path / "run" / "stopped").read_text())["step"] == 1
    shutil.rmtree(tmp_path / "run")
    train_run(tmp_path, config, "run", 2, mirrored, "checkpoint.mirror_keep_last=2")
    mine, whole = losses(tmp_path / "run"), losses(unbroken)
    assert mine == {step: loss for step, loss in whole.items() if step > 1}
    for path in far.glob("step_*"):
        assert verify(path) == []
    assert step(tmp_path / "run", STEPS).name in {path.name for path in far.glob("step_*")}
    assert len(list(far.glob("step_*"))) == 2
    news = [row["mirror"] for row in metric_rows(tmp_path / "run") if "mirror" in row]
    assert all(row["failures"] == 0 for row in news)


@pytest.mark.parametrize(
    ("world", "stage"), [(1, 3), (3, 1), (4, 2), pytest.param(2, 0, marks=pytest.mark.slow)]
)
def test_run_continues_at_another_size_and_stage(tmp_path, config, unbroken, world, stage):
    """Stopped at two ranks and ZeRO 2 after step 4, continued elsewhere: losses within 1e-4."""
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken, run_dir)
    (run_dir / "done").unlink()
    for late in (6, 8):
        shutil.rmtree(step(run_dir, late))
    (run_dir / "checkpoints" / "latest").write_text("step_00000004\n")
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(text.replace(str(unbroken), str(run_dir)))
    (run_dir / "metrics.jsonl").unlink()
    micro = 12 // world // 2 or 1  # two micro-batches a step, as at two ranks
    train_run(
        tmp_path,
        config,
        "run",
        world,
        f"deepspeed={ROOT}/ds_configs/zero{stage}.json",
        f"batch.micro_batch={micro}",
    )
    assert read_manifest(step(run_dir, STEPS)).run["world_size"] == world
    assert read_manifest(step(run_dir, STEPS)).run["zero_stage"] == stage
    whole, mine = losses(unbroken), losses(run_dir)
    assert sorted(mine) == [5, 6, 7, 8]
    for number in mine:
        assert abs(mine[number] - whole[number]) < 1e-4, (number, mine[number], whole[number])
    for name, tensor in load_weights(step(run_dir, STEPS)):
        assert torch.allclose(tensor, read_tensor(step(unbroken, STEPS), name), atol=1e-3), name


def test_a_reshaped_run_goes_on_in_its_new_directory(tmp_path, config, unbroken):
    """Of the whole run only one checkpoint, laid out anew: the start accepts it and continues bit by bit."""
    run_dir = tmp_path / "run"
    assert reshape_checkpoint([str(step(unbroken, 4)), "--ranks", "3", "--out", str(run_dir)]) == 0
    train_run(tmp_path, config, "run", 2)
    assert losses(run_dir) == {number: loss for number, loss in losses(unbroken).items() if number > 4}
    old, new = (json.loads((folder / "history.json").read_text()) for folder in (unbroken, run_dir))
    assert new["data"] == old["data"]
    assert new["rates"] == old["rates"]
    ranks, folder = launch_run(tmp_path, config, "run", 2, "run.seed=4")
    assert finish(ranks, 90) != [0, 0]
    assert "holds another run: run.seed is 3 there and 4 here" in (folder / "rank_0.log").read_text()


def test_failed_save_ends_the_run_with_the_last_good_one_in_place(tmp_path, config):
    """Rank 1 cannot write: non-zero on both within a minute, no marker, and keep_last 1 kept the good one."""
    run_dir = tmp_path / "run"
    train_run(tmp_path, config, "run", 2, "steps=2", "checkpoint.keep_last=1", "evaluate.every=null")
    (run_dir / "done").unlink()
    ranks, folder = launch_run(
        tmp_path, config, "run", 2, "steps=2000", "checkpoint.keep_last=1", "evaluate.every=null"
    )
    wait_for(folder, run_dir, 3)
    resource.prlimit(ranks[1].pid, resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
    started = time.monotonic()
    codes = finish(ranks, 60)
    assert time.monotonic() - started < 60
    assert codes == [1, 1], logs(folder)
    assert "rank 1: [Errno 27] File too large" in (folder / "rank_0.log").read_text()
    assert not (run_dir / "done").exists()
    assert not (run_dir / "stopped").exists()
    good = find_latest(run_dir)
    assert verify(good) == []
    assert [c.path for c in list_checkpoints(run_dir)] == [good]


def test_damaged_checkpoint_is_refused_before_the_first_step(tmp_path, config, unbroken):
    run_dir = tmp_path / "run"
    shutil.copytree(unbroken, run_dir)
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(text.replace(str(unbroken), str(run_dir)))
    target = step(run_dir, STEPS) / "rank_00001.safetensors"
    data = bytearray(target.read_bytes())
    data[-5] ^= 1
    target.write_bytes(data)
    before = (run_dir / "metrics.jsonl").read_text()
    ranks, folder = launch_run(tmp_path, config, "run", 2, "steps=10")
    assert finish(ranks, 90) == [1, 1], logs(folder)
    said = (folder / "rank_0.log").read_text()
    assert f"error: cannot resume: rank 1: {target}: is damaged" in said.replace("rank 0: ", "rank 1: ")
    assert f"the newest complete one is {step(run_dir, 6)}" in said
    assert (run_dir / "metrics.jsonl").read_text() == before
    remedy = f"tools/reshape_checkpoint.py {run_dir} --rewind 6"
    assert remedy in said
    assert reshape_checkpoint(remedy.split()[1:]) == 0
    train_run(tmp_path, config, "run", 2, "steps=10")
    assert max(losses(run_dir)) == 10
