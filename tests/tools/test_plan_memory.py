"""The planner's command line: refusals, the table, JSON, and a recommendation that fits."""

import json
from pathlib import Path

import pytest
import yaml

from tests.support.settings import MODEL
from tools.plan_memory import main
from wm_ds.plan.choice import Room
from wm_ds.plan.memory import Plan


@pytest.fixture
def config(tmp_path: Path) -> str:
    small = {"intermediate_size": 64, "num_hidden_layers": 2, "num_kv_channels": 2, "num_groups": 2}
    model = MODEL | small | {"vocab_size": 100}
    raw = {
        "run": {"dir": "unused"},
        "model": model,
        "data": {"train": str(tmp_path / "absent")},
        "batch": {"global_batch": 4, "micro_batch": 1},
        "optim": {"lr": 1e-3},
        "steps": 10,
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(raw))
    return str(path)


ARGUMENTS = ["--gpus", "2", "--length", "32"]


def test_json_has_every_plan_and_a_recommendation_that_fits(config: str, capsys) -> None:
    assert main([config, *ARGUMENTS, "--gpu-memory", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    best = report["plans"][report["recommended"]]
    assert best["fits"]
    assert best["peak"] == pytest.approx(sum(best["parts"].values()))
    # With room for everything: nothing recomputed, nothing offloaded, nothing cut that need not be.
    assert (best["recompute"], best["offload"]) == ("none", False)
    assert {p["stage"] for p in report["plans"]} == {0, 1, 2, 3}
    assert {p["recompute"] for p in report["plans"]} == {"none", "layer", "group", "group+layer"}


def test_the_table_names_the_command_to_use(config: str, capsys) -> None:
    assert main([config, *ARGUMENTS, "--gpu-memory", "1"]) == 0
    out = capsys.readouterr().out
    assert "recommended: torchrun --nnodes 1 --nproc-per-node 2 -m wm_ds.train" in out
    assert "batch.micro_batch=" in out


@pytest.mark.long
def test_a_run_in_stages_is_planned_stage_by_stage(config: str, capsys) -> None:
    """Each with its own row length, batch and passes: the sizes are those of a run that has no other."""
    stages = "stages=[{until: 4, passes: {no_grad_passes: 0, grad_passes: 1}}, {seq_len: 64}]"
    assert main([config, stages, *ARGUMENTS, "--gpu-memory", "1", "--json"]) == 0
    cheap, long = json.loads(capsys.readouterr().out)["stages"]
    assert (cheap["length"], long["length"]) == (32, 64)
    for report, alone in (
        (cheap, ["model.no_grad_passes=0", "model.grad_passes=1"]),
        (long, ["data.seq_len=64"]),
    ):
        assert main([config, *alone, *ARGUMENTS, "--gpu-memory", "1", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["plans"] == report["plans"]
    assert main([config, stages, *ARGUMENTS, "--gpu-memory", "1"]) == 0
    out = capsys.readouterr().out
    assert "stages.0, steps 1 to 4:\n" in out
    assert "stages.1, steps 5 to 10:\n" in out


def test_nothing_fits(config: str, capsys) -> None:
    assert main([config, *ARGUMENTS, "--gpu-memory", "0.000001"]) == 1
    assert "nothing fits" in capsys.readouterr().out


def test_offload_must_fit_the_host(config: str, capsys) -> None:
    """Both GPUs of the node offload into one host's memory; 1 kB is too little for either."""
    assert main([config, *ARGUMENTS, "--gpu-memory", "1", "--host-memory", "1e-6", "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert {p["offload"] for p in plans} == {True, False}
    for found in plans:
        assert found["fits"] != found["offload"]
        assert (found["host"] > 0) == found["offload"]
    moved = next(p for p in plans if p["offload"])
    plan = Plan(None, moved["parts"], moved["host"], {}, None, ())  # where it came from does not matter
    assert Room(1e9, 2 * plan.host, 2).holds(plan)
    assert not Room(1e9, 2 * plan.host - 1, 2).holds(plan)
    assert not Room(plan.peak - 1, 1e9, 2).holds(plan)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--gpus", "3", "--gpu-memory", "80", "--nodes", "2"], "--gpus 3 do not divide over --nodes 2"),
        (["--gpus", "3", "--gpu-memory", "80"], "global_batch 4 does not divide over 3 ranks"),
        (["--gpus", "2", "--gpu-memory", "-1"], "--gpu-memory -1.0: must be positive"),
        (["--gpus", "2", "--gpu-memory", "1", "--host-memory", "0"], "--host-memory 0.0: must be positive"),
    ],
)
def test_bad_arguments_are_one_line(config: str, extra: list[str], message: str, capsys) -> None:
    assert main([config, *extra]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_progress_is_told_apart_from_the_plan(config: str, capsys) -> None:
    assert main([config, *ARGUMENTS, "--gpu-memory", "1", "--json"]) == 0
    said = capsys.readouterr()
    assert [line.split(",")[0] for line in said.err.splitlines()] == ["measuring activations"] * 4
    json.loads(said.out)
