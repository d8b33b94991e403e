"""Runs in stages by the real trainer: equal stages, borders, other world sizes, edits, the record."""

from __future__ import annotations

import json
import os
import shutil
import signal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.test_run import losses, wait_for
from tests.support import toy_corpus
from tests.support.checkpoint_launch import finish, launch_run, logs, step, train_run
from tests.support.settings import ROOT, trainable
from wm_ds import trained
from wm_ds.checkpoint.format import load_weights, read_manifest, read_tensor
from wm_ds.config import load as configuration
from wm_ds.engine.loss import TokenLoss
from wm_ds.export.holdout import check_holdout
from wm_ds.plan.flops import training
from wm_ds.run.metrics_file import read_metrics
from wm_ds.start import open_data

pytestmark = pytest.mark.alone

STEPS, FROZEN = 8, "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict[str, Any]:
    """Rows of 32, of which the first stage reads halves; three borders: after steps 2, 4 and 6."""
    data, better = (
        toy_corpus.packed(tmp_path_factory.mktemp("data"), texts, "--seq-len", 32, "--holdout", 8)
        for texts in (120, 60)
    )
    sources = [{"path": str(data), "weight": 1.0}, {"path": str(better), "weight": 2.0}]
    stages = [
        {"until": 2, "passes": {"no_grad_passes": 0, "grad_passes": 1}, "seq_len": 16},
        {"until": "50%", "batch": {"global_batch": 12}, "lr_factor": 0.5},
        {"until": 6, "data": sources, "freeze": ["*embed*"], "passes": {"num_groups": 2}},
        {"data": sources, "batch": {"micro_batch": 3}},
    ]
    return trainable(
        data,
        stages=stages,
        steps=STEPS,
        batch={"global_batch": 6, "micro_batch": 1},
        optim__warmup=3,
        checkpoint__every=1,
        evaluate__every=None,
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory, config) -> Path:
    base = tmp_path_factory.mktemp("straight")
    train_run(base, config, "run", 2)
    return base / "run"


def rows(run: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def back_to(straight: Path, run: Path, number: int) -> None:
    """A copy of the run as it was after step `number`."""
    shutil.copytree(straight, run)
    (run / "done").unlink()
    for late in range(number + 1, STEPS + 1):
        shutil.rmtree(step(run, late))
    (run / "checkpoints" / "latest").write_text(f"step_{number:08d}\n")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(straight), str(run)))
    (run / "metrics.jsonl").unlink()


def same_files(one: Path, other: Path, number: int) -> None:
    mine, theirs = read_manifest(step(one, number)), read_manifest(step(other, number))
    names = [name for name in theirs.files if name.endswith(".safetensors")]
    assert names
    for name in names:
        assert mine.files[name]["sha256"] == theirs.files[name]["sha256"], name


def test_equal_stages_are_the_run_without_stages_bit_for_bit(tmp_path, config):
    """Three ways to say the same, among them the run's own values and shares of it."""
    plain = {key: value for key, value in config.items() if key != "stages"} | {"steps": 5}
    own = {"batch": {"global_batch": 6}, "passes": {"num_groups": 4}, "data": config["data"]["train"]}
    train_run(tmp_path, plain, "plain", 1)
    equal = [{"until": 1}, {"until": "60%", "seq_len": 32, **own}, {"freeze": [], "lr_factor": 1.0}]
    train_run(tmp_path, plain | {"stages": equal}, "equal", 1)
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    one, other = (
        [[row[key] for key in keys] for row in rows(tmp_path / name)] for name in ("plain", "equal")
    )
    assert one == other
    same_files(tmp_path / "equal", tmp_path / "plain", 5)
    counters = [
        json.loads((step(tmp_path / n, 5) / "client.json").read_text())["engine"] for n in ("plain", "equal")
    ]
    assert counters[0] == counters[1]


def test_each_step_is_its_stages(straight, config):
    """The loss of the first step of each stage is plain PyTorch's, on the weights, rows and passes of it."""
    found = rows(straight)
    assert [row["stage"] for row in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    whole = configuration.load(straight / "config.yaml")
    stages, batches, _ = open_data(whole)
    peak = config["optim"]["lr"]
    assert [row["lr"] for row in found[:4]] == pytest.approx(
        [peak / 3, peak * 2 / 3, peak / 2, found[3]["lr"]]
    )
    for stage in stages.stages[1:]:
        before = trained.find(straight, stage.first - 1)
        model = before.load(torch.float32)
        model.config.no_grad_passes, model.config.grad_passes = 1, 2
        model.config.num_groups = 2 if stage.index == 2 else 4
        loss, total, tokens = TokenLoss(model).train(), 0.0, 0
        for part in batches.batch(stage.first - 1, 0, 1):
            assert part["input_ids"].shape == (stage.config.batch.micro_batch, 32)
            with torch.no_grad():
                inputs = {name: value for name, value in part.items() if name != "sample_ids"}
                schedule = model.config.training_schedule()
                total += float(loss(**inputs, schedule=schedule))
            tokens += int((part["labels"] >= 0).sum())
        row = found[stage.first - 1]
        assert row["loss"] == pytest.approx(total / tokens, rel=2e-5), stage.name
        work = training(model.config, stage.seq_len).model * stage.positions / 2 / 1e12
        speed = row["model_tflops_per_device"] / work  # steps a second
        assert 1 / speed == pytest.approx(row["step_s"], rel=0.05), "of this stage's steps alone"


def test_what_is_frozen_stays_and_the_rest_moves(straight):
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        states = [read_tensor(step(straight, n), FROZEN, kind) for n in (3, 4, 5, 6, 7)]
        changed = [not torch.equal(a, b) for a, b in pairwise(states)]
        assert changed == [True, False, False, True], kind
    before, after = (dict(load_weights(step(straight, n))) for n in (4, 6))
    assert [name for name in before if torch.equal(before[name], after[name])] == [FROZEN]


@pytest.mark.parametrize(
    ("at", "world", "zero"),
    [(2, 3, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, 1, 3), (4, 1, 0), (6, 3, 2)))],
)
def test_a_run_goes_on_before_at_and_after_a_border_at_another_size(
    tmp_path, config, straight, at, world, zero
):
    run = tmp_path / "run"
    back_to(straight, run, at)
    deepspeed = f"deepspeed={ROOT}/ds_configs/zero{zero}.json"
    train_run(tmp_path, config, "run", world, deepspeed, "stages=" + json.dumps(micro(config, 1)))
    whole, mine = losses(straight), losses(run)
    assert sorted(mine) == list(range(at + 1, STEPS + 1))
    for number in mine:
        assert abs(mine[number] - whole[number]) < 1e-4, (number, mine[number], whole[number])
    client = [json.loads((step(r, STEPS) / "client.json").read_text())["engine"] for r in (run, straight)]
    assert client[0]["tokens"] == client[1]["tokens"], "the same rows"
    assert client[0]["loss_count"] == client[1]["loss_count"] == 2, "a spike is told from this stage's losses"


