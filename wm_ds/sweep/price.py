"""What fewer passes cost and lose: every arm of a sweep beside the paper's schedule, seed by seed.

Arms of one seed see the same batches in the same order from the same initial weights, so that their
difference varies less than either of them: what is given is the mean of the differences, and its standard
error over the seeds that both have.
"""

from __future__ import annotations

import math
from typing import Any

from wm_ds.sweep.claims import Answer, Results
from wm_ds.sweep.collect import figures

SWEEP, PAPER, VANILLA = "passes", "paper", "vanilla_L"
NEAR = 0.003
"""What a cheaper schedule may lose of exact perplexity."""
CHEAP = 1.5
"""Of vanilla's training FLOPs."""


def paired(report: dict[str, Any], arm: str, other: str, figure: str) -> tuple[float, float | None, int]:
    """(mean relative difference of `figure`, its standard error, seeds) of two arms over their common seeds.

    The error is None for one seed; the mean is NaN for none.
    """
    values = [
        {run["seed"]: figures(run).get(figure) for run in report["arms"].get(name, {"runs": []})["runs"]}
        for name in (arm, other)
    ]
    changes = [
        one / two - 1
        for seed, one in values[0].items()
        if one is not None and (two := values[1].get(seed)) is not None
    ]
    n = len(changes)
    if n == 0:
        return math.nan, None, 0
    mean = math.fsum(changes) / n
    if n == 1:
        return mean, None, 1
    variance = math.fsum((change - mean) ** 2 for change in changes) / (n - 1)
    return mean, math.sqrt(variance / n), n


_HEAD = (
    "arm",
    "seeds",
    "training FLOPs, × vanilla",
    "exact perplexity",
    "beside 1 + 2, same seeds",
    "1, 2, 3 passes over exact, trained g",
    "twice the groups",
    "Jacobi",
    "layerwise start, trained g",
    "layerwise, twice the groups",
    "layerwise, Jacobi",
)


def section(results: Results, nothing: str) -> str:
    """The table, and what it says of the goal; `nothing` where nothing was run."""
    report = results.get(SWEEP)
    if report is None:
        return nothing
    best = cheapest(results)
    if best is None:
        return table(report)
    return (
        f"{table(report)}\n\nAt most {CHEAP} times vanilla's FLOPs, within {100 * NEAR:.1f} % of the paper's "
        f"schedule: {best.order}; the best is {best.ours}."
    )


def table(report: dict[str, Any]) -> str:
    """One row an arm: what its training costs, what it loses, and how few passes serve it afterwards."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|---" * len(_HEAD) + "|"]
    vanilla = report["arms"][VANILLA]["summary"].get("training_flops")
    for name, arm in report["arms"].items():
        found = arm["summary"]
        if not arm["runs"]:
            lines.append(f"| {arm['label']} | 0 of {len(arm['seeds'])} |" + " |" * (len(_HEAD) - 2))
            continue
        times = "—" if not vanilla else f"{found['training_flops']['mean'] / vanilla['mean']:.2f}"
        exact = found["exact_perplexity"]
        spread = "" if exact["deviation"] is None else f" ± {exact['deviation']:.2f}"
        cells = [
            arm["label"],
            f"{len(arm['runs'])} of {len(arm['seeds'])}",
            times,
            f"{exact['mean']:.2f}{spread}",
            "" if name == PAPER else in_words(*paired(report, name, PAPER, "exact_perplexity")),
            *(
                _excess(found, [f"{start}_g{g}_{n}" for n in (1, 2, 3)])
                for start in ("embedding", "layerwise")
                for g in groups_of(arm)
            ),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def in_words(change: float, error: float | None, n: int) -> str:
    """A paired difference in per cent."""
    if n == 0:
        return "—"
    words = f"{100 * change:+.2f}".replace("-", "−")
    return f"{words} %" if error is None else f"{words} ± {100 * error:.2f} %"


def groups_of(arm: dict[str, Any]) -> tuple[int, int, int]:
    """The groups that prefill was measured with: those of training, twice as many, one."""
    trained = arm["runs"][0]["measured"]["passes"]["groups"] or 1
    return trained, 2 * trained, 1


def _excess(found: dict[str, Any], names: list[str]) -> str:
    exact = found["exact_perplexity"]["mean"]
    known = [found[name]["mean"] for name in names if found.get(name)]
    if not known:
        return "—"
    return ", ".join(f"{100 * (value / exact - 1):+.2f}".replace("-", "−") for value in known) + " %"


def cheapest(results: Results) -> Answer | None:
    """The best arm that trains for at most 1.5 times vanilla's FLOPs, beside the paper's passes."""
    report = results.get(SWEEP)
    if report is None:
        return None
    vanilla = report["arms"][VANILLA]["summary"].get("training_flops")
    found = []
    for name, arm in report["arms"].items():
        if not arm["runs"] or vanilla is None or name in (PAPER, VANILLA):
            continue
        change, error, n = paired(report, name, PAPER, "exact_perplexity")
        times = arm["summary"]["training_flops"]["mean"] / vanilla["mean"]
        if times <= CHEAP and n:
            found.append((change, error, n, times, arm["label"]))
    if not found:
        return None
    change, error, n, times, label = min(found)
    return Answer(
        f"{in_words(change, error, n)} at {times:.2f} x ({label}; {n} seeds)",
        "reached" if change <= NEAR else "not reached",
    )
