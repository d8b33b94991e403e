"""`--dry-run`: what it prints, and that its memory plan is the planner's."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.test_train import ROOT, data, run_file  # noqa: F401  (data is a fixture)
from wm_ds import train
from wm_ds.config import load as configuration
from wm_ds.config.deepspeed_json import load_deepspeed
from wm_ds.engine.deepspeed_config import table_for
from wm_ds.families import build_model, model_config
from wm_ds.plan.dry_run import dry_run, rows_of
from wm_ds.plan.flops import training
from wm_ds.plan.memory import GIB, configured
from wm_ds.plan.way import Run
from wm_ds.start import open_data


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> int:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    return 2


def section(shown: str, title: str) -> str:
    return shown.split(f"# {title}")[1].split("\n\n")[0]


def test_it_shows_the_run_and_writes_nothing(capsys, data, tmp_path, ranks):  # noqa: F811
    path = run_file(tmp_path, data)
    assert train.main([str(path), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    resolved = yaml.safe_load(section(shown, "the run"))
    assert configuration.parse(resolved) == configuration.load(path)
    assert '"gradient_clipping": 0.0' in section(shown, "DeepSpeed's configuration")
    assert "model.pool.key.proj" in section(shown, "parameters")
    assert "the cache holds 2 KVs a token for 4 layers: 64 bytes in bf16" in shown
    assert "1 micro-batches of 2 per rank and step" in shown
    assert re.search(r"warm-up 2 steps; learning rate 0\.005 at step 1, 0\.01 at step 2", shown)
    _, batches, _ = open_data(configuration.load(path))
    for step in (0, 1):
        (part,) = batches.batch(step, 0, 2, 2)
        samples = [int(i) for i in part["sample_ids"]]
        assert f"step {step + 1}, rank 0: samples {samples}, " in shown
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("deepspeed", "changes"),
    [
        ("zero2", {}),
        ("zero3_offload", {}),
        ("zero1", {"precision": "bf16", "batch__micro_batch": 1, "optim__clip_rule": "local"}),
        ("zero2", {"model__family": "vanilla", "model__num_groups": None, "recompute": "layer"}),
        ("zero2", {"model__family": "fusedkv", "model__num_groups": None, "recompute": "layer"}),
    ],
)
def test_its_memory_plan_is_the_planners(data, tmp_path, ranks, deepspeed, changes: dict[str, Any]):  # noqa: F811
    config = configuration.load(run_file(tmp_path, data, **changes))
    json = load_deepspeed(ROOT / "ds_configs" / f"{deepspeed}.json")
    shown = section(dry_run(json, rows_of(*open_data(config))), "states by arithmetic")
    _, batches, _ = open_data(config)
    hf = model_config(config.model, vocab_size=batches.vocab_size, seq_len=batches.seq_len, eos_id=0)
    rows = table_for(config, build_model(hf, seed=0))
    plan = configured(Run(config, hf, rows, batches.seq_len, ranks), json)
    found = {name: float(size) for name, size in re.findall(r"^(.*?) +([\d.]+) GiB", shown, re.MULTILINE)}
    for name, size in plan.parts.items():
        assert found.get(name, 0.0) == pytest.approx(size / GIB, abs=6e-4)
    assert found["peak on the device"] == pytest.approx(plan.peak / GIB, abs=6e-4)
    assert plan.way.stage == json["zero_optimization"]["stage"]
    assert ("in host memory" in shown) == ("offload" in deepspeed)
    assert all(note in shown for note in plan.notes)
    whole = config.model.family == "whitematter" and plan.way.stage >= 2
    assert any("whole on every GPU" in note for note in plan.notes) == whole
    assert any("summed in fp32" in note for note in plan.notes) == (config.precision == "bf16")
    parameters = sum(p.numel() for p in build_model(hf, seed=0).parameters())
    expected = {"zero1": 2 + 4 + 2, "zero2": 4, "zero3_offload": 0}[deepspeed]
    if deepspeed == "zero1":  # bf16 weights; bf16 gradients and their fp32 sums
        assert plan.parts["parameters"] + plan.parts["gradients"] == expected * parameters
    else:
        assert plan.parts["parameters"] == expected * parameters


def test_a_run_in_stages_is_shown_stage_by_stage(capsys, data, tmp_path, ranks):  # noqa: F811
    """FLOPs, epochs, rate and memory of each, against plans of runs that have no other."""
    cheap = {"no_grad_passes": 0, "grad_passes": 1}
    stages = [
        {"until": 2, "passes": cheap, "seq_len": 8},
        {"batch": {"global_batch": 8}, "lr_factor": 0.5, "freeze": ["*embed*"]},
    ]
    path = run_file(tmp_path, data, stages=stages)
    assert train.main([str(path), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    schedule = section(shown, "batches and schedule")
    first, second = schedule.split("stages.1, steps 3 to 6:")
    assert "stages.0, steps 1 to 2:\n  2 steps of 4 = 64 tokens" in first
    rows = open_data(configuration.load(path))[1].sources[0]
    assert f"{data}: 8 of {3 * len(rows):,} training sequences of 8, epochs 0.00 to " in first
    assert "learning rate 0.005 at step 1, 0.01 at step 2" in first
    assert "4 steps of 8 = 768 tokens" in second
    assert f"{data}: 32 of {len(rows):,} training sequences of 24" in second
    assert "frozen: *embed*" in second
    assert "2 micro-batches of 2 per rank and step" in second
    flops = []
    for own, length in ((cheap, 8), ({}, 24)):
        hf = model_config(
            configuration.load(path).model.model_copy(update=own),
            vocab_size=rows.vocab_size,
            seq_len=length,
            eos_id=0,
        )
        flops.append(training(hf, length).model)
    one = model_config(configuration.load(path).model, vocab_size=rows.vocab_size, seq_len=24, eos_id=0)
    total, alone = flops[0] * 64 + flops[1] * 768, training(one, 24).model * 832
    assert f"{total:.3g} FLOP for the run; {alone:.3g} for as many tokens in one stage" in second
    assert "\nstages.0" in section(shown, "states by arithmetic")
    for step in (1, 2, 3, 4):
        assert f"step {step}, rank 0: samples" in shown
    assert train.main([str(path), "--dry-run", "stages=[{until: 2, freeze: [nothing]}, {}]"]) == 2
    assert "stages.0.freeze: 'nothing' matches no parameter" in capsys.readouterr().err
    small = "stages=[{until: 2}, {passes: {schedule: chunked, chunk_size: 2}}]"
    assert train.main([str(path), small]) == 2, "before the start, not when the stage is entered"
    assert "stages.1: model: a chunk of 2 tokens cannot hold 4 groups" in capsys.readouterr().err
    assert train.main([str(path), "--dry-run", "stages=[{until: 2, seq_len: 7}, {}]"]) == 2
    assert "stages.0: rows of 7 tokens are no multiple of 8" in capsys.readouterr().err
    assert train.main([str(path), "--dry-run", "stages=[{until: 2, batch: {global_batch: 6}}, {}]"]) == 2
    assert "stages.0: global_batch 6 does not divide over 2 ranks" in capsys.readouterr().err


def test_every_refusal_of_a_start_is_one_of_the_dry_run(capsys, data, tmp_path, ranks):  # noqa: F811
    path = run_file(tmp_path, data)
    bad = tmp_path / "bad.json"
    bad.write_text('{"zero_optimisation": {"stage": 2}}')
    for override, said in (
        (f"deepspeed={bad}", "did you mean zero_optimization?"),
        ("batch.micro_batch=3", "global_batch 4 does not divide over 2 ranks"),
        ("model.vocab_size=10", "model.vocab_size = 10 is smaller"),
        ("optim.warmup=7", "optim.warmup = 7 is 7 steps of a run of 6"),
        ("optim.lrr=1", "did you mean optim.lr?"),
    ):
        assert train.main([str(path), "--dry-run", override]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
        assert said in captured.err


def test_world_size_alone_plans_for_so_many_ranks(capsys, data, tmp_path, monkeypatch):  # noqa: F811
    """As documented: WORLD_SIZE=64 python -m wm_ds.train … --dry-run, on a machine that starts no rank."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    path = run_file(tmp_path, data)
    monkeypatch.setenv("WORLD_SIZE", "64")
    many = ["batch.global_batch=64", "batch.micro_batch=1"]
    assert train.main([str(path), "--dry-run", *many]) == 0
    assert "of one of 64 ranks (WORLD_SIZE)" in capsys.readouterr().out
    for wrong in ("many", "0", "-1"):
        monkeypatch.setenv("WORLD_SIZE", wrong)
        assert train.main([str(path), "--dry-run", *many]) == 2
        assert f"WORLD_SIZE = {wrong!r} is no number of ranks" in capsys.readouterr().err


def test_a_run_whose_data_is_not_packed_yet_is_planned_by_its_row_length(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    path = run_file(tmp_path, tmp_path / "nowhere")
    assert train.main([str(path), "--dry-run"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert train.main([str(path), "--dry-run", "--seq-len", "32"]) == 0
    shown = capsys.readouterr().out
    assert "assumed: rows of 32 tokens, 151,936 in the vocabulary" in shown
    assert shown.rstrip().endswith("but those of the data, which was not opened; nothing was trained")
    two = ["sequence_parallel=2", "model.num_attention_heads=2", "model.num_key_value_heads=2"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert train.main([str(path), "--dry-run", "--seq-len", "36", *two]) == 2
    assert "does not divide the data's rows of 36 tokens" in capsys.readouterr().err
    assert train.main([str(path), "--seq-len", "32"]) == 2
    assert "--seq-len goes with --dry-run" in capsys.readouterr().err
    assert train.main([str(path), "--dry-run", "--seq-len", "0"]) == 2
    assert "--seq-len 0 must be 1 or more" in capsys.readouterr().err
