"""The trainer as a command: straight, stopped and resumed runs, refusals, the dry run, what it writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support import toy_corpus
from tests.support.checkpoint_launch import metric_rows, train_alone
from tests.support.settings import MODEL, ROOT, trainable, with_changes
from wm_ds import train

pytestmark = pytest.mark.alone

STEPS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_corpus.packed(tmp_path_factory.mktemp("data"), 200, "--seq-len", 24, "--holdout", 8)


def run_file(folder: Path, data: Path, **changes: Any) -> Path:
    raw = trainable(
        data,
        run={"dir": str(folder / "run"), "deterministic": True},
        model=MODEL | {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "num_groups": 4},
        batch={"global_batch": 4, "micro_batch": 2},
        optim={"lr": 1e-2, "warmup": 2},
        precision="autocast",
        recompute="group",
        steps=STEPS,
        evaluate={"every": 3, "sequences": 4},
        checkpoint={"every": 4},
        log={"details_every": 3, "every": 1},
    )
    raw = with_changes(raw, **changes)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(raw))
    return path


def forked(path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """The trainer in a process that need not import torch first."""
    return train_alone(path.parent / f"rank-{time.monotonic_ns()}", [str(path), *overrides])


def launch(path: Path, *overrides: str, dynamo: bool = False) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "WM_ATTEMPT")}
    env |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": str(int(not dynamo)), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "wm_ds.train", str(path), *overrides]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def rows(run: Path, key: str) -> list[dict[str, Any]]:
    return [row for row in metric_rows(run) if key in row]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, data: Path) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("straight")
    path = run_file(folder, data)
    done = launch(path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "warnings of libraries; those that nobody can act on belong into noise.py"
    assert "built successfully" not in done.stdout
    return folder / "run", path


def test_a_run_leaves_everything_that_it_promises(straight):
    run, _ = straight
    assert json.loads((run / "done").read_text())["step"] == STEPS
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step_{STEPS:08d}"
    for name in ("config.yaml", "ds_config.json", "environment.json"):
        assert (run / name).is_file()
    assert list((run / "tensorboard").iterdir())
    steps = rows(run, "loss")
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    for row in steps:
        assert {"grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "time", "attempt"} <= row.keys()
        assert row["model_tflops_per_device"] < row["hardware_tflops_per_device"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    evaluations = rows(run, "holdout_loss")
    assert [row["step"] for row in evaluations] == [3, 6]
    assert all("holdout_loss_double_passes" in row for row in evaluations)


def test_samples_on_the_way_change_no_number(straight, data, tmp_path):
    """Losses are the straight run's bit for bit, and the texts are what the model itself would continue."""
    samples = {"prompts": ["the", "a b"], "every": 4, "tokens": 5, "temperature": 0.0}
    written = []
    for stage in (2, 3):
        folder = tmp_path / f"stage{stage}"
        folder.mkdir()
        log = {"details_every": 3, "every": 1, "samples": samples}
        done = forked(run_file(folder, data, log=log), f"deepspeed=ds_configs/zero{stage}.json")
        assert done.returncode == 0, done.stdout + done.stderr
        with open(folder / "run/samples.jsonl") as file:
            written.append([json.loads(line) for line in file])
        if stage == 2:
            assert [r["loss"] for r in rows(folder / "run", "loss")] == [
                r["loss"] for r in rows(straight[0], "loss")
            ]
    from wm_ds import trained
    from wm_ds.packing.tokenizer import make_encoder, open_decoder, open_tokenizer

    assert [row["step"] for row in written[0]] == [4, 6]
    assert [row["samples"] for row in written[0]] == [row["samples"] for row in written[1]]
    source = trained.find(tmp_path / "stage2/run")
    lm, decode = source.load(torch.float32), open_decoder(source.tokenizer_dir())
    for one in written[0][-1]["samples"]:
        ids = make_encoder(open_tokenizer(str(source.tokenizer_dir()))).encode([one["prompt"]])[0].tolist()
        for _ in range(5):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                found = lm(
                    input_ids=torch.tensor([ids]), schedule=lm.config.training_schedule(), use_cache=False
                )
            ids.append(int(found.logits[0, -1].argmax()))
        assert decode(ids[-5:]) == one["text"]


