"""Whatever a message says to run, remove or write is done here as it stands, in folders with odd names."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from tests.support import exported, toy_corpus
from tools import plan_memory
from wm_ds import train
from wm_ds.checkpoint.directory import find_latest, list_checkpoints, previous_complete
from wm_ds.checkpoint.format import CheckpointError
from wm_ds.data.shards import ShardError, load_manifest

ODD = "it's [my] run $1"


def run_as_printed(text: str) -> int:
    """Run the one command `python tools/X.py …` in `text`, as a shell would take it apart."""
    (found,) = re.findall(r"python (tools/\w+\.py [^`;]*)", text)
    program, *words = shlex.split(found.removesuffix(", which removes nothing"))
    return importlib.import_module(program.removesuffix(".py").replace("/", ".")).main(words)


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = exported.make_run(tmp_path_factory.mktemp("two"), step=3)
    exported.save(run, exported.build(run, seed=7), 7)
    return run


@pytest.fixture
def run(two_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_steps, tmp_path / ODD))


def damage(run: Path, step: int) -> None:
    os.truncate(run / "checkpoints" / f"step_{step:08d}" / "rank_00001.safetensors", 100)


def refused(run: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        find_latest(run)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_damaged_latest_checkpoint(run):
    damage(run, 7)
    assert run_as_printed(refused(run)) == 0
    assert find_latest(run) == run / "checkpoints" / "step_00000003"
    assert (run / "checkpoints" / "set_aside_step_00000007").is_dir(), "nothing was removed"


def test_damage_that_only_a_checksum_shows(run):
    """Found while loading, so after the latest was chosen."""
    assert run_as_printed(previous_complete(run / "checkpoints" / "step_00000007")) == 0
    assert find_latest(run) == run / "checkpoints" / "step_00000003"


@pytest.mark.parametrize("name", ["step_00000009\n", "", "../elsewhere\n", "\xff"])
def test_a_latest_that_names_nothing(run, name):
    latest = run / "checkpoints" / "latest"
    latest.write_text(name, encoding="latin-1")
    said = refused(run)
    assert str(latest) in said
    if "Remove it to go on" in said:
        latest.unlink()
        assert find_latest(run) == run / "checkpoints" / "step_00000007"


def test_no_complete_checkpoint(run):
    for listed in list_checkpoints(run):
        damage(run, listed.step)
    (run / "checkpoints" / "latest").unlink()
    said = refused(run)
    assert said.endswith(f"remove {run / 'checkpoints'} to start at step 0 again")
    shutil.rmtree(run / "checkpoints")
    assert find_latest(run) is None


@pytest.mark.parametrize("damaged", [True, False])
def test_packing_in_tasks_and_a_damaged_manifest(tmp_path, capsys, damaged):
    tokenizer = toy_corpus.byte_tokenizer(tmp_path / "tokenizer")
    texts = toy_corpus.write_jsonl(tmp_path / "a.jsonl", toy_corpus.numbered(20))
    out = tmp_path / ODD
    for task in (0, 1):
        options = ("--seq-len", 16, "--holdout", 2, "--task", task, "--tasks", 2)
        assert toy_corpus.pack(out, [texts], tokenizer, *options) == 0
    said = capsys.readouterr().out
    with pytest.raises(ShardError, match="has not finished") as caught:
        load_manifest(out)
    assert run_as_printed(said.splitlines()[-1]) == 0
    rows = load_manifest(out)["sequences"] if "sequences" in load_manifest(out) else load_manifest(out)
    (out / "manifest.json").unlink()
    if damaged:
        (out / "manifest.json").write_text("{")
        with pytest.raises(ShardError, match="remove it and write it again") as caught:
            load_manifest(out)
        (out / "manifest.json").unlink()
    assert run_as_printed(str(caught.value).replace(" if it was packed by an array of tasks", "")) == 0
    again = load_manifest(out)
    assert again.get("sequences", again) == rows


@pytest.mark.long
@pytest.mark.parametrize("gather", [None, "step"])
@pytest.mark.parametrize("memory", ["1", "0.0012"])
def test_the_planners_recommendation_is_a_run(tmp_path, capsys, monkeypatch, gather, memory):
    """With much room and with little, for a file that was written for stage 3, and one that was not."""
    model = exported.MODEL | {"num_groups": 4}
    raw = {
        "run": {"dir": "run"},
        "model": model,
        "data": {"train": "not packed yet"},
        "batch": {"global_batch": 4, "micro_batch": 1},
        "optim": {"lr": 1e-3},
        "deepspeed": "ds_configs/zero3.json",
        "zero3": {"gather": gather},
        "steps": 10,
    }
    monkeypatch.chdir(tmp_path)
    Path(f"{ODD}.yaml").write_text(yaml.safe_dump(raw))
    words = [f"{ODD}.yaml", "data.train=[{path: 'a b'}]", "--gpus", "2", "--gpu-memory", memory]
    assert plan_memory.main([*words, "--length", "32"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("recommended: ")]
    command = shlex.split(line.removeprefix("recommended: "))
    assert command[:5] == ["torchrun", "--nnodes", "1", "--nproc-per-node", "2"]
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main([*command[command.index("wm_ds.train") + 1 :], "--dry-run", "--seq-len", "32"]) == 0
    assert "all checks passed" in capsys.readouterr().out
