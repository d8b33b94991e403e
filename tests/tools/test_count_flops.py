"""The paper's Table 2 and the lean work of our passes, from the models at full size on the meta device."""

import functools
import importlib.util
import json
import sys
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from wm_ds.config.load import load

ROOT = Path(__file__).resolve().parents[2]
UNIT = 589_824  # FLOPs of one 512 x 576 projection of a token; the closed forms are small integers of it

# GFLOP per token as the paper prints them (Table 2): training, prefill, decode.
PRINTED = {
    "paper_vanilla_16l": ("0.444", "0.142", "0.179"),
    "paper_vanilla_24l": ("0.665", "0.212", "0.269"),
    "paper_vanilla_32l": ("0.887", "0.283", "0.359"),
    "paper_lckv_w4": ("1.421", "0.935", "0.173"),
    "paper_lckv_w7": ("1.174", "0.738", "0.175"),
    "paper_wm_k8": ("1.028", "0.432", "0.177"),
    "paper_wm_k16": ("1.111", "0.467", "0.184"),
}


@functools.cache
def tool():
    """tools/count_flops.py as a module."""
    spec = importlib.util.spec_from_file_location("count_flops", ROOT / "tools" / "count_flops.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["count_flops"] = module
    spec.loader.exec_module(module)
    return module


@functools.cache
def counted(name: str) -> dict:
    """One model's report; --json prints just this."""
    lm = tool().on_meta(load(ROOT / "configs" / f"{name}.yaml"), 2048)
    return asdict(tool().report(name, lm))


def units(flops: dict) -> tuple[float, float, float]:
    return tuple(round(flops[column] / UNIT, 1) for column in ("training", "prefill", "decode"))


@pytest.mark.parametrize("name", PRINTED)
def test_papers_accounting_to_the_printed_digit(name: str) -> None:
    got = counted(name)["paper"]
    assert tuple(f"{got[c] / 1e9:.3f}" for c in ("training", "prefill", "decode")) == PRINTED[name]


def test_papers_accounting_by_hand() -> None:
    """A block is 10 products and 4 of attention, 30 backward; a pool 24 at k = 16 and 12 at k = 8."""
    assert units(counted("paper_vanilla_16l")["paper"]) == (16 * 47, 16 * 15, 16 * 19)
    for name, pool in (("paper_wm_k16", 24), ("paper_wm_k8", 12)):
        training = 3 * 16 * 14 + 6 * pool + 31 * 30 + 2.875 * 2 * pool
        prefill = 3 * 16 * 14 + 5 * pool
        assert units(counted(name)["paper"]) == (training, prefill, 16 * 18 + pool)


def test_lean_work_by_hand() -> None:
    """Training: 3L-2 blocks and 3.875 pools forward, 2L-1 and 2.875 backward; prefill: 3L-2 and 4 pools."""
    for name, pool in (("paper_wm_k16", 24), ("paper_wm_k8", 12)):
        training = 46 * 14 + 31 * 30 + 3.875 * pool + 2.875 * 2 * pool
        prefill = 46 * 14 + 4 * pool
        got = counted(name)["lean"]
        # Within entries that the end of a row does not need.
        assert got["training"] / UNIT == pytest.approx(training, abs=0.5)
        assert got["prefill"] / UNIT == pytest.approx(prefill, abs=0.5)
        assert got["decode"] / UNIT == pytest.approx(16 * 18 + pool, abs=0.1)


def test_lean_multiples_of_vanilla() -> None:
    base = counted("paper_vanilla_16l")["lean"]
    for name, training, prefill in (("paper_wm_k16", "2.40", "3.08"), ("paper_wm_k8", "2.25", "2.88")):
        lean = counted(name)["lean"]
        assert f"{lean['training'] / base['training']:.2f}" == training
        assert f"{lean['prefill'] / base['prefill']:.2f}" == prefill


def test_lckv_by_hand() -> None:
    """Nine passes; the last needs all condensed layers, the others none but those below the top one."""
    for w, condensed in ((4, 12), (7, 9)):
        lean = counted(f"paper_lckv_w{w}")["lean"]
        blocks = 9 * (condensed - 1) + 1
        prefill = w * 15 + blocks * 14 + 10
        assert lean["prefill"] / UNIT == pytest.approx(prefill, abs=0.1)
        training = w * 47 + blocks * 14 + 9 + (2 * condensed - 1) * 30 + 2 * 2
        assert lean["training"] / UNIT == pytest.approx(training, abs=0.1)
        assert lean["decode"] / UNIT == pytest.approx(w * 19 + condensed * 18 + 1, abs=0.1)


def test_lckv_multiples_of_vanilla_to_the_printed_digit() -> None:
    base = counted("paper_vanilla_16l")["paper"]
    for w, printed in ((4, ("3.20", "6.61", "0.97")), (7, ("2.65", "5.21", "0.97"))):
        paper = counted(f"paper_lckv_w{w}")["paper"]
        assert tuple(f"{paper[c] / base[c]:.2f}" for c in ("training", "prefill", "decode")) == printed


def test_layers_that_share_kv_by_hand() -> None:
    """Eight of sixteen layers make a KV, which is one product."""
    for name in ("related_cla2", "related_yoco", "related_fusedkv"):
        lean = counted(name)["lean"]
        assert lean["training"] / UNIT == pytest.approx(16 * 44 + 8 * 3, abs=0.1)
        assert lean["prefill"] / UNIT == pytest.approx(16 * 14 + 8, abs=0.1)
        assert lean["decode"] / UNIT == pytest.approx(16 * 18 + 8, abs=0.1)


def test_group_recomputation_is_listed_apart() -> None:
    """It repeats the gradient passes, the blocks of the last detached pass for the sake of their pool, and
    the pool of the start, which that pass overwrote."""
    for name, pool in (("paper_wm_k16", 24), ("paper_wm_k8", 12)):
        again = 31 * 14 + 15 * 14 + 3.875 * pool
        assert counted(name)["recompute"] / UNIT == pytest.approx(again, abs=0.5)
    assert counted("paper_vanilla_16l")["recompute"] == 0


def test_the_table_is_printed_in_both_accountings(capsys: pytest.CaptureFixture) -> None:
    assert tool().main([str(ROOT / "configs" / "paper_vanilla_16l.yaml")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if "vanilla" in line][1:] == [
        ["paper_vanilla_16l", "0.444", "1.00", "0.142", "1.00", "0.179", "1.00"]
    ] * 2


def test_json_is_the_reports(capsys: pytest.CaptureFixture) -> None:
    assert tool().main(["--json", str(ROOT / "configs" / "paper_vanilla_16l.yaml")]) == 0
    assert json.loads(capsys.readouterr().out) == [counted("paper_vanilla_16l")]


def test_a_missing_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert tool().main([str(tmp_path / "none.yaml")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "none.yaml" in error


def test_no_names_means_the_papers_seven_models() -> None:
    assert [f"paper_{name}" for name in tool().PAPER_MODELS] == list(PRINTED)
    assert all((ROOT / "configs" / f"{name}.yaml").exists() for name in PRINTED)


@pytest.mark.long
def test_a_layerwise_start_by_hand() -> None:
    """Training: a sweep and 0 + 1 passes, 16 blocks and 1.875 pools with gradient. Prefill: a sweep, a pass,
    two pools. A channel of the sweep is what tests/plan/test_flops.py says."""
    overrides = ["model.start=layerwise", "model.no_grad_passes=0", "model.grad_passes=1"]
    overrides += ["model.prefill_passes=1"]
    base = counted("paper_vanilla_16l")["lean"]
    for name, pool, training, prefill in (("paper_wm_k8", 12, 1.33, 1.99), ("paper_wm_k16", 24, 1.42, 2.09)):
        lm = tool().on_meta(load(ROOT / "configs" / f"{name}.yaml", overrides), 2048)
        lean = tool().report(name, lm).lean
        known = (len([s for s in range(1, 16, 2) if s <= layer]) for layer in range(15))
        channels = sum(64 * (s + 1) * 512 + 64 * 512 + 4 * 288 * 512 for s in known) / UNIT
        sweep = 15 * 14 + channels
        assert lean.training / UNIT == pytest.approx(sweep + 16 * 14 + 16 * 30 + 3 * 1.875 * pool, abs=0.1)
        assert lean.prefill / UNIT == pytest.approx(sweep + 16 * 14 + 2 * pool, abs=0.1)
        assert lean.training / base["training"] == pytest.approx(training, abs=0.005)
        assert lean.prefill / base["prefill"] == pytest.approx(prefill, abs=0.005)


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("paper_wm_k8", []),
        ("paper_lckv_w4", []),
        ("paper_wm_k8", ["model.start=layerwise"]),
        ("paper_wm_k8", ["model.start=layerwise", "model.start_grad=true", "model.no_grad_passes=0"]),
        ("paper_wm_k8", ["model.prefill_start=layerwise", "model.prefill_passes=1"]),
    ],
)
def test_counts_times_costs_are_what_whole_steps_take(name: str, start: list[str]) -> None:
    """The same as running training, prefill and recomputation with all their passes and groups."""
    narrow = ["model.hidden_size=32", "model.intermediate_size=64", "model.head_dim=16"]
    narrow += ["model.num_attention_heads=2", "model.num_key_value_heads=1", *start]
    if name == "paper_wm_k8":
        narrow += ["model.num_hidden_layers=3", "model.num_kv_channels=2", "model.num_groups=4"]
    lm = tool().on_meta(load(ROOT / "configs" / f"{name}.yaml", narrow), 64)
    found = tool().report(name, lm, 64)
    once = sum(tool().train(lm, 64))
    assert found.lean.training * 64 == pytest.approx(once, rel=1e-12)
    assert found.lean.prefill * 64 == pytest.approx(tool().prefill(lm, 64), rel=1e-12)
    lm.model.recompute = "group"
    assert found.recompute * 64 == pytest.approx(sum(tool().train(lm, 64)) - once, rel=1e-12)


def test_products_are_counted_as_by_torchs_counter() -> None:
    lm = tool().on_meta(load(ROOT / "configs" / "paper_vanilla_16l.yaml", ["model.num_hidden_layers=2"]), 32)
    account = tool().Account(0)
    ours = tool().count(lambda: tool().forward(lm, 32).last_hidden_state.sum().backward(), account)
    patch = mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", account.attend)
    with patch, FlopCounterMode(display=False) as theirs:
        tool().forward(lm, 32).last_hidden_state.sum().backward()
    assert ours == theirs.get_total_flops() > 0