def test_details_describe_the_iteration(straight):
    details = rows(straight[0], "residuals")
    assert [row["step"] for row in details] == [3, 6]
    for row in details:
        assert len(row["residuals"]) == 3
        assert all(r >= 0 for r in row["residuals"])
        for branch in ("key", "value"):
            # k = 2 channels over L = 4 sources
            assert len(row["router_entropy"][branch]) == len(row["feedback_share"][branch]) == 2
            assert all(0 <= e <= 1.3863 for e in row["router_entropy"][branch])
            assert all(0 <= s <= 1 for s in row["feedback_share"][branch])
        assert len(row["peak_memory_gib"]) == 1


def test_a_stopped_and_resumed_run_is_the_straight_one_bit_for_bit(straight, data, tmp_path):
    path = run_file(tmp_path, data)
    run = tmp_path / "run"
    limited = forked(path, "run.time_limit_minutes=0.0001")
    assert limited.returncode == 0, limited.stdout + limited.stderr
    stopped = json.loads((run / "stopped").read_text())
    assert stopped["reason"] == "time limit"
    assert stopped["step"] == 1
    resumed = forked(path)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert not (run / "stopped").exists()
    ours, theirs = rows(run, "loss"), rows(straight[0], "loss")
    assert [row["attempt"] for row in ours] == [1, 2, 2, 2, 2, 2]
    for row, wanted in zip(ours, theirs, strict=True):
        same = ("step", "loss", "grad_norm", "lr", "tokens")
        assert [row[k] for k in same] == [wanted[k] for k in same]
    weights = "checkpoints/step_00000006"
    from wm_ds.checkpoint.manager import load_weights

    ours, theirs = (dict(load_weights(r / weights)) for r in (run, straight[0]))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