def micro(config: dict[str, Any], rows: int) -> list[dict[str, Any]]:
    """The stages, with so many rows at once in the last one: 6 rows are 3 ranks' two, each one by one."""
    *stages, last = config["stages"]
    return [*stages, last | {"batch": {"micro_batch": rows}}]


@pytest.mark.slow
def test_a_kill_at_a_border_costs_nothing(tmp_path, config, straight):
    """Killed while it takes its first step of a stage, or has just taken it; then as if unbroken."""
    ranks, folder = launch_run(tmp_path, config, "run", 2)
    wait_for(folder, tmp_path / "run", 4)
    os.kill(ranks[1].pid, signal.SIGKILL)
    assert finish(ranks, 90)[1] == -signal.SIGKILL, logs(folder)
    train_run(tmp_path, config, "run", 2)
    assert losses(tmp_path / "run") == losses(straight)
    same_files(tmp_path / "run", straight, STEPS)


def refused(tmp_path: Path, config: dict[str, Any], *overrides: str) -> str:
    ranks, folder = launch_run(tmp_path, config, "run", 1, *overrides)
    assert finish(ranks, 90) == [2], logs(folder)
    return (folder / "rank_0.log").read_text().strip().splitlines()[-1]


def test_the_future_is_edited_on_the_record_and_the_past_is_refused(tmp_path, config, straight):
    run = tmp_path / "run"
    back_to(straight, run, 4)
    before = (run / "history.json").read_bytes()
    first, *others = config["stages"]
    past = config | {"stages": [first | {"passes": {"grad_passes": 2}}, *others]}
    said = refused(tmp_path, past)
    assert "steps 1 to 2: model.no_grad_passes is 0 there and None here" in said
    assert "change only what comes after step 4" in said
    said = refused(tmp_path, config | {"stages": [first, {"until": "50%"}, *others[1:]]})
    assert "steps 3 to 4: batch.global_batch is 12 there and 6 here" in said
    assert "lr_factor is 0.5 there" in said
    assert (run / "history.json").read_bytes() == before
    # Annealing decided late: the stage at hand ends, another begins, the run is longer. 50% were four steps.
    late = {"data": config["stages"][2]["data"], "passes": {"grad_passes": 1}}
    edited = config | {"stages": [first, others[0], {"until": 5}, late], "steps": 10}
    train_run(tmp_path, edited, "run", 1)
    assert [row["stage"] for row in rows(run)] == [2, 3, 3, 3, 3, 3]
    known = json.loads((run / "history.json").read_text())
    assert [(stage["first"], stage["last"]) for stage in known["stages"]] == [(1, 2), (3, 4), (5, 5), (6, 10)]
    (change,) = known["changes"]
    assert (change["attempt"], change["step"]) == (2, 4)
    assert "steps of the run: 8 -> 10" in change["what"]
    assert "steps 6 to 6: freeze: ['*embed*'] -> []" in change["what"]
    client = json.loads((step(run, 10) / "client.json").read_text())
    assert {key: client[key] for key in ("stages", "changes")} == {
        key: known[key] for key in ("stages", "changes")
    }


def test_a_checkpoint_of_a_stage_opens_with_its_passes_and_its_held_out_loss(straight):
    for number, passes, groups in ((2, (0, 1), 4), (4, (1, 2), 4), (5, (1, 2), 2)):
        found = trained.find(straight, number)
        hf = found.hf_config()
        assert ((hf.no_grad_passes, hf.grad_passes), hf.num_groups) == (passes, groups)
        assert hf.max_position_embeddings == (16 if number == 2 else 32)
        assert check_holdout(found, torch.float32) is not None
    facts = found.facts()
    assert [(stage["first"], stage["last"], stage["seq_len"]) for stage in facts["stages"]] == [
        *((1, 2, 16), (3, 4, 32), (5, 5, 32)),
    ]
    assert facts["config"]["model"]["num_groups"] == 2
