"""A run that begins with a checkpoint of another one, by the trainer itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import settings, toy_corpus
from tests.support.checkpoint_launch import finish, launch_run, train_run
from wm_ds.checkpoint.format import read_manifest, read_tensor
from wm_ds.run.ancestry import Ancestor, chain

pytestmark = pytest.mark.alone

LR = 1e-2


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict:
    data = toy_corpus.packed(tmp_path_factory.mktemp("data"), 60, "--seq-len", 24, "--holdout", 4)
    return settings.repeatable(data, steps=6, optim__lr=LR, checkpoint__every=2)


@pytest.fixture(scope="module")
def long(tmp_path_factory, config) -> Path:
    """Six steps at a constant rate, with checkpoints of 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("family")
    train_run(folder, config, "long", 1)
    return folder / "long"


def refused(folder: Path, config: dict, *overrides: str) -> tuple[int | None, str]:
    """The exit code of a start as FOLDER/branch, and its last line."""
    ranks, logs = launch_run(folder, config, "branch", 1, *overrides)
    (code,) = finish(ranks, 90)
    return code, (logs / "rank_0.log").read_text().strip().splitlines()[-1]


def rows(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "loss" in row]


def assert_same_state(one: Path, other: Path, step: int) -> None:
    """Weights and the optimizer's state are equal bit by bit."""
    name = f"checkpoints/step_{step:08d}"
    manifest = read_manifest(one / name)
    for tensor, entry in manifest.tensors.items():
        for kind in entry.states:
            mine, theirs = (read_tensor(run / name, tensor, kind) for run in (one, other))
            assert (mine == theirs).all(), (tensor, kind)


def test_a_branch_that_goes_on_as_its_ancestor_is_its_ancestor(long, tmp_path, config):
    """Optimizer state, order of the data, counters and generators are all taken over."""
    train_run(tmp_path, config, "same", 1, f"run.branch_from={long}@2")
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    ours, theirs = ([[row[key] for key in keys] for row in rows(run)] for run in (tmp_path / "same", long))
    assert ours == theirs[2:]
    assert_same_state(tmp_path / "same", long, 6)
    assert chain(tmp_path / "same") == [Ancestor(str(long.resolve()), 2)]


def test_a_cool_down_is_its_own_and_survives_being_requeued(long, tmp_path, config):
    """Stopped after every step and started again, without its ancestor at last: as in one go."""
    ancestor = Path(shutil.copytree(long, tmp_path / "long"))
    cool = [f"run.branch_from={ancestor}@4", "steps=8", "optim.schedule=wsd", "optim.decay=3"]
    train_run(tmp_path, config, "whole", 1, *cool)
    (logs,) = tmp_path.glob("whole-ranks-*")
    said = (logs / "rank_0.log").read_text()
    assert f"yet: starting from {ancestor}/checkpoints/step_00000004" in said
    assert f"a branch of {ancestor}@4, where the learning rate was 0.01; from here on: 0.01 at step 5" in said
    whole = rows(tmp_path / "whole")
    assert [row["step"] for row in whole] == [5, 6, 7, 8]
    assert [row["lr"] for row in whole] == pytest.approx([LR, LR * 0.7, LR * 0.4, LR * 0.1])
    assert whole[0]["loss"] == rows(long)[4]["loss"], "the same weights and rows"
    train_run(tmp_path, config, "cut", 1, *cool, "run.time_limit_minutes=0.0001")
    train_run(tmp_path, config, "cut", 1, *cool, "run.time_limit_minutes=0.0001")
    shutil.rmtree(ancestor)
    train_run(tmp_path, config, "cut", 1, *cool)
    cut = rows(tmp_path / "cut")
    assert [row["attempt"] for row in cut] == [1, 2, 3, 3]
    for key in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [row[key] for row in cut] == [row[key] for row in whole], key
    assert_same_state(tmp_path / "cut", tmp_path / "whole", 8)
    assert chain(tmp_path / "cut") == [Ancestor(str(ancestor), 4)]


def test_a_damaged_branch_point_is_named_and_its_run_is_not_to_be_rewound(long, tmp_path, config):
    ancestor = Path(shutil.copytree(long, tmp_path / "long"))
    path = ancestor / "checkpoints/step_00000004/rank_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    code, said = refused(tmp_path, config, f"run.branch_from={ancestor}@4", "steps=8")
    assert code == 1
    assert f"{path}: is damaged" in said
    assert f"there are: step_00000006, step_00000004, step_00000002 in {ancestor}" in said
    assert "--rewind" not in said
    train_run(tmp_path, config, "branch", 1, f"run.branch_from={ancestor}@2", "steps=3")  # the remedy


def test_a_refused_branch_leaves_nothing(long, tmp_path, config):
    for words in (["model.hidden_size=64"], ["--dry-run", "model.hidden_size=64"]):
        code, said = refused(tmp_path, config, f"run.branch_from={long}@4", *words)
        assert code == 2
        assert f"error: run.branch_from = {long}@4: model.hidden_size is 32 there and 64 here" in said
        assert not (tmp_path / "branch").exists()