def test_starting_from_an_explicit_checkpoint(straight, data, tmp_path):
    path = run_file(tmp_path, data)
    missing = forked(path, f"checkpoint.resume={tmp_path / 'nowhere'}")
    assert missing.returncode == 2, "refused: a batch script must not try again"
    assert f"checkpoint.resume = {tmp_path / 'nowhere'}: " in missing.stderr
    assert not list((tmp_path / "run").glob("*.*")), "a refused start leaves nothing but its attempt"
    done = forked(path, f"checkpoint.resume={straight[0] / 'checkpoints' / 'step_00000004'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"yet: starting from {straight[0] / 'checkpoints' / 'step_00000004'}\n" in done.stdout
    assert "starting at step 0" not in done.stdout
    ours = rows(tmp_path / "run", "loss")
    assert [row["step"] for row in ours] == [5, 6]
    assert [row["loss"] for row in ours] == [row["loss"] for row in rows(straight[0], "loss")[4:]]


def test_other_schedules_train_from_yaml(data, tmp_path):
    path = run_file(tmp_path, data)
    wave = ("model.schedule=wavefront", "model.chunk_size=8", "model.relaxation=0.8", "steps=2")
    done = forked(path, *wave)
    assert done.returncode == 0, done.stdout + done.stderr
    evaluated = rows(tmp_path / "run", "holdout_loss")
    assert "holdout_loss_double_passes" in evaluated[-1]


@pytest.mark.slow
def test_compiled_blocks_train_alike_and_say_what_compiling_took(straight, data, tmp_path):
    done = launch(run_file(tmp_path, data), "compile=true", "entries_on_host=true", "steps=2", dynamo=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ours, theirs = rows(tmp_path / "run", "loss"), rows(straight[0], "loss")[:2]
    assert [row["loss"] for row in ours] == pytest.approx([row["loss"] for row in theirs], rel=1e-4)
    assert ours[0]["compile_s"] > 0
    assert "went into torch.compile" in done.stdout


def test_steps_without_a_finite_loss_end_the_run_and_leave_its_checkpoint(data, tmp_path):
    """The first update, of an absurd size, spoils the weights; every step after it is skipped."""
    path = run_file(tmp_path, data)
    absurd = ("optim.lr=1e30", "optim.warmup=0", "guard.max_skipped=3", "checkpoint.every=1")
    failed = forked(path, *absurd)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "3 steps in a row were skipped (guard.max_skipped = 3)" in failed.stderr
    assert "Traceback" not in failed.stderr
    first, *others = rows(tmp_path / "run", "loss")
    assert "skipped" not in first
    assert [row["step"] for row in others] == [2, 3]
    for row in others:
        assert row["skipped"]
        assert len(row["samples"]) == 4
    from wm_ds.checkpoint.manager import find_latest, load_weights, verify
    from wm_ds.run.state import state_of

    latest = find_latest(tmp_path / "run")
    assert latest.name == "step_00000003"
    verify(latest)
    before, after = (dict(load_weights(latest.parent / f"step_{n:08d}")) for n in (2, 3))
    assert all((before[name] == after[name]).all() for name in before), "a skipped step changed the weights"
    assert not (tmp_path / "run" / "done").exists()
    assert not (tmp_path / "run" / "stopped").exists()
    # A person who lists runs finds the reason, without its log.
    state = state_of(tmp_path / "run")
    assert (state.state, state.step, state.checkpoint) == ("failed", 3, 3)
    assert "3 steps in a row were skipped" in state.reason


def refusal(capsys: pytest.CaptureFixture[str], path: Path, *overrides: str) -> str:
    assert train.main([str(path), *overrides]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("error: ")
    return captured.err


def test_bad_input_is_refused_in_one_line(capsys, data, tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    path = run_file(tmp_path, data)
    assert "nowhere.yaml" in refusal(capsys, tmp_path / "nowhere.yaml")
    assert "did you mean optim.lr?" in refusal(capsys, path, "optim.lrr=1")
    three = refusal(capsys, path, "compile=true", "deepspeed=ds_configs/zero3.json")
    assert "compile = true" in three
    assert "zero3.json" in three
    assert "entries_on_host" in refusal(capsys, path, "entries_on_host=true", "model.feedback=false")
    assert "global_batch 5 does not divide" in refusal(capsys, path, "batch.global_batch=5")
    assert "nowhere" in refusal(capsys, path, "data.train=nowhere")
    assert "log.samples.prompts.0 is empty" in refusal(capsys, path, 'log.samples={prompts: [""]}')
    other = toy_corpus.byte_tokenizer(tmp_path / "other", filler_tokens=3)
    wrong = refusal(capsys, path, "log.samples={prompts: [a], tokens: 2}", f"data.tokenizer={other}")
    assert f"{other} is not the tokenizer that packed {data}" in wrong
    assert "longer than the model's rows of 24" in refusal(capsys, path, "log.samples={prompts: [hello]}")
    assert "model.vocab_size = 10 is smaller" in refusal(capsys, path, "model.vocab_size=10")
    assert "deepspeed = nowhere.json" in refusal(capsys, path, "deepspeed=nowhere.json")
    assert "wandb is not installed" in refusal(capsys, path, "log.wandb=project")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "RANK, LOCAL_RANK missing" in refusal(capsys, path)


def test_a_directory_with_another_run_is_refused(straight, tmp_path):
    _, path = straight
    other = forked(path, "model.num_groups=2")
    assert other.returncode == 2
    assert other.stderr.strip().count("\n") == 0, other.stderr
    assert "holds another run: model.num_groups is 4 there and 2 here" in other.stderr


def test_a_directory_that_is_no_run_is_refused(data, tmp_path):
    path = run_file(tmp_path, data)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    refused = forked(path)
    assert refused.returncode == 2
    assert "is no run directory" in refused.stderr
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.tex"]
