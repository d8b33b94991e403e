"""Running a sweep: with stand-ins for training and measuring, killed and gone on with; and in earnest."""

from __future__ import annotations

import io
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn.functional import cross_entropy
from transformers import Qwen3ForCausalLM

from tests.sweep import fake_measure, fake_train
from tests.sweep.conftest import POOL, write_sweep
from tools import sweep as tool
from wm_ds import trained
from wm_ds.checkpoint.format import Reader
from wm_ds.config import load as configuration
from wm_ds.data.sequences import PackedSequences
from wm_ds.sweep import measure, slurm, work
from wm_ds.sweep.description import SweepError, load
from wm_ds.sweep.runs import runs_of
from wm_ds.sweep.table import Table
from wm_ds.sweep.task import Task

ROOT = Path(__file__).parents[2]


@pytest.fixture
def stand_ins(monkeypatch):
    monkeypatch.setattr(work, "TRAINER", "tests.sweep.fake_train")
    monkeypatch.setattr(measure, "MEASURER", "tests.sweep.fake_measure")
    monkeypatch.setattr(work, "POLL_S", 0.02)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return monkeypatch


def results(path: Path) -> dict:
    return json.loads(Path(load(path).results).read_text())


def attempts(path: Path) -> list[list[str]]:
    """What was done with each run, in order."""
    return [[a["what"] for a in run.record()["attempts"]] for run in runs_of(load(path), path)]


def test_a_sweep_runs_once_and_an_added_arm_alone(write, stand_ins, capfd):
    path = write(seeds=[0, 1])
    assert tool.main([str(path), "--jobs", "2"]) == 0
    said = capfd.readouterr().out
    assert "vanilla seed 1: done" in said
    assert "\x1b" not in said  # no terminal, no table
    assert attempts(path) == [["train", "measure"]] * 4
    arms = results(path)["arms"]
    assert [run["seed"] for run in arms["pool"]["runs"]] == [0, 1]
    assert arms["pool"]["summary"]["perplexity"] == {"mean": 20.0, "deviation": 0.0, "n": 2}
    assert arms["pool"]["summary"]["best_perplexity"]["mean"] == 20.5
    assert arms["pool"]["summary"]["wall_s"]["mean"] > 0
    # Again, and with an arm more.
    write(
        seeds=[0, 1],
        arms={"vanilla": {}, "more": {"set": {"model.num_hidden_layers": 3}}, "pool": {"set": POOL}},
    )
    assert tool.main([str(path)]) == 0
    assert attempts(path) == [["train", "measure"]] * 6
    assert {name: len(arm["runs"]) for name, arm in results(path)["arms"].items()} == {
        "vanilla": 2, "more": 2, "pool": 2
    }  # fmt: skip


def test_a_failed_run_is_reported_and_left_and_the_others_go_on(write, stand_ins, tmp_path, capfd):
    path = write()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "fail").touch()
    assert tool.main([str(path)]) == 1
    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert (
        "1 of 2 runs are not done; the first: vanilla seed 0 failed, exit code 3: error: told to fail"
        in error[0]
    )
    assert attempts(path) == [["train"], ["train", "measure"]]
    assert [len(arm["runs"]) for arm in results(path)["arms"].values()] == [0, 1]
    # Nothing is tried again by itself; the same command does it, once the cause is gone.
    (tmp_path / "runs" / "fail").unlink()
    assert tool.main([str(path)]) == 0
    assert attempts(path) == [["train", "train", "measure"], ["train", "measure"]]


def in_a_fork(words: list[str], errors: Path) -> BaseProcess:
    """The command in a process of its own, which has imported everything already."""

    def run() -> None:
        sys.stderr = errors.open("w", buffering=1)
        os._exit(tool.main(words))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    return process


def until(condition) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.alone
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_stopped_or_killed_goes_on(write, stand_ins, tmp_path, number):
    """However it ends, its runs are asked to save and stop, and the same command goes on with them."""
    path = write(base={"steps": 4})
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "hold").touch()
    process = in_a_fork([str(path), "--jobs", "2"], tmp_path / "errors")
    until(lambda: len(list(runs.glob("*/started"))) == 2)
    os.kill(process.pid, number)
    process.join(60)
    if number != signal.SIGKILL:
        assert process.exitcode == 130
        assert (tmp_path / "errors").read_text() == "error: stopped; the same command goes on from here\n"
    # By the kernel's signal, where the sweep could send none.
    until(lambda: len(list(runs.glob("*/stopped"))) == 2)
    assert not list(runs.glob("*/done"))
    (runs / "hold").unlink()
    assert tool.main([str(path)]) == 0
    assert all(row["runs"] for row in results(path)["arms"].values())


