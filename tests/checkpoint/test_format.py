"""A checkpoint as files: reading by range, damage named, `latest`, pruning, nothing executed on load."""

import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.support.checkpoint_launch import run, step
from tools.reshape_checkpoint import main as reshape_checkpoint
from wm_ds.checkpoint.directory import latest, list_checkpoints, prune
from wm_ds.checkpoint.engine_state import even_cuts
from wm_ds.checkpoint.format import (
    CheckpointError,
    Entry,
    Manifest,
    Reader,
    State,
    read_manifest,
    write_fragments,
    write_json,
)
from wm_ds.checkpoint.manager import find_latest, read_tensor, verify

pytestmark = pytest.mark.alone


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A run directory with checkpoints of steps 1 to 4, written by two ranks at stage 2."""
    folder = tmp_path_factory.mktemp("run")
    run(2, [{"stage": 2, "dir": str(folder), "steps": 4, "save_at": [1, 2, 3, 4]}])
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


# -- format ------------------------------------------------------------------------------------------------


def test_library_reads_what_we_write(tmp_path):
    """The safetensors library itself reads our files, in every dtype, odd sizes and empty tensors too."""
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool)
    tensors = {f"t{i}:weight:0": (torch.arange(7 - i) % 3).to(dtype) for i, dtype in enumerate(dtypes)}
    tensors["é.0:weight:5"] = torch.empty(0)
    specs = [(key, t.dtype, t.numel()) for key, t in tensors.items()]
    record = write_fragments(tmp_path / "a.safetensors", specs, tensors.values())
    back = load_file(tmp_path / "a.safetensors")
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[key], t) and back[key].dtype == t.dtype for key, t in tensors.items())
    assert record["size"] == (tmp_path / "a.safetensors").stat().st_size


def test_announced_and_given_tensors_must_agree(tmp_path):
    with pytest.raises(ValueError, match="was announced"):
        write_fragments(tmp_path / "a", [("x:weight:0", torch.float32, 3)], [torch.zeros(4)])


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    window=st.tuples(st.integers(0, 40), st.integers(0, 40)),
)
def test_any_range_over_any_fragments(tmp_path_factory, numel, cuts, window):
    """Whatever the cuts, a range reads as it would from the whole tensor."""
    folder = tmp_path_factory.mktemp("ranges")
    edges = sorted({0, numel, *(c for c in cuts if c < numel)})
    whole = torch.arange(numel, dtype=torch.float32)
    state, files = State("float32"), {}
    for i, (a, b) in enumerate(itertools.pairwise(edges)):
        name = f"rank_{i:05d}.safetensors"
        files[name] = write_fragments(folder / name, [(f"x:weight:{a}", torch.float32, b - a)], [whole[a:b]])
        state.fragments.insert(0, (name, a, b))  # in any order
    manifest = Manifest({"step": 1}, {"x": Entry((numel,), "trainable", None, {"weight": state})}, {}, files)
    manifest.check_coverage()
    assert Manifest.from_json(manifest.to_json()) == manifest
    start, stop = sorted(min(w, numel) for w in window)
    with Reader(folder, manifest) as reader:
        out = torch.full((stop - start,), -1.0)
        reader.read_into(out, "x", "weight", start)
        assert torch.equal(out, whole[start:stop])
        assert torch.equal(reader.tensor("x"), whole)


@pytest.mark.parametrize("fragments", [[(0, 4)], [(0, 5), (6, 8)], [(0, 5), (4, 8)], [(0, 8), (0, 8)], []])
def test_gaps_and_overlaps_are_refused(fragments):
    state = State("float32", [("f", a, b) for a, b in fragments])
    with pytest.raises(CheckpointError, match="x"):
        Manifest({}, {"x": Entry((8,), "trainable", None, {"weight": state})}, {}, {}).check_coverage()


def test_parameter_that_nobody_saved_is_refused():
    with pytest.raises(CheckpointError, match="no rank saved the weight of x"):
        Manifest({}, {"x": Entry((8,), "trainable")}, {}, {}).check_coverage()


@pytest.mark.parametrize("world", [1, 2, 3, 7, 50])
def test_even_cuts_cover_everything_once(world):
    numels = {"a": 10, "b": 1, "c": 0, "d": 23}
    parts = [even_cuts(numels, rank, world) for rank in range(world)]
    for name, numel in numels.items():
        covered = [i for part in parts for i in range(*part[name])]
        assert covered == list(range(numel))
    sizes = [sum(b - a for a, b in part.values()) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_read_tensor_by_name(saved):
    weight = read_tensor(step(saved, 4), "layers.0.mlp.up_proj.weight")
    assert weight.shape == (41, 63)
    assert read_tensor(step(saved, 4), "layers.0.mlp.up_proj.weight", "momentum").shape == (41, 63)
    with pytest.raises(CheckpointError, match=r"holds no weight of nonsense \(no such tensor\)"):
        read_tensor(step(saved, 4), "nonsense")
    with pytest.raises(CheckpointError, match=r"holds no exp_avg of .* \(it has weight, momentum\)"):
        read_tensor(step(saved, 4), "layers.0.mlp.up_proj.weight", "exp_avg")


def test_state_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_json(tmp_path / "client.json", {"model": torch.zeros(1)})


# -- damage ------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(path: Path) -> None:
    os.truncate(path, 0)


FILES = (
    "rank_00000.safetensors",
    "rank_00001.safetensors",
    "rank_00001.json",
    "client.json",
    "manifest.json",
)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncate, flip, empty, Path.unlink])
def test_every_damaged_file_is_named(copy, name, damage):
    path = step(copy, 4) / name
    assert verify(path.parent) == []
    damage(path)
    problems = verify(path.parent)
    assert len(problems) == 1
    assert name in problems[0]


def test_resume_from_damage_names_the_file_and_offers_the_previous(copy):
    """A flipped bit is found before anything is loaded, on both ranks, whichever rank's turn it was."""
    flip(step(copy, 4) / "rank_00001.safetensors")
    answers = run(2, [{"stage": 2, "dir": str(copy), "resume": None, "steps": 6}])
    for rank in answers:
        assert "rank_00001.safetensors: is damaged (its sha256 differs" in rank[0]["error"]
        assert f"the newest complete one is {step(copy, 3)}" in rank[0]["error"]
        assert rank[0]["losses"] == {}
    follow(answers[0][0]["error"])
    again = run(2, [{"stage": 2, "dir": str(copy), "resume": None, "steps": 6}])
    assert again[0][0]["losses"].keys() == {"4", "5", "6"}


