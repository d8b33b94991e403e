"""From an exported folder back into a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.support import exported
from tools import import_hf
from wm_ds import trained
from wm_ds.checkpoint.format import read_tensor
from wm_ds.config.load import load
from wm_ds.export import export

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return exported.make_run(tmp_path_factory.mktemp("source"), tie_word_embeddings=True)


@pytest.fixture(scope="module")
def folder(run) -> Path:
    source = trained.find(run)
    out = run.parent / "out"
    return export.export(source, out, dtype=torch.float32, max_shard_size=10**5)


def config_file(run: Path, target: Path, **model: object) -> Path:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["run"]["dir"] = str(target)
    settings["model"] |= model
    settings |= {"precision": "fp32", "steps": 2, "deepspeed": str(ROOT / "ds_configs" / "zero2.json")}
    path = target.parent / f"{target.name}.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_weights_come_back_bitwise(run, folder, tmp_path):
    checkpoint = import_hf.import_folder(folder, load(config_file(run, tmp_path / "run")))
    assert checkpoint == tmp_path / "run" / "checkpoints" / "step_00000000"
    for name, parameter in exported.build(run, seed=7).named_parameters():
        assert torch.equal(read_tensor(checkpoint, name), parameter)
    assert torch.equal(
        read_tensor(checkpoint, "lm_head.weight"), read_tensor(checkpoint, "model.embed_tokens.weight")
    )
    again = trained.find(tmp_path / "run").load(torch.float32)
    tokens = exported.random_rows(2, 9, 320)
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, trained.find(run).load(torch.float32)(tokens).logits)


@pytest.mark.long
def test_training_goes_on_from_there(run, folder, tmp_path):
    """The trainer resumes from step 0: its first loss is the imported model's, not a fresh one's."""
    path = config_file(run, tmp_path / "run")
    import_hf.import_folder(folder, load(path))
    command = [sys.executable, "-m", "wm_ds.train", str(path), "log.tensorboard=false"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]
    from wm_ds.data.loader import GlobalBatches
    from wm_ds.engine.loss import TokenLoss

    batches = GlobalBatches([{"path": str(run.parent / "packed"), "weight": 1.0}], global_batch=8, seed=0)
    loss = TokenLoss(trained.find(run).load(torch.float32)).train()
    total, tokens = 0.0, 0
    with torch.no_grad():
        for batch in batches.batch(0, 0, 1, 2):
            inputs = {name: batch[name] for name in ("input_ids", "labels", "document_ids")}
            total += float(loss(**inputs))
            tokens += int((batch["labels"] != -100).sum())
    assert rows[0]["loss"] == pytest.approx(total / tokens, abs=1e-4)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"num_kv_channels": 4}, "model.dummy_key is"),
        ({"tie_word_embeddings": False}, "lm_head.weight is absent there"),
        ({"family": "vanilla"}, "holds a model of type whitematter, the run's is qwen3"),
    ],
)
def test_another_model_is_refused(run, folder, tmp_path, model, words):
    config = load(config_file(run, tmp_path / "run", **model))
    with pytest.raises(import_hf.ImportFailed, match=words):
        import_hf.import_folder(folder, config)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_with_checkpoints_is_refused(run, folder):
    with pytest.raises(import_hf.ImportFailed, match="has checkpoints already"):
        import_hf.import_folder(folder, load(run / "config.yaml"))


@pytest.mark.parametrize("family", ["vanilla", "lckv", "cla", "yoco", "fusedkv"])
def test_other_families_come_back_too(tmp_path, monkeypatch, family):
    """From a bf16 export: its rounded weights are the new masters."""
    more = {"warmup_layers": 2} if family == "lckv" else {}
    run = exported.make_run(tmp_path / "source", family=family, **more)
    monkeypatch.setattr(export, "check", lambda *_: 0.0)  # other tests are about that
    source = trained.find(run)
    options = {"dtype": torch.bfloat16, "max_shard_size": 10**5}
    folder = export.export(source, tmp_path / "out", **options)
    checkpoint = import_hf.import_folder(folder, load(config_file(run, tmp_path / "run")))
    for name, parameter in exported.build(run, seed=7).named_parameters():
        back = read_tensor(checkpoint, name)
        assert back.dtype == torch.float32
        assert torch.equal(back, parameter.bfloat16().float())
