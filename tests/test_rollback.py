"""guard.rollback and data.skip by the trainer itself, on data with a bad stretch."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import rollback_worker, settings, toy_corpus
from tests.support.checkpoint_launch import finish, fork
from wm_ds.checkpoint.format import read_manifest, read_tensor
from wm_ds.run.metrics_file import read_metrics

pytestmark = pytest.mark.alone

STEPS = 15
SAME = ("step", "loss", "grad_norm", "lr", "tokens")
# The loss falls fast, so its deviation is wide; a clean step is never above the mean.
GUARD = ["guard.rollback=2", "guard.spike_sigma=1.2"]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict:
    data = toy_corpus.packed(tmp_path_factory.mktemp("data"), 100, "--seq-len", 24, "--holdout", 4)
    return settings.repeatable(
        data,
        steps=STEPS,
        optim__lr=3e-3,
        optim__ns_dtype="float32",
        checkpoint__every=3,
        checkpoint__keep_last=4,
        evaluate__every=4,
        log__every=1,
    )


def launch(
    folder: Path,
    config: dict,
    name: str,
    *overrides: str,
    bad: list[int],
    ranks: int = 1,
    kill: str | None = None,
) -> tuple[list[int | None], str]:
    """Exit codes of a start as FOLDER/NAME, and rank 0's log."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config | {"run": config["run"] | {"dir": str(folder / name)}}))
    logs = folder / f"{name}-{len(list(folder.glob('*-logs')))}-logs"
    logs.mkdir()
    arguments = [str(path), *GUARD, *overrides]
    started = fork(rollback_worker.trainer, [(arguments, bad, kill)] * ranks, logs)
    codes = finish(started, 90)
    return codes, (logs / "rank_0.log").read_text()


