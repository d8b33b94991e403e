"""An export against the trainer's own held-out loss: weights that are not what was trained are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load

from tests.support import exported, toy_corpus
from tools import export_hf, reshape_checkpoint
from wm_ds import train, trained
from wm_ds.checkpoint import format
from wm_ds.checkpoint.format import verify
from wm_ds.evaluate import __main__ as evaluate
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
    assert holdout.check_holdout(source, torch.bfloat16) < holdout.ROUNDED / 2
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


def exchange(checkpoint: Path, first: str, second: str) -> None:
    """Let two tensors of a checkpoint of one rank change places, with checksums that fit."""
    manifest = format.read_manifest(checkpoint)
    (name,) = [file for file in manifest.files if file.endswith(".safetensors")]
    held = load((checkpoint / name).read_bytes())  # not mapped: the file is written again
    one, other = f"{first}:weight:0", f"{second}:weight:0"
    held[one], held[other] = held[other], held[one]
    specs = [(key, tensor.dtype, tensor.numel()) for key, tensor in held.items()]
    manifest.files[name] = format.write_fragments(checkpoint / name, specs, held.values())
    (checkpoint / format.MANIFEST).write_text(manifest.to_json())


@pytest.mark.long
def test_tensors_that_changed_places_on_the_disk_are_found_out(run, tmp_path, capsys):
    """All that the files say of themselves is right, and every tensor is where a tensor of its shape was."""
    shutil.copytree(run, tmp_path / "run")
    source = trained.find(tmp_path / "run")
    layers = [f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 1)]
    before = format.read_tensor(source.path, layers[0])
    exchange(source.path, *layers)
    assert reshape_checkpoint.main([str(tmp_path / "run"), "--verify"]) == 0
    assert torch.equal(format.read_tensor(source.path, layers[1]), before)
    capsys.readouterr()
    command = [str(tmp_path / "run"), "--output", str(tmp_path / "out"), "--dtype", "float32"]
    assert export_hf.main(command) == 1
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith(f"error: {source.path}: its weights have a held-out loss of ")
    assert "the checkpoint does not hold the weights that were trained; export another step" in said
    assert not list(tmp_path.glob("*out*"))
    # The remedy: another step, of which the trainer has a record, too.
    exchange(source.path, *layers)
    assert export_hf.main(command) == 0


def test_the_export_carries_the_trainers_record(run, tmp_path):
    """Who has the folder and the data can compute the number again, without the checkpoint."""
    source = trained.find(run)
    out = exported.run_export(run, tmp_path / "out")
    record = json.loads((out / "export.json").read_text())["trainer_holdout"]
    assert record == json.loads((source.path / "client.json").read_text())["holdout"]
    data = source.run.data.sources()[0].path
    again = tmp_path / "again.json"
    command = ["perplexity", str(out), "--data", data, "--sequences", str(record["rows"]), "--exact", "0"]
    assert evaluate.main([*command, "--json", str(again)]) == 0
    (row,) = [row for row in json.loads(again.read_text())["rows"] if row["as_trained"]]
    assert row["loss"] == pytest.approx(record["loss"], abs=1e-5)
