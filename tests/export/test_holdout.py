"""An export against the trainer's own held-out loss: weights that are not what was trained are refused."""

import json
import shutil

import pytest
import torch
import yaml

from tests.support import exported, toy_corpus
from wm_ds import train, trained
from wm_ds.checkpoint.format import verify
from wm_ds.export import holdout
from wm_ds.export.tokenizer import ExportError

pytestmark = pytest.mark.alone  # trains in this process


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of a few steps by the trainer itself."""
    folder = tmp_path_factory.mktemp("run")
    data = toy_corpus.packed(folder, 60, "--seq-len", 24, "--holdout", 4)
    raw = {
        "run": {"dir": str(folder / "run"), "deterministic": True},
        "model": exported.MODEL | {"num_groups": 4},
        "data": {"train": str(data)},
        "batch": {"global_batch": 4, "micro_batch": 2},
        "optim": {"lr": 1e-2, "warmup": 1},
        "precision": "fp32",
        "steps": 3,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(raw))
    assert train.main([str(folder / "run.yaml")]) == 0
    return folder / "run"


def test_the_trainers_loss_comes_out_again(run, caplog):
    caplog.set_level("INFO", "wm_ds")
    source = trained.find(run)
    assert holdout.check_holdout(source, torch.float32) < 1e-5
    assert holdout.check_holdout(source, torch.bfloat16) < 2e-2
    assert all(line.startswith("checked: held-out loss ") for line in caplog.messages)


def test_what_cannot_be_compared_is_said_with_the_reason(run, tmp_path, caplog):
    caplog.set_level("INFO", "wm_ds")
    source = trained.find(run)
    record = json.loads((source.path / "client.json").read_text())["holdout"]
    assert record["rows"] == 2
    assert record["precision"] == "fp32"
    data = source.run.data.sources()[0].path
    shutil.move(data, tmp_path / "away")
    try:
        assert holdout.check_holdout(source, torch.float32) is None
    finally:
        shutil.move(tmp_path / "away", data)
    assert caplog.messages[0].startswith("not compared with the trainer's held-out loss: ")
    old = exported.make_run(tmp_path / "old")
    assert holdout.check_holdout(trained.find(old), torch.float32) is None
    assert "the checkpoint records none" in caplog.messages[1]


def test_weights_that_are_not_what_was_trained_are_refused(run, tmp_path, monkeypatch):
    """As if two matrices of one shape had changed places on their way to the checkpoint."""
    source = trained.find(run)
    original = trained.Trained.load

    def swapped(self, dtype, device="cpu"):
        model = original(self, dtype, device)
        first, second = (model.model.layers[i].mlp.up_proj.weight for i in (0, 1))
        first.data, second.data = second.data, first.data
        return model

    monkeypatch.setattr(trained.Trained, "load", swapped)
    with pytest.raises(ExportError, match=r"held-out loss of .* the trainer had .* do not resume from this"):
        holdout.check_holdout(source, torch.float32)
    with pytest.raises(ExportError):
        exported.run_export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not verify(source.path), "the format has nothing to complain of"
