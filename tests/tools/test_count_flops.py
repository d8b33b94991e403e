"""The paper's Table 2 and the lean work of our passes, from the models at full size on the meta device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "tools" / "count_flops.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def reports() -> dict[str, dict]:
    done = run("--json")  # without names: the paper's seven models
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stderr
    return {item["name"]: item for item in json.loads(done.stdout)}


def units(flops: dict) -> tuple[float, float, float]:
    return tuple(round(flops[column] / UNIT, 1) for column in ("training", "prefill", "decode"))


@pytest.mark.parametrize("name", PRINTED)
def test_papers_accounting_to_the_printed_digit(name: str, reports: dict) -> None:
    got = reports[name]["paper"]
    assert tuple(f"{got[c] / 1e9:.3f}" for c in ("training", "prefill", "decode")) == PRINTED[name]


def test_papers_accounting_by_hand(reports: dict) -> None:
    """A block is 10 products and 4 of attention, 30 backward; a pool 24 at k = 16 and 12 at k = 8."""
    assert units(reports["paper_vanilla_16l"]["paper"]) == (16 * 47, 16 * 15, 16 * 19)
    for name, pool in (("paper_wm_k16", 24), ("paper_wm_k8", 12)):
        training = 3 * 16 * 14 + 6 * pool + 31 * 30 + 2.875 * 2 * pool
        prefill = 3 * 16 * 14 + 5 * pool
        assert units(reports[name]["paper"]) == (training, prefill, 16 * 18 + pool)


def test_lean_work_by_hand(reports: dict) -> None:
    """Training: 3L-2 blocks and 3.875 pools forward, 2L-1 and 2.875 backward; prefill: 3L-2 and 4 pools."""
    for name, pool in (("paper_wm_k16", 24), ("paper_wm_k8", 12)):
        training = 46 * 14 + 31 * 30 + 3.875 * pool + 2.875 * 2 * pool
        prefill = 46 * 14 + 4 * pool
        got = reports[name]["lean"]
        assert got["training"] / UNIT == pytest.approx(
            training, abs=0.5
        )  # entries that a row's end needs not
        assert got["prefill"] / UNIT == pytest.approx(prefill, abs=0.5)
        assert got["decode"] / UNIT == pytest.approx(16 * 18 + pool, abs=0.1)


def test_lean_multiples_of_vanilla(reports: dict) -> None:
    base = reports["paper_vanilla_16l"]["lean"]
    for name, training, prefill in (("paper_wm_k16", "2.40", "3.08"), ("paper_wm_k8", "2.25", "2.88")):
        lean = reports[name]["lean"]
        assert f"{lean['training'] / base['training']:.2f}" == training
        assert f"{lean['prefill'] / base['prefill']:.2f}" == prefill


def test_lckv_by_hand(reports: dict) -> None:
    """Nine passes; the last needs all condensed layers, the others none but those below the top one."""
    for w, condensed in ((4, 12), (7, 9)):
        lean = reports[f"paper_lckv_w{w}"]["lean"]
        blocks = 9 * (condensed - 1) + 1
        prefill = w * 15 + blocks * 14 + 10
        assert lean["prefill"] / UNIT == pytest.approx(prefill, abs=0.1)
        training = w * 47 + blocks * 14 + 9 + (2 * condensed - 1) * 30 + 2 * 2
        assert lean["training"] / UNIT == pytest.approx(training, abs=0.1)
        assert lean["decode"] / UNIT == pytest.approx(w * 19 + condensed * 18 + 1, abs=0.1)


def test_lckv_multiples_of_vanilla_to_the_printed_digit(reports: dict) -> None:
    base = reports["paper_vanilla_16l"]["paper"]
    for w, printed in ((4, ("3.20", "6.61", "0.97")), (7, ("2.65", "5.21", "0.97"))):
        paper = reports[f"paper_lckv_w{w}"]["paper"]
        assert tuple(f"{paper[c] / base[c]:.2f}" for c in ("training", "prefill", "decode")) == printed


def test_group_recomputation_is_listed_apart(reports: dict) -> None:
    """It repeats the gradient passes, and the blocks of the last detached pass for the sake of their pool."""
    for name, pool in (("paper_wm_k16", 24), ("paper_wm_k8", 12)):
        again = 31 * 14 + 15 * 14 + 2.875 * pool
        assert reports[name]["recompute"] / UNIT == pytest.approx(again, abs=0.5)
    assert reports["paper_vanilla_16l"]["recompute"] == 0


def test_the_table_is_printed_in_both_accountings() -> None:
    done = run(str(ROOT / "configs" / "paper_vanilla_16l.yaml"))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split() for line in lines if "vanilla" in line][1:] == [
        ["paper_vanilla_16l", "0.444", "1.00", "0.142", "1.00", "0.179", "1.00"]
    ] * 2


def test_a_missing_run_is_one_line(tmp_path: Path) -> None:
    done = run(str(tmp_path / "none.yaml"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert "none.yaml" in done.stderr
