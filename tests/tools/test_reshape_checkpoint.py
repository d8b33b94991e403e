"""tools/reshape_checkpoint.py: listing, verifying, going back, another number of files."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.checkpoint_launch import run, step
from tools.reshape_checkpoint import main, reshape
from wm_ds.checkpoint.directory import go_back
from wm_ds.checkpoint.format import Entry, Manifest, State, read_manifest, write_fragments, write_json
from wm_ds.checkpoint.manager import find_latest, read_tensor, verify

pytestmark = pytest.mark.alone

TOOL = Path(__file__).parents[2] / "tools" / "reshape_checkpoint.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """Steps 1, 2 and 3 of two ranks at stage 2, and the losses up to step 5 of the unbroken run."""
    folder = tmp_path_factory.mktemp("run")
    run(2, [{"stage": 2, "dir": str(folder), "steps": 3, "save_at": [1, 2, 3]}])
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_reshaped_state_is_the_same_and_trains_on(saved, tmp_path, ranks):
    """Every tensor equal bit by bit; resuming from it at another world size and stage gives equal losses."""
    source, target = step(saved, 2), step(tmp_path / "new", 2)
    assert main([str(source), "--ranks", str(ranks), "--out", str(tmp_path / "new")]) == 0
    assert verify(target) == []
    old, new = read_manifest(source), read_manifest(target)
    parts = [name for name in new.files if name.endswith(".safetensors")]
    sizes = [new.files[name]["size"] for name in parts]
    assert len(parts) == ranks
    assert max(sizes) - min(sizes) < 4000  # headers and rounding
    for name, entry in old.tensors.items():
        assert entry.states.keys() == new.tensors[name].states.keys()
        for kind in entry.states:
            assert torch.equal(read_tensor(source, name, kind), read_tensor(target, name, kind))
    cases = [
        {"stage": 1, "dir": str(tmp_path / f"from{i}"), "resume": str(path), "steps": 5}
        for i, path in enumerate((source, target))
    ]
    direct, reshaped = run(3, cases)[0]
    assert direct["losses"].keys() == {"3", "4", "5"}
    assert direct["losses"] == reshaped["losses"]
    same = run(
        2, [{"stage": 2, "dir": str(tmp_path / "same"), "resume": str(target), "steps": 3, "save_at": [3]}]
    )
    assert "error" not in same[0][0]
    for name in old.tensors:  # at the saved world size as if nothing had been reshaped
        assert torch.equal(read_tensor(step(tmp_path / "same", 3), name), read_tensor(step(saved, 3), name))


def test_reshape_of_a_damaged_checkpoint_writes_nothing(copy, tmp_path, capsys):
    os.truncate(step(copy, 3) / "rank_00001.safetensors", 1000)
    assert main([str(step(copy, 3)), "--ranks", "2", "--out", str(tmp_path / "new")]) == 1
    assert "rank_00001.safetensors: has 1000 bytes" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_reshape_never_overwrites(copy, capsys):
    assert main([str(step(copy, 3)), "--ranks", "2", "--out", str(copy)]) == 1
    assert "exists; give --out another directory" in capsys.readouterr().err
    assert verify(step(copy, 3)) == []


def test_reshape_holds_one_tensor_at_a_time(tmp_path, monkeypatch):
    """Every buffer it makes is one fragment, and a fragment is at most one tensor."""
    source = tmp_path / "checkpoints" / "step_00000001"
    source.mkdir(parents=True)
    numel, count = 2_500, 40
    names = [f"layer{i}" for i in range(count)]
    record = write_fragments(
        source / "rank_00000.safetensors",
        [(f"{n}:weight:0", torch.float32, numel) for n in names],
        (torch.zeros(numel) for _ in names),
    )
    files = {"rank_00000.safetensors": record, "client.json": write_json(source / "client.json", {})}
    state = {"weight": State("float32", [("rank_00000.safetensors", 0, numel)])}
    tensors = {n: Entry((numel,), "trainable", 1, dict(state)) for n in names}
    manifest = Manifest({"step": 1, "sequence": 1}, tensors, {}, files)
    (source / "manifest.json").write_text(manifest.to_json())
    made: list[int] = []
    original = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: made.append(original(*a, **k).numel()) or original(*a, **k)
    )
    assert reshape(source, tmp_path / "out", 2) == 0
    assert len(made) == count
    assert max(made) == numel


def test_list(copy, capsys):
    shutil.copytree(step(copy, 1), step(copy, 9).with_name("step_00000009.partial-0001"))
    assert main([str(copy), "--list"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out[1:]] == [
        "step_00000003",
        "step_00000002",
        "step_00000001",
        "step_00000009.partial-0001",
    ]
    assert out[1].split()[1:3] == ["2", "2"]
    assert out[1].endswith("<- latest")
    (step(copy, 2) / "client.json").unlink()
    assert main([str(copy), "--list"]) == 1
    assert "damaged: " in capsys.readouterr().out


def test_verify(copy, capsys):
    assert main([str(copy), "--verify"]) == 0
    assert capsys.readouterr().out.count(": ok") == 3
    data = bytearray((step(copy, 2) / "rank_00000.safetensors").read_bytes())
    data[-1] ^= 1
    (step(copy, 2) / "rank_00000.safetensors").write_bytes(data)
    assert main([str(copy), "--verify"]) == 1
    out = capsys.readouterr().out
    assert out.count(": ok") == 2
    assert "step_00000002/rank_00000.safetensors: is damaged" in out
    assert main([str(step(copy, 3)), "--verify"]) == 0


def test_rewind(copy, capsys):
    """After going back, the run resumes there; what was newer is kept under another name."""
    (copy / "checkpoints" / "latest").write_text("step_00000777")
    assert main([str(copy), "--rewind", "1"]) == 0
    assert find_latest(copy) == step(copy, 1)
    assert (copy / "checkpoints" / "set_aside_step_00000003").is_dir()
    assert main([str(copy), "--rewind", "3"]) == 1
    assert "no checkpoint of step 3; there are: step_00000001" in capsys.readouterr().err


def test_what_was_set_aside_before_stays_beside_it(copy):
    """Going back twice from the same step: neither is lost, and the run starts from what is latest."""
    for _ in range(2):
        shutil.copytree(step(copy, 3), copy / "later")
        assert main([str(copy), "--rewind", "2"]) == 0
        (copy / "later").rename(step(copy, 3))
        (copy / "checkpoints" / "latest").write_text("step_00000003\n")
    names = {path.name for path in (copy / "checkpoints").iterdir() if "set_aside" in path.name}
    assert names == {"set_aside_step_00000003", "set_aside_step_00000003-2"}
    assert [old for old, _ in go_back(copy, None)] == ["step_00000003", "step_00000002", "step_00000001"]
    assert find_latest(copy) is None


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["nowhere", "--list"], 1, "error: nowhere does not exist"),
        ([".", "--verify"], 1, "error: no checkpoint at ."),
        ([".", "--list"], 1, "error: there are no checkpoints in checkpoints"),
        ([".", "--ranks", "2"], 2, "--ranks and --out go together"),
        ([".", "--ranks", "0", "--out", "x"], 2, "--ranks is 0, must be 1 or more"),
        (["."], 2, "one of the arguments --list --verify --rewind --ranks is required"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, code, text):
    monkeypatch.chdir(tmp_path)
    try:
        got = main(arguments)
    except SystemExit as end:  # argparse
        got = end.code
    assert got == code
    error = capsys.readouterr().err.strip().splitlines()
    assert text in error[-1]
    assert code == 2 or len(error) == 1


def test_runs_as_a_program(tmp_path):
    command = [sys.executable, str(TOOL), str(tmp_path / "nowhere"), "--verify"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path / 'nowhere'} does not exist\n"
