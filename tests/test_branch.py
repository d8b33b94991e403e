"""A run that begins with a checkpoint of another one, by the trainer itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import exported, toy_corpus
from wm_ds import train
from wm_ds.checkpoint.format import read_manifest, read_tensor
from wm_ds.run.ancestry import Ancestor, chain

pytestmark = pytest.mark.alone  # trains in this process

LR = 1e-2


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Path:
    """Six steps at a constant rate, with checkpoints of 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("family")
    data = toy_corpus.packed(folder, 60, "--seq-len", 24, "--holdout", 4)
    raw = {
        "run": {"dir": str(folder / "long"), "deterministic": True},
        "model": exported.MODEL | {"num_groups": 4},
        "data": {"train": str(data)},
        "batch": {"global_batch": 4, "micro_batch": 2},
        "optim": {"lr": LR, "warmup": 1, "schedule": "constant"},
        "precision": "fp32",
        "steps": 6,
        "checkpoint": {"every": 2, "keep_last": 10},
        "evaluate": {"every": None, "sequences": 2, "double_passes": False},
        "log": {"tensorboard": False},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(raw))
    assert train.main([str(folder / "run.yaml")]) == 0
    return folder / "long"


def launch(long: Path, run: Path, *overrides: str) -> int:
    return train.main([str(long.parent / "run.yaml"), f"run.dir={run}", *overrides])


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


def test_a_branch_that_goes_on_as_its_ancestor_is_its_ancestor(long, tmp_path):
    """Optimizer state, order of the data, counters and generators are all taken over."""
    assert launch(long, tmp_path / "same", f"run.branch_from={long}@2") == 0
    keys = ("step", "loss", "grad_norm", "lr", "tokens")
    ours, theirs = ([[row[key] for key in keys] for row in rows(run)] for run in (tmp_path / "same", long))
    assert ours == theirs[2:]
    assert_same_state(tmp_path / "same", long, 6)
    assert chain(tmp_path / "same") == [Ancestor(str(long.resolve()), 2)]


def test_a_cool_down_is_its_own_and_survives_being_requeued(long, tmp_path, capsys):
    """Stopped after every step and started again, without its ancestor at last: as in one go."""
    ancestor = Path(shutil.copytree(long, tmp_path / "long"))
    cool = [f"run.branch_from={ancestor}@4", "steps=8", "optim.schedule=wsd", "optim.decay=3"]
    assert launch(long, tmp_path / "whole", *cool) == 0
    said = capsys.readouterr().out
    assert f"yet: starting from {ancestor}/checkpoints/step_00000004" in said
    assert f"a branch of {ancestor}@4, where the learning rate was 0.01; from here on: 0.01 at step 5" in said
    whole = rows(tmp_path / "whole")
    assert [row["step"] for row in whole] == [5, 6, 7, 8]
    assert [row["lr"] for row in whole] == pytest.approx([LR, LR * 0.7, LR * 0.4, LR * 0.1])
    assert whole[0]["loss"] == rows(long)[4]["loss"], "the same weights and rows"
    assert launch(long, tmp_path / "cut", *cool, "run.time_limit_minutes=0.0001") == 0
    assert launch(long, tmp_path / "cut", *cool, "run.time_limit_minutes=0.0001") == 0
    shutil.rmtree(ancestor)
    assert launch(long, tmp_path / "cut", *cool) == 0
    cut = rows(tmp_path / "cut")
    assert [row["attempt"] for row in cut] == [1, 2, 3, 3]
    for key in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert [row[key] for row in cut] == [row[key] for row in whole], key
    assert_same_state(tmp_path / "cut", tmp_path / "whole", 8)
    assert chain(tmp_path / "cut") == [Ancestor(str(ancestor), 4)]


def test_a_damaged_branch_point_is_named_and_its_run_is_not_to_be_rewound(long, tmp_path, capsys):
    ancestor = Path(shutil.copytree(long, tmp_path / "long"))
    path = ancestor / "checkpoints/step_00000004/rank_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert launch(long, tmp_path / "branch", f"run.branch_from={ancestor}@4", "steps=8") == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"{path}: is damaged" in said
    assert f"there are: step_00000006, step_00000004, step_00000002 in {ancestor}" in said
    assert "--rewind" not in said
    assert launch(long, tmp_path / "branch", f"run.branch_from={ancestor}@2", "steps=3") == 0, "the remedy"


def test_a_refused_branch_leaves_nothing(long, tmp_path, capsys):
    for words in (["model.hidden_size=64"], ["--dry-run", "model.hidden_size=64"]):
        assert launch(long, tmp_path / "branch", f"run.branch_from={long}@4", *words) == 2
        said = capsys.readouterr().err.strip().splitlines()[-1]
        assert f"error: run.branch_from = {long}@4: model.hidden_size is 32 there and 64 here" in said
        assert not (tmp_path / "branch").exists()