def test_latest_that_is_damaged_is_no_fresh_start(copy):
    truncate(step(copy, 4) / "rank_00000.safetensors")
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors: has \d+ bytes") as caught:
        find_latest(copy)
    assert f"the newest complete one is {step(copy, 3)}" in str(caught.value)
    assert "step_00000004 (damaged)" in str(caught.value)
    follow(str(caught.value))
    assert find_latest(copy) == step(copy, 3)


def follow(message: str) -> None:
    """Run the command that the error message gives."""
    command = re.search(r"`python tools/reshape_checkpoint\.py ([^`]*)`", message)
    assert command is not None, message
    assert reshape_checkpoint(command.group(1).split()) == 0


@pytest.mark.parametrize(
    "pointer", ["step_00000999", "", "../x", "/", "step_00000004\n\n", "step_4", "latest"]
)
def test_broken_pointer_lists_what_is_there(copy, pointer):
    (copy / "checkpoints" / "latest").write_text(pointer)
    with pytest.raises(CheckpointError) as caught:
        find_latest(copy)
    for number in (1, 2, 3, 4):
        assert step(copy, number).name in str(caught.value)


def test_pointer_may_end_with_a_newline_or_not(copy):
    for text in ("step_00000004\n", "step_00000004"):
        (copy / "checkpoints" / "latest").write_text(text)
        assert find_latest(copy) == step(copy, 4)


def test_missing_pointer_takes_the_newest_and_says_so(copy):
    (copy / "checkpoints" / "latest").unlink()
    newest, remarks = latest(copy)
    assert newest == step(copy, 4)
    assert "`latest` is missing" in remarks[0]


def test_newest_is_by_time_of_saving_not_by_step(copy):
    """After going back to step 2 and saving step 3 anew, step 4 belongs to a branch that was given up."""
    case = {"stage": 2, "dir": str(copy), "resume": str(step(copy, 2)), "steps": 3, "save_at": [3]}
    answer = run(2, [case])
    assert "error" not in answer[0][0]
    assert find_latest(copy) == step(copy, 3)
    (copy / "checkpoints" / "latest").unlink()
    assert find_latest(copy) == step(copy, 3)
    assert verify(step(copy, 3)) == []


def test_no_directory_or_an_empty_one_is_a_fresh_start(tmp_path):
    assert find_latest(tmp_path / "none") is None
    (tmp_path / "checkpoints").mkdir()
    assert find_latest(tmp_path) is None


