"""Tables, verdicts and figures, from results that are made up."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.support.sweep_results import arm, entry, sweep_report
from tools import sweep as tool
from wm_ds.sweep import claims, report


def main_results(wm: list[float], vanilla: list[float]) -> dict:
    return {
        "main": sweep_report(
            "main",
            {
                "vanilla_L": arm("vanilla", [entry(i, p) for i, p in enumerate(vanilla)]),
                "wm_full": arm(
                    "WhiteMatter",
                    [entry(i, p, [p + 2, p + 1, p], flops=2.4e13, cache=512) for i, p in enumerate(wm)],
                ),
            },
        )
    }


def answer(text: str, results: dict) -> claims.Answer | None:
    (claim,) = [claim for claim in claims.CLAIMS if claim.text == text]
    return claim.answer(results)


FULL = "WhiteMatter k = L against vanilla, L layers"


@pytest.mark.parametrize(
    ("wm", "order"),
    [([90, 91, 92], claims.SAME), ([110, 111, 112], claims.OTHER), ([99, 100, 102], claims.NOISE)],
)
def test_the_order_of_two_arms_and_its_noise(wm, order):
    vanilla = [99.0, 100.0, 101.0]
    found = answer(FULL, main_results([float(p) for p in wm], vanilla))
    assert found.order == order
    mean = sum(wm) / 3
    # One standard error of the ratio of two means, by hand.
    spread = [
        math.sqrt(sum((p - m) ** 2 for p in ps) / 2) / m / math.sqrt(3)
        for ps, m in ((wm, mean), (vanilla, 100))
    ]
    error = mean / 100 * math.hypot(*spread)
    shown = f"{mean / 100 - 1:+.1%}".replace("-", "−").replace("%", " %")
    assert found.ours == f"{shown} ± {100 * error:.1f} (3, 3 seeds)"


def test_an_arm_with_one_seed_borrows_the_others_deviation():
    found = answer(FULL, main_results([90.0], [99.0, 100.0, 101.0]))
    error = 0.9 * math.hypot(0.01, 0.01 / math.sqrt(3))
    assert found.ours == f"−10.0 % ± {100 * error:.1f} (1, 3 seeds)"
    assert answer(FULL, main_results([99.0], [99.0, 100.0, 101.0])).order == claims.NOISE
    # Where nothing tells the noise, the order alone is said.
    assert answer(FULL, main_results([99.0], [100.0])) == claims.Answer("−1.0 % (1, 1 seeds)", claims.SAME)


def test_what_was_not_run_is_pending():
    assert all(claim.answer({}) is None for claim in claims.CLAIMS)
    table = report.claims_table({})
    assert table.count(claims.PENDING) == len(claims.CLAIMS) == len(table.splitlines()) - 2


def schedule_results() -> dict:
    """Perplexity falls with every pass and group; models trained far from the fixed point decode worse."""
    arms = {}
    for gradient in (1, 2):
        for detached in (1, 2, 4):
            for groups in (1, 4, 8, 16):
                name = f"{'jacobi' if groups == 1 else f'g{groups}'}_{detached}_{gradient}"
                work = groups * (detached + gradient)
                best = 50.0 + 40.0 / work
                run = entry(0, best, [best], exact=best * (1 + 1 / work), groups={1: 3 + work // 10})
                arms[name] = arm(name, [run])
    return {"schedule": sweep_report("schedule", arms)}


def test_the_three_trends_of_schedules():
    results = schedule_results()
    assert answer("The strongest schedule of training against the weakest", results).ours.startswith("−")
    pairs = 24 * (3 + 2 + 1) // 2
    found = answer("More passes of either kind, and more groups, are better", results)
    assert found == claims.Answer(f"in {pairs} of {pairs} pairs", claims.SAME)
    assert answer(claims.EXACT_DECODING, results).order == claims.SAME
    assert answer(claims.JACOBI_PASSES, results).order == claims.SAME


def exact_results() -> dict:
    run = entry(0, 80.0, [90.0, 81.0], groups={1: 40, 2: 12, 4: 8, 8: 5, 16: 4, 32: None})
    return {"exact": sweep_report("exact", {"exact": arm("trained exactly", [run])})}


def test_convergence_and_its_speed():
    results = exact_results()
    found = answer("Passes to within 1 % of exact, model trained exactly", results)
    assert found.ours == "g = 1: 40, g = 2: 12, g = 4: 8, g = 8: 5, g = 16: 4, g = 32: none"
    assert found.order == claims.OTHER  # the last one was not reached
    assert answer("Converged prefill, the best g against Jacobi", results).ours == "10.0 x at g = 16"
    assert answer("Converged prefill, the best g against exact", results).ours == "5.0 x at g = 16"


def channels_results() -> dict:
    names = {"vanilla_L": 100, "k_1": 96, "k_L/4": 94, "k_L/2": 92, "k_3L/4": 91, "k_L": 90}
    names |= {"no_feedback": 98, "static_1": 97, "static_L": 91}
    arms = {name: arm(name, [entry(0, float(p))]) for name, p in names.items()}
    return {"channels": sweep_report("channels", arms)}


@pytest.fixture
def page(tmp_path) -> Path:
    """A page with every table, and results of every sweep that has a figure."""
    folder = tmp_path / "results"
    folder.mkdir()
    results = main_results([90.0, 91.0, 92.0], [99.0, 100.0, 101.0])
    results["main"]["arms"]["wm_full"]["seeds"] = [0, 1, 2, 3]
    results["main"]["arms"]["pending"] = arm("to come", [], [0])
    for name, content in (results | schedule_results() | exact_results() | channels_results()).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    page = tmp_path / "results.md"
    blocks = ["claims", "main", "other", "made main other", "figure passes By passes", "figure none X"]
    text = "".join(f"before {name}\n<!-- sweep: {name} -->\nold\n<!-- end -->\n" for name in blocks)
    page.write_text(text + "the end\n")
    return page


def test_a_page_is_filled_and_drawn_from_the_json_alone(page, capsys):
    assert tool.main(["--report", "--page", str(page)]) == 0
    said = capsys.readouterr().out
    assert "main: arm wm_full lacks seed 3; `python tools/sweep.py configs/sweeps/main.yaml`" in said
    text = page.read_text()
    assert text.count("before ") == 6
    assert text.endswith("<!-- end -->\nthe end\n")
    assert "old" not in text
    assert "| WhiteMatter | 3 of 4 | 91.000 ± 1.000 |" in text
    assert "| to come | 0 of 1 | not run yet |" in text
    assert text.count("Not run yet.") == 2
    assert "![By passes](results/passes.svg)" in text
    assert "- main: 6 runs, 6.0 hours of training (12.0 of CPU time); commit 0123456; 2 cores, a CPU" in text
    assert "- other: not run yet" in text
    drawn = sorted(path.name for path in (page.parent / "results").glob("*.svg"))
    assert drawn == ["channels.svg", "convergence.svg", "passes.svg", "quality.svg", "schedule.svg"]
    before = {name: (page.parent / "results" / name).read_bytes() for name in drawn}
    for picture in before.values():
        assert ET.fromstring(picture).tag.endswith("svg")
    # Again: the same page and the same pictures, byte for byte.
    assert tool.main(["--report", "--page", str(page)]) == 0
    assert page.read_text() == text
    assert before == {name: (page.parent / "results" / name).read_bytes() for name in drawn}


@pytest.mark.parametrize("case", ["no page", "no marker", "no result"])
def test_a_report_that_cannot_be_made_changes_nothing(page, capsys, case):
    if case == "no page":
        page.unlink()
    elif case == "no marker":
        page.write_text("nothing here\n")
    else:
        (page.parent / "results" / "main.json").write_text('{"half')
    before = sorted(page.parent.rglob("*")), page.exists() and page.read_text()
    assert tool.main(["--report", "--page", str(page)]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert before == (sorted(page.parent.rglob("*")), page.exists() and page.read_text())
