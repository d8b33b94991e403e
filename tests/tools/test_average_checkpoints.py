"""tools/average_checkpoints.py: the numbers, what can be done with the result, and wrong calls."""

from __future__ import annotations

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch

from tests.support import exported, settings, toy_corpus
from tests.support.checkpoint_launch import train_run
from tools.average_checkpoints import main
from wm_ds import trained
from wm_ds.checkpoint import average, format
from wm_ds.checkpoint.format import load_weights, read_manifest, read_tensor
from wm_ds.data.loader import GlobalBatches
from wm_ds.engine.loss import TokenLoss

pytestmark = pytest.mark.alone

STEPS = 4


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict:
    data = toy_corpus.packed(tmp_path_factory.mktemp("data"), 60, "--seq-len", 24, "--holdout", 4)
    return settings.repeatable(data, steps=STEPS, checkpoint__every=1)


@pytest.fixture(scope="module")
def run(tmp_path_factory, config) -> Path:
    """A run of a few steps by the trainer itself, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("run")
    train_run(folder, config, "run", 1)
    return folder / "run"


@pytest.fixture(scope="module")
def averaged(run) -> Path:
    out = run.parent / "averaged"
    assert main([str(run), "--steps", "4", "1", "3", "--weights", "linear", "--output", str(out)]) == 0
    return out


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoints" / f"step_{number:08d}"


def every(run: Path, steps: list[int], name: str) -> torch.Tensor:
    """[checkpoint, …] in float64."""
    return torch.stack([read_tensor(step(run, number), name).double() for number in steps])


def emas(values: torch.Tensor, decay: float) -> torch.Tensor:
    """An exponential moving average from zero, with its bias removed as Adam does."""
    total = torch.zeros_like(values[0])
    for value in values:
        total = decay * total + (1 - decay) * value
    return total / (1 - decay ** len(values))


@pytest.mark.parametrize(
    ("options", "steps", "plain"),
    [
        (["--last", "3"], [2, 3, 4], lambda values: values.mean(0)),
        (["--steps", "3", "1"], [1, 3], lambda values: values.mean(0)),
        (["--last", "3", "--weights", "linear"], [2, 3, 4], lambda v: v[[0, 1, 1, 2, 2, 2]].mean(0)),
        (["--last", "4", "--weights", "ema:0.7"], [1, 2, 3, 4], lambda values: emas(values, 0.7)),
    ],
)
def test_weights_are_the_average_of_plain_torch(run, tmp_path, monkeypatch, capsys, options, steps, plain):
    monkeypatch.setattr(average, "PIECE", 100)  # most tensors are averaged in several pieces
    assert main([str(run), *options, "--output", str(tmp_path / "out")]) == 0
    result, last = step(tmp_path / "out", steps[-1]), step(run, steps[-1])
    assert capsys.readouterr().out.splitlines()[-1] == str(result)
    assert format.verify(result) == []
    manifest, of_last = read_manifest(result), read_manifest(last)
    assert manifest.run["averaged"]["steps"] == steps
    assert sum(manifest.run["averaged"]["weights"]) == pytest.approx(1)
    assert manifest.tensors.keys() == of_last.tensors.keys()
    for name, entry in of_last.tensors.items():
        values = every(run, steps, name)
        mine = read_tensor(result, name)
        torch.testing.assert_close(mine.double(), plain(values), rtol=6e-8, atol=1e-12)
        assert manifest.tensors[name].updates == entry.updates
        assert manifest.tensors[name].states.keys() == entry.states.keys()
        for kind in entry.states.keys() - {"weight"}:  # the optimizer's state is the newest's
            assert torch.equal(read_tensor(result, name, kind), read_tensor(last, name, kind))
        if entry.role == "trainable":
            assert not torch.equal(mine, read_tensor(last, name)), name
    for name in ("client.json", "rank_00000.json"):
        assert (result / name).read_bytes() == (last / name).read_bytes()


def plain_model(run: Path, averaged: Path) -> torch.nn.Module:
    """The run's model with the average put into it by plain torch: 1, 2 and 3 parts of steps 1, 3 and 4."""
    model = trained.find(run).load(torch.float32)
    state = {name: every(run, [1, 3, 3, 4, 4, 4], name).mean(0).float() for name, _ in load_weights(averaged)}
    model.load_state_dict(state)
    return model


