"""What fewer passes cost and lose, from results that are made up."""

from __future__ import annotations

import math

import pytest

from tests.support.sweep_results import arm, entry, sweep_report
from wm_ds.sweep import price


def results(cheap: list[float], flops: float = 1.4e13) -> dict:
    """The paper's schedule at 50, 60, 70 by seed, and an arm beside it."""
    curves = [
        {"groups": g, "start": start, "perplexities": [66.0, 61.0, 60.0 + g / 10]}
        for g in (1, 8, 16)
        for start in ("embedding", "layerwise")
    ]
    curve = {"starts": curves, "trained": 8}
    paper = [entry(i, p, [2 * p, p, p], flops=2e13, **curve) for i, p in enumerate((50.0, 60.0, 70.0))]
    other = [entry(i, p, [2 * p, p, p], flops=flops, **curve) for i, p in enumerate(cheap)]
    arms = {
        "vanilla_L": arm("vanilla", [entry(0, 80.0, flops=1e13)]),
        "paper": arm("1 + 2", paper),
        "cheap": arm("cheap one", other, [0, 1, 2]),
    }
    return {"passes": sweep_report("passes", arms)}


def test_arms_are_compared_seed_by_seed():
    change, error, n = price.paired(
        results([50.5, 60.0, 70.7])["passes"], "cheap", "paper", "exact_perplexity"
    )
    differences = [0.01, 0.0, 0.01]
    mean = sum(differences) / 3
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / 2)
    assert (change, n) == (pytest.approx(mean), 3)
    assert error == pytest.approx(deviation / math.sqrt(3))
    # Seeds that one of them lacks do not count, though the means of all differ widely.
    assert price.paired(results([51.0])["passes"], "cheap", "paper", "exact_perplexity") == (
        pytest.approx(0.02),
        None,
        1,
    )
    assert price.paired(results([])["passes"], "cheap", "paper", "exact_perplexity")[1:] == (None, 0)


def test_the_table_gives_cost_and_loss():
    lines = price.table(results([50.5, 60.0, 70.7])["passes"]).splitlines()
    assert len(lines) == 5
    over = "+9.27, +0.99, "
    by_groups = " | ".join(f"{over}{g} %" for g in ("+0.66", "+1.99", "−0.50"))
    assert (
        lines[4]
        == f"| cheap one | 3 of 3 | 1.40 | 60.40 ± 10.11 | +0.67 ± 0.33 % | {by_groups} | {by_groups} |"
    )
    assert lines[3].split("|")[5].strip() == ""
    assert lines[2] == "| vanilla | 1 of 1 | 1.00 | 80.00 | +60.00 % | — | — | — | — | — | — |"
    assert price.table(results([])["passes"]).splitlines()[4].startswith("| cheap one | 0 of 3 |")
    assert price.section({}, "nothing") == "nothing"
    said = price.section(results([50.1, 60.1, 70.1]), "nothing")
    assert said.endswith(
        "At most 1.5 times vanilla's FLOPs, within 0.3 % of the paper's schedule: reached; "
        "the best is +0.17 ± 0.02 % at 1.40 x (cheap one; 3 seeds)."
    )


@pytest.mark.parametrize(
    ("cheap", "flops", "order"),
    [
        ([50.1, 60.1, 70.1], 1.4e13, "reached"),
        ([51.0, 61.0, 71.0], 1.4e13, "not reached"),
        ([50.1, 60.1, 70.1], 1.6e13, None),
        ([], 1.4e13, None),
    ],
)
def test_the_target_is_judged_by_loss_and_cost(cheap, flops, order):
    found = price.cheapest(results(cheap, flops))
    assert (found and found.order) == order
    if found is not None:
        assert found.ours.endswith("at 1.40 x (cheap one; 3 seeds)")