def test_measured_parts_are_kept_for_the_same_settings_and_step_alone(tmp_path, write):
    settings = load(write()).measure
    output = tmp_path / "measured.json"
    output.write_text(json.dumps({"settings": settings.model_dump(), "step": 4, "model": {"a": 1}}))
    assert measure.found_parts(output, settings, 4)["model"] == {"a": 1}
    assert measure.found_parts(output, settings, 5) == {}
    assert measure.found_parts(output, settings.model_copy(update={"some": 2}), 4) == {}
    output.write_text('{"half')
    assert measure.found_parts(output, settings, 4) == {}


# In earnest.


@pytest.fixture(scope="module")
def swept(tmp_path_factory, toy_data) -> Path:
    """Two arms with one seed, trained and measured."""
    path = write_sweep(tmp_path_factory.mktemp("swept"), toy_data)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "tools/sweep.py", str(path), "--jobs", "2", "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return path


@pytest.mark.long
@pytest.mark.alone
def test_a_tiny_sweep_in_earnest(swept):
    arms = results(swept)["arms"]
    for name, channels in (("vanilla", 2), ("pool", 1)):
        (entry,) = arms[name]["runs"]
        measured = entry["measured"]
        assert measured["model"]["cache_bytes_per_token"] == 2 * 2 * channels * 1 * 8  # k and v, bf16, G x d
        assert entry["tokens"] == 4 * 4 * 24
        assert entry["training"]["cpu_s"] > 0
    pool = arms["pool"]["runs"][0]["measured"]
    assert len(pool["passes"]["perplexities"]) == 2
    # Trained with three passes over groups of two: six positions of the 24 are exact, the rest nearly so.
    assert pool["passes"]["as_trained"] == pytest.approx(pool["exact"]["perplexity"], rel=0.05)
    curves = {(one["groups"], one["start"]): one["perplexities"] for one in pool["starts"]["curves"]}
    assert curves.keys() == {(g, start) for g in (1, 2, 4) for start in ("embedding", "layerwise")}
    assert curves[2, "embedding"][:2] == pool["passes"]["perplexities"]
    assert curves[2, "layerwise"][2] == pytest.approx(pool["exact"]["perplexity"], rel=0.05)
    assert curves[2, "layerwise"][0] != curves[2, "embedding"][0]
    (jacobi,) = pool["converge"]["groups"]
    assert jacobi["groups"] == 1
    assert jacobi["reached"]["exact"]["passes"] == len(jacobi["perplexities"]) <= 4
    vanilla = arms["vanilla"]["runs"][0]["measured"]
    assert vanilla["exact"]["perplexity"] == vanilla["passes"]["as_trained"]