def test_an_average_exports_and_the_export_says_what_it_is(run, averaged, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(exported.export, "check", lambda *_: None)  # tests/export does it, at some length
    caplog.set_level("INFO", "wm_ds")
    source = trained.find(averaged)
    export = exported.export.export(source, tmp_path / "out", dtype=torch.float32, max_shard_size=10**9)
    theirs = trained.find(export).load(torch.float32).state_dict()
    for name, tensor in plain_model(run, step(averaged, 4)).state_dict().items():
        torch.testing.assert_close(theirs[name], tensor, rtol=1e-6, atol=1e-9)
    assert any("are an average, never evaluated" in line for line in caplog.messages)
    facts = json.loads((export / "export.json").read_text())
    assert facts["averaged"]["steps"] == [1, 3, 4]
    assert facts["averaged"]["rule"] == "linear"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert facts["tokens"] == next(row["tokens"] for row in rows if row["step"] == 4)
    assert "| weights averaged over | the checkpoints of steps 1, 3, 4 (linear" in (
        (export / "README.md").read_text()
    )


def test_a_run_trains_on_from_an_average(run, averaged, tmp_path, config):
    """The first loss is that of the average's weights on the batch that follows the newest checkpoint."""
    mine = Path(shutil.copytree(averaged, tmp_path / "run"))
    train_run(tmp_path, config, "run", 1, "steps=5")
    rows = [json.loads(line) for line in (mine / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert list(losses) == [5]
    model = plain_model(run, step(averaged, 4))
    data = trained.find(run).run.data.sources()[0].path
    (batch,) = GlobalBatches(data, global_batch=4, seed=0).batch(4, 0, 1, 4)
    del batch["sample_ids"]
    with torch.no_grad():
        loss = TokenLoss(model).eval()(**batch, schedule=model.config.training_schedule())
    assert losses[5] == pytest.approx(float(loss) / int((batch["labels"] >= 0).sum()), rel=1e-5)
    assert "averaged" not in read_manifest(step(mine, 5)).run


# -- wrong calls, on checkpoints of one matrix


def save(run: Path, number: int, value: float = 1.0, shape: tuple[int, ...] = (40, 50)) -> Path:
    folder = step(run, number)
    folder.mkdir(parents=True)
    numel = torch.Size(shape).numel()
    specs = [(f"{name}:weight:0", torch.float32, numel) for name in ("a", "b")]
    record = format.write_fragments(
        folder / "rank_00000.safetensors", specs, (torch.full((numel,), value) for _ in specs)
    )
    files = {"rank_00000.safetensors": record, "client.json": format.write_json(folder / "client.json", {})}
    state = {"weight": format.State("float32", [("rank_00000.safetensors", 0, numel)])}
    tensors = {name: format.Entry(shape, "trainable", 1, dict(state)) for name in ("a", "b")}
    manifest = format.Manifest({"step": number, "sequence": number}, tensors, {}, files)
    (folder / "manifest.json").write_text(manifest.to_json())
    return folder


@pytest.fixture
def small(tmp_path) -> Path:
    for number in (1, 2, 3):
        save(tmp_path / "run", number, float(number))
    (tmp_path / "run" / "config.yaml").write_text("steps: 3\n")
    return tmp_path / "run"


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main([str(word) for word in words]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    return lines[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--steps", "1", "7", "8"], "no checkpoint of steps 7, 8; there are: step_00000003, step_00000002"),
        (["--steps", "1", "2", "1"], "step 1 is given twice"),
        (["--steps", "2"], "an average needs two checkpoints or more"),
        (["--last", "1"], "an average needs two checkpoints or more"),
        (["--last", "4"], "has 3 complete checkpoints (there are: step_00000003, "),
        (["--last", "2", "--weights", "ema:1"], "--weights ema:1: write equal, linear, or ema:D"),
        (["--last", "2", "--weights", "ema"], "--weights ema: write equal, linear, or ema:D"),
        (["--last", "2", "--weights", "square"], "--weights square: write equal, linear, or ema:D"),
    ],
)
def test_wrong_calls_are_one_line_and_write_nothing(small, tmp_path, capsys, options, said):
    assert said in refusal(capsys, small, *options, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_checkpoints_that_do_not_fit_are_named(small, tmp_path, capsys):
    out = tmp_path / "out"
    save(small, 4, shape=(40, 51))
    said = refusal(capsys, small, "--last", 2, "--output", out)
    assert "step_00000004 are not of one model: a is [40, 50] in step_00000003 and [40, 51] in" in said
    path = step(small, 2) / "rank_00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert f"{path}: is damaged" in refusal(capsys, small, "--steps", 1, 2, 3, "--output", out)
    os.truncate(path, 1000)
    said = refusal(capsys, small, "--last", 3, "--output", out)
    assert f"--last 3: one of them is damaged: {path}: has 1000 bytes" in said
    said = refusal(capsys, step(small, 3), "--last", 2, "--output", out)
    assert "is one checkpoint; give the directory of its run" in said
    assert not out.exists()


def test_an_output_that_exists_stays_as_it_is(small, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("all of it")
    for output in (tmp_path / "out", tmp_path / "out" / "thesis.tex", small):
        before = sorted(tmp_path.rglob("*"))
        said = refusal(capsys, small, "--last", 2, "--output", output)
        assert f"error: {output} exists; give --output a directory that does not" in said
        assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "out" / "thesis.tex").read_text() == "all of it"


def test_a_full_disk_is_one_line_and_leaves_nothing(small, tmp_path, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
    try:
        said = refusal(capsys, small, "--last", 2, "--output", tmp_path / "new" / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert said.endswith("part_00000.safetensors: File too large")
    assert str(tmp_path / "new" / "out") in said
    assert not (tmp_path / "new" / "out").exists()


def test_one_tensor_is_in_memory_at_a_time(small, tmp_path, monkeypatch):
    made: dict[str, list[int]] = {}
    for name in ("empty", "zeros", "empty_like"):
        original, sizes = getattr(torch, name), made.setdefault(name, [])

        def counting(*a: object, _original=original, _sizes=sizes, **k: object) -> torch.Tensor:
            tensor = _original(*a, **k)
            _sizes.append(tensor.numel())
            return tensor

        monkeypatch.setattr(torch, name, counting)
    monkeypatch.setattr(average, "PIECE", 64)
    assert main([str(small), "--last", "3", "--output", str(tmp_path / "out")]) == 0
    assert made["empty"] == [2000, 2000], "one tensor of the result after the other"
    assert max(made["zeros"] + made["empty_like"]) == 64
    assert torch.equal(read_tensor(step(tmp_path / "out", 3), "b"), torch.full((40, 50), 2.0))