def rows(run: Path) -> list[list[Any]]:
    """What stands of every step."""
    return [[row[key] for key in SAME] for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def batches(run: Path) -> list[int]:
    return [row.get("batch", row["step"]) for row in read_metrics(run / "metrics.jsonl") if "loss" in row]


def assert_same_run(one: Path, other: Path) -> None:
    """Every step, and the state at the end, bit by bit."""
    assert rows(one) == rows(other)
    assert batches(one) == batches(other)
    name = f"checkpoints/step_{STEPS:08d}"
    mine, theirs = (json.loads((run / name / "client.json").read_text()) for run in (one, other))
    assert mine["engine"] == theirs["engine"]
    assert mine["holdout"] == theirs["holdout"]
    for tensor, entry in read_manifest(one / name).tensors.items():
        for kind in entry.states:
            first, second = (read_tensor(run / name, tensor, kind) for run in (one, other))
            assert (first == second).all(), (tensor, kind)


@pytest.fixture(scope="module")
def skipping(tmp_path_factory, config) -> Path:
    """A run that leaves batches 10 to 13 out from its beginning."""
    folder = tmp_path_factory.mktemp("skipping")
    codes, said = launch(folder, config, "run", "data.skip=[[10,13]]", bad=[12, 13])
    assert codes == [0], said
    return folder / "run"


def test_a_run_that_rolls_back_is_one_that_skipped_from_the_beginning(skipping, config, tmp_path):
    """Spikes at steps 12 and 13; the checkpoint of step 12 holds one, that of step 9 none."""
    codes, said = launch(tmp_path, config, "run", bad=[12, 13])
    run = tmp_path / "run"
    assert codes == [0], said
    assert batches(skipping) == [*range(1, 10), *range(14, 20)]
    assert_same_run(run, skipping)
    text = "back to the checkpoint of step 9, and batches 10 to 13 of the data are left out (rollback 1)"
    assert said.count(text) == 1
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (told,) = [row for row in lines if "rollback" in row]
    assert told == {"attempt": 1, "step": 9, "rollback": {"at": 13, "batches": [10, 13], "number": 1}}
    assert [row["step"] for row in lines if "spike" in row] == [12, 13]
    assert (run / "checkpoints/set_aside_step_00000012").is_dir()
    (entry,) = json.loads((run / "history.json").read_text())["rollbacks"]
    assert (entry["at"], entry["to"], entry["batches"]) == (13, 9, [10, 13])


@pytest.mark.slow
def test_going_back_over_a_border_of_stages_goes_back_to_the_earlier_stage(config, tmp_path):
    """From step 13 to step 9, over the border after step 11: steps 10 and 11 are the first stage's again."""
    stages = "stages=[{until: 11}, {lr_factor: 0.5, freeze: ['*embed*']}]"
    codes, said = launch(tmp_path, config, "rolled", stages, bad=[12, 13])
    assert codes == [0], said
    assert "back to the checkpoint of step 9" in said
    codes, said = launch(tmp_path, config, "skipped", stages, "data.skip=[[10,13]]", bad=[12, 13])
    assert codes == [0], said
    assert_same_run(tmp_path / "rolled", tmp_path / "skipped")
    taken = [row["stage"] for row in read_metrics(tmp_path / "rolled" / "metrics.jsonl") if "loss" in row]
    assert taken == [0] * 11 + [1] * 4


@pytest.mark.long
@pytest.mark.parametrize("kill", rollback_worker.KILLS)
def test_a_kill_in_the_midst_of_it_changes_nothing(skipping, config, tmp_path, kill):
    codes, said = launch(tmp_path, config, "run", bad=[12, 13], kill=kill)
    assert codes == [-signal.SIGKILL], said
    codes, said = launch(tmp_path, config, "run", bad=[12, 13])
    assert codes == [0], said
    assert_same_run(tmp_path / "run", skipping)
    assert len(json.loads((tmp_path / "run/history.json").read_text())["rollbacks"]) == 1


@pytest.mark.long
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_ranks_go_back_alike_and_later_resumes_see_the_same_order(config, tmp_path, stage):
    own = [f"deepspeed={Path(__file__).parents[1]}/ds_configs/zero{stage}.json", "batch.micro_batch=1"]
    codes, said = launch(tmp_path, config, "skip", *own, "data.skip=[[10,13]]", bad=[12, 13], ranks=2)
    assert codes == [0, 0], said
    codes, said = launch(tmp_path, config, "run", *own, bad=[12, 13], ranks=2)
    assert codes == [0, 0], said
    assert said.count("(rollback 1)") == 1
    assert_same_run(tmp_path / "run", tmp_path / "skip")
    wanted = rows(tmp_path / "run")
    for late in (12, 15):
        shutil.rmtree(tmp_path / f"run/checkpoints/step_{late:08d}")
    (tmp_path / "run/checkpoints/latest").write_text("step_00000009\n")
    codes, said = launch(tmp_path, config, "run", *own, bad=[12, 13])
    assert codes == [0], said
    assert batches(tmp_path / "run") == batches(tmp_path / "skip"), "at another world size"
    losses = ([row[1] for row in every] for every in (rows(tmp_path / "run"), wanted))
    assert next(losses) == pytest.approx(next(losses), abs=1e-4)


@pytest.mark.long
def test_a_run_fails_with_the_reason_when_going_back_does_not_help(config, tmp_path):
    """Batches 16 and 17 are bad as well: allowed once more, the run goes on without them."""
    bad = [12, 13, 16, 17]
    codes, said = launch(tmp_path, config, "run", "guard.max_rollbacks=1", bad=bad)
    assert codes == [1]
    last = said.strip().splitlines()[-1]
    assert last.startswith("error: step 13: 2 spikes of the loss in a row, and the run has gone back 1 times")
    assert "guard.max_rollbacks = 1" in last
    codes, said = launch(tmp_path, config, "run", "guard.max_rollbacks=2", bad=bad)
    assert codes == [0], said
    codes, said = launch(tmp_path, config, "skip", "data.skip=[[14,17],[10,13]]", bad=bad)
    assert codes == [0], said
    assert_same_run(tmp_path / "run", tmp_path / "skip")


def test_without_a_checkpoint_from_before_the_spikes_it_fails_with_the_reason(config, tmp_path):
    codes, said = launch(tmp_path, config, "run", "checkpoint.every=12", bad=[11, 12])
    assert codes == [1]
    assert (
        "error: step 12: 2 spikes of the loss in a row, and there is no checkpoint from before step 11"
        in said
    )


def test_a_branch_goes_back_to_where_it_began_and_keeps_what_was_left_out(skipping, config, tmp_path):
    """Its first checkpoint holds a spike already."""
    own = ["checkpoint.every=1", "data.skip=[[10,13]]", "steps=13"]
    first, second = f"run.branch_from={skipping}@9", f"run.branch_from={tmp_path / 'run'}@11"
    codes, said = launch(tmp_path, config, "run", *own, first, bad=[14, 15], kill="before the first step")
    assert codes == [-signal.SIGKILL], said
    codes, said = launch(tmp_path, config, "run", *own, first, bad=[14, 15])
    assert codes == [0], said
    assert "(rollback" not in said
    assert batches(tmp_path / "run") == [16, 17, 18, 19]
    codes, said = launch(tmp_path, config, "last", *own, second, bad=[])
    assert codes == [0], said
    assert batches(tmp_path / "last") == [18, 19]
    codes, said = launch(tmp_path, config, "other", f"run.branch_from={skipping}@12", bad=[])
    assert codes == [2]
    assert f"data.skip is [[10, 13]] in {skipping} and [] here" in said.strip().splitlines()[-1]