@pytest.mark.long
@pytest.mark.alone
def test_the_perplexity_is_that_of_a_naive_loop(swept, toy_data):
    """Vanilla's checkpoint in transformers' own Qwen3, document by document, without masks."""
    run = runs_of(load(swept), swept)[0]
    assert run.arm == "vanilla"
    source = trained.find(run.folder)
    lm = Qwen3ForCausalLM(source.hf_config()).eval()
    with Reader(source.path) as reader, torch.no_grad():
        for name, parameter in lm.named_parameters():
            reader.read_into(parameter.view(-1), name, "weight", 0)
    rows = PackedSequences(toy_data, "holdout")
    total, tokens = 0.0, 0
    for row in (rows[i] for i in range(4)):
        for document in range(int(row.document_ids.max()) + 1):
            inside = row.document_ids == document
            with torch.no_grad():
                logits = lm(row.input_ids[inside][None]).logits[0]
            total += cross_entropy(logits, row.labels[inside], reduction="sum").item()
            tokens += int((row.labels[inside] != -100).sum())
    found = results(swept)["arms"]["vanilla"]["runs"][0]["measured"]["perplexity"]
    assert found["tokens"] == tokens
    assert found["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)


def test_slurm_gets_the_list_of_what_is_not_done(write, stand_ins, monkeypatch, tmp_path, capfd):
    path = write(arms={"vanilla": {}, "pool": {"set": POOL}})
    submitted: list[list[str]] = []

    def run(command, **_):
        submitted.append(command)
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(slurm.subprocess, "run", run)
    assert tool.main([str(path), "--slurm"]) == 0
    (command,) = [words for words in submitted if words[0] == "bash"]
    assert command[1:3] == ["slurm/submit.sh", "--list"]
    lines = [line.split("\t") for line in Path(command[3]).read_text().splitlines()]
    found = runs_of(load(path), path)
    assert [line[1] for line in lines] == [str(run.folder.resolve()) for run in found]
    for line, planned in zip(lines, found, strict=True):
        assert configuration.load(line[0]) == planned.config
        # What the array's second job runs: the same measuring.
        words = measure.measure_command(planned, load(path).measure)[2:]
        assert [str(Path(word).resolve()) for word in words[:2]] == line[1:3]
        assert words[2] == line[3]
    # Trained elsewhere, they are collected like any others, without seconds.
    for line in lines:
        assert fake_train.main(line[0]) == 0
        fake_measure.main(*line[1:])
    assert tool.main([str(path)]) == 0
    assert results(path)["arms"]["pool"]["summary"]["wall_s"] == {"mean": None, "deviation": None, "n": 0}
    assert tool.main([str(path), "--slurm"]) == 0
    assert "nothing is left to run" in capfd.readouterr().out


def test_the_live_table_shows_what_is_at_work(write):
    """On a terminal: arm, seed, state, step, loss and ETA, read from the runs' own metrics."""
    path = write(seeds=[0, 1, 2, 3, 4, 5, 6])
    sweep = load(path)
    tasks = [Task(run, sweep.measure) for run in runs_of(sweep, path)]
    tasks[0].state, tasks[1].state = "training", "done"
    folder = tasks[0].run.folder
    folder.mkdir(parents=True)
    rows = [{"step": n, "loss": 9.0 - n, "step_s": 30.0} for n in (1, 2)] + [{"step": 2, "holdout_loss": 1.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3, "lo')
    console = Console(file=io.StringIO(), width=100)
    console.print(Table(tasks)._render())
    lines = console.file.getvalue().splitlines()
    (training,) = [line for line in lines if "training" in line]
    assert [cell.strip() for cell in training.split("│")[1:-1]] == [
        "vanilla", "0", "training", "2/4", "7.000", "1m 00s"
    ]  # fmt: skip
    assert any("1 more" in line for line in lines)
    assert any("1 of 14 runs done" in line for line in lines)
    assert not any(line.split("│")[1:3] == ["pool", "0"] for line in lines)


UPCYCLED = {"vanilla": {}, "pool": {"set": POOL, "upcycle_from": "vanilla", "upcycle_pool": "top"}}


@pytest.fixture
def fake_upcycle(stand_ins):
    stand_ins.setattr(work, "_UPCYCLE", ROOT / "tests" / "sweep" / "fake_upcycle.py")
    return stand_ins


def test_an_arm_starts_from_another_ones_run(write, fake_upcycle, capfd):
    """It waits for that run, gets its step 0 once, and is another run than the arm from nothing."""
    path = write(arms=UPCYCLED)
    assert tool.main([str(path), "--jobs", "2"]) == 0
    assert attempts(path) == [["train", "measure"], ["upcycle", "train", "measure"]]
    vanilla, pool = runs_of(load(path), path)
    said = json.loads((pool.folder / "checkpoints" / "step_00000000" / "manifest.json").read_text())
    assert said == {"from": str(vanilla.folder), "more": ["--pool", "top"]}
    alone = write(arms={"vanilla": {}, "pool": {"set": POOL}})
    assert runs_of(load(alone), alone)[1].folder != pool.folder


def test_an_arm_whose_beginning_failed_fails_by_name(write, fake_upcycle, capfd):
    path = write(arms=UPCYCLED)
    vanilla, _ = runs_of(load(path), path)
    vanilla.folder.parent.mkdir(parents=True)
    (vanilla.folder.parent / "fail").touch()
    assert tool.main([str(path), "--jobs", "2"]) == 1
    assert f"{vanilla.folder}, which it starts from, is not trained" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arms", "words"),
    [
        ({"pool": {"set": POOL, "upcycle_from": "other"}}, "names 'other', which is no other arm"),
        ({"pool": {"set": POOL, "upcycle_pool": "top"}}, "upcycle_pool without upcycle_from"),
        (UPCYCLED | {"more": {"upcycle_from": "pool"}}, "names 'pool', which itself depends on an arm"),
        (
            {"vanilla": {"seeds": [1]}, "pool": {"set": POOL, "upcycle_from": "vanilla"}},
            "names 'vanilla', which has no seed 0",
        ),
    ],
)
def test_beginnings_that_cannot_be(write, arms, words):
    with pytest.raises(SweepError, match=words):
        load(write(arms=arms))