def test_only_a_partial_save_starts_at_zero_and_says_so(tmp_path, caplog):
    (tmp_path / "checkpoints" / "step_00000003.partial-0001").mkdir(parents=True)
    caplog.set_level("INFO", "wm_ds")
    assert find_latest(tmp_path) is None
    assert caplog.messages == [
        "step_00000003.partial-0001: skipped, its save never ended",
        "the first save of this run never ended: starting at step 0",
    ]


def test_only_damaged_checkpoints_are_refused(copy):
    (copy / "checkpoints" / "latest").unlink()
    for number in (1, 2, 3, 4):
        (step(copy, number) / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is complete"):
        find_latest(copy)


def test_earlier_checkpoint_that_is_damaged_is_skipped_and_told(copy):
    (step(copy, 2) / "client.json").unlink()
    newest, remarks = latest(copy)
    assert newest == step(copy, 4)
    assert len(remarks) == 1
    assert remarks[0].startswith("step_00000002: skipped, ")
    assert remarks[0].endswith("client.json: is missing")


def test_explicit_step_without_pointer(copy):
    """The step that was asked for is the one that is loaded, whatever `latest` says."""
    (copy / "checkpoints" / "latest").unlink()
    cases = [
        {"stage": s, "dir": str(copy / f"to{s}"), "resume": str(step(copy, 2)), "steps": 2} for s in (0, 2)
    ]
    run(2, [case | {"save_first": True} for case in cases])
    for case in cases:
        for name in ("norm.weight", "pool.key.proj"):
            got = read_tensor(step(Path(case["dir"]), 2), name)
            assert torch.equal(got, read_tensor(step(copy, 2), name))
            assert not torch.equal(got, read_tensor(step(copy, 4), name))


# -- safety ------------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("name", FILES)
def test_no_file_can_run_code(copy, tmp_path, name):
    """A pickle in place of any file, with a manifest that vouches for it, is refused and not run."""
    trap = tmp_path / "pwned"
    target = step(copy, 4) / name
    target.write_bytes(pickle.dumps(Bomb(trap)))
    if name != "manifest.json":  # an attacker who forges the checksums too
        manifest = read_manifest(target.parent)
        manifest.files[name] = write_json(tmp_path / "x", 0) | {"size": target.stat().st_size}
        manifest.files[name]["sha256"] = hashlib.sha256(target.read_bytes()).hexdigest()
        (target.parent / "manifest.json").write_text(manifest.to_json())
        assert verify(target.parent) == []
    case = {"stage": 2, "dir": str(tmp_path / "other"), "resume": str(target.parent), "steps": 5}
    answers = run(2, [case])
    for rank in answers:
        assert name in rank[0]["error"]
        assert rank[0]["losses"] == {}
    assert not trap.exists()


def test_manifest_may_not_point_outside(copy):
    path = step(copy, 4) / "manifest.json"
    manifest = read_manifest(path.parent)
    manifest.files["../../evil.safetensors"] = manifest.files.pop("rank_00001.json")
    path.write_text(manifest.to_json())
    assert "names a file outside of its directory" in verify(path.parent)[0]


def test_edited_manifest_is_noticed(copy):
    path = step(copy, 4) / "manifest.json"
    content = json.loads(path.read_text())
    content["manifest"]["run"]["step"] = 5
    path.write_text(json.dumps(content))
    assert "does not match its own checksum" in verify(path.parent)[0]


# -- pruning -----------------------------------------------------------------------------------------------


def test_prune_keeps_the_last_and_every_nth(copy):
    assert prune(copy, keep_last=1, keep_every=2) == ["step_00000003", "step_00000001"]
    assert [c.step for c in list_checkpoints(copy)] == [4, 2]


def test_prune_counts_only_complete_ones(copy):
    """A damaged one takes no good one's place, and is left for a person to look at."""
    truncate(step(copy, 4) / "rank_00000.safetensors")
    prune(copy, keep_last=2)
    assert sorted(c.step for c in list_checkpoints(copy)) == [2, 3, 4]


def test_prune_never_removes_all(copy):
    with pytest.raises(ValueError, match="keep_last is 0"):
        prune(copy, keep_last=0)
    prune(copy, keep_last=1)
    assert [c.step for c in list_checkpoints(copy)] == [4]


def test_pruning_of_a_run(tmp_path):
    case = {"stage": 1, "dir": str(tmp_path), "steps": 7, "save_at": [1, 2, 3, 4, 5, 6, 7]}
    run(2, [case | {"keep_last": 2, "keep_every": 3}])
    assert [c.step for c in list_checkpoints(tmp_path)] == [7, 6, 3]
