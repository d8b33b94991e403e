"""The paper's claims, one by one: its number, ours, and whether the order is the same.

A claim is a comparison of two arms (a ratio of their figures), or a trend over many. Whether a difference is
more than noise is judged by the deviation over seeds: of both means, where an arm has several seeds, and by
the pooled relative deviation of the sweep's other arms where it has one. Below two standard errors it is
called noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Results = dict[str, dict[str, Any]]
"""Results by the name of their file, without its ending."""

PENDING = "not run yet"
NOT_THERE = "not in the paper"
SAME, OTHER, NOISE = "same order", "other order", "within noise"


@dataclass(frozen=True)
class Answer:
    """What we found: in words, and the verdict on the order."""

    ours: str
    order: str


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper. `answer` looks the results up; None where they are not there."""

    section: str
    text: str
    paper: str
    answer: Callable[[Results], Answer | None]


@dataclass(frozen=True)
class Mean:
    """A figure of an arm: its mean, and the standard deviation of one run (None: not known)."""

    value: float
    deviation: float | None
    n: int


def mean(results: Results, sweep: str, arm: str, figure: str) -> Mean | None:
    """That figure of an arm; None where no run has it."""
    entry = results.get(sweep, {}).get("arms", {}).get(arm)
    found = (entry or {}).get("summary", {}).get(figure)
    if not found or found["mean"] is None:
        return None
    deviation = found["deviation"]
    if deviation is None:
        pooled = pooled_deviation(results[sweep], figure)
        deviation = None if pooled is None else pooled * abs(found["mean"])
    return Mean(found["mean"], deviation, found["n"])


def pooled_deviation(report: dict[str, Any], figure: str) -> float | None:
    """Relative deviation of one run, from all arms that have several seeds; None where none has."""
    squares = degrees = 0.0
    for arm in report["arms"].values():
        found = arm["summary"].get(figure)
        if found and found["deviation"] is not None and found["mean"]:
            squares += (found["n"] - 1) * (found["deviation"] / found["mean"]) ** 2
            degrees += found["n"] - 1
    return math.sqrt(squares / degrees) if degrees else None


def ratio(a: Mean, b: Mean) -> tuple[float, float | None]:
    """a / b - 1 and its standard error (None where nothing tells it)."""
    value = a.value / b.value
    if a.deviation is None or b.deviation is None:
        return value - 1, None
    parts = [(m.deviation or 0.0) / m.value / math.sqrt(m.n) for m in (a, b)]
    return value - 1, value * math.hypot(*parts)


def versus(
    sweep: str, a: str, b: str, *, lower: bool = True, figure: str = "perplexity"
) -> Callable[[Results], Answer | None]:
    """Arm a against arm b; `lower`: what the paper found of a's figure."""

    def answer(results: Results) -> Answer | None:
        first, second = (mean(results, sweep, arm, figure) for arm in (a, b))
        if first is None or second is None:
            return None
        change, error = ratio(first, second)
        noise = "" if error is None else f" ± {100 * error:.1f}"
        words = f"{percent(change)}{noise} ({first.n}, {second.n} seeds)"
        if error is not None and abs(change) < 2 * error:
            return Answer(words, NOISE)
        return Answer(words, SAME if (change < 0) == lower else OTHER)

    return answer


def percent(value: float) -> str:
    """`-8.2 %`."""
    return f"{100 * value:+.1f} %".replace("-", "−")


def flops(sweep: str, a: str, b: str) -> Callable[[Results], Answer | None]:
    """How many times b's training FLOPs a has."""

    def answer(results: Results) -> Answer | None:
        first, second = (mean(results, sweep, arm, "training_flops") for arm in (a, b))
        if first is None or second is None:
            return None
        times = first.value / second.value
        return Answer(f"{times:.2f} x", SAME if times > 1 else OTHER)

    return answer


def convergence(results: Results) -> Answer | None:
    """Passes to within 1 % of exact for each g."""
    found = passes_by_groups(results, "exact", "exact")
    if len(found) < 2:
        return None
    shown = ", ".join(f"g = {g}: {'none' if n is None else f'{n:g}'}" for g, n in found.items())
    counts = [math.inf if n is None else n for n in found.values()]
    falls = all(a >= b for a, b in pairwise(counts)) and counts[0] > counts[-1]
    return Answer(shown, SAME if falls else OTHER)


def passes_by_groups(results: Results, sweep: str, arm: str) -> dict[int, float | None]:
    """Passes to within the tolerance of exact perplexity, by the number of groups; None: not reached."""
    summary = results.get(sweep, {}).get("arms", {}).get(arm, {}).get("summary", {})
    names = [n for n in summary if n.startswith("converge_exact_g") and not n.endswith("_s")]
    return {int(name.rpartition("g")[2]): summary[name]["mean"] for name in names}


def speed(against: str) -> Callable[[Results], Answer | None]:
    """The best g's seconds against Jacobi's, or against exact evaluation's."""

    def answer(results: Results) -> Answer | None:
        times = {
            g: found.value
            for g in passes_by_groups(results, "exact", "exact")
            if (found := mean(results, "exact", "exact", f"converge_exact_g{g}_s")) is not None
        }
        other = mean(results, "exact", "exact", "exact_s")
        slow = times.get(1) if against == "jacobi" else None if other is None else other.value
        cyclic = {g: seconds for g, seconds in times.items() if g > 1}
        if slow is None or not cyclic:
            return None
        best = min(cyclic, key=lambda g: cyclic[g])
        times_faster = slow / cyclic[best]
        return Answer(f"{times_faster:.1f} x at g = {best}", SAME if times_faster > 1 else OTHER)

    return answer


# Section 5.1: arms are named KIND_DETACHED_GRADIENT, as jacobi_1_2 or g8_4_1.


@dataclass(frozen=True)
class Scheduled:
    """An arm of the schedule sweep."""

    name: str
    groups: int
    detached: int
    gradient: int


def scheduled(results: Results) -> list[Scheduled]:
    """The arms of the schedule sweep that have a run."""
    found = []
    for name, arm in results.get("schedule", {}).get("arms", {}).items():
        if arm["runs"]:
            kind, detached, gradient = name.split("_")
            groups = 1 if kind == "jacobi" else int(kind[1:])
            found.append(Scheduled(name, groups, int(detached), int(gradient)))
    return found


def spread(results: Results) -> Answer | None:
    """The strongest schedule's best perplexity against the weakest's."""
    best = [mean(results, "schedule", arm.name, "best_perplexity") for arm in scheduled(results)]
    values = [found.value for found in best if found is not None]
    if len(values) < 2:
        return None
    return Answer(percent(min(values) / max(values) - 1), SAME)


def more_is_better(results: Results) -> Answer | None:
    """Of all pairs of arms that differ in one thing alone, how many are better with more of it."""
    arms = scheduled(results)
    better = pairs = 0
    for a in arms:
        for b in arms:
            mine, other = (a.groups, a.detached, a.gradient), (b.groups, b.detached, b.gradient)
            if sum(x != y for x, y in zip(mine, other)) != 1 or not mine < other:
                continue
            low, high = (mean(results, "schedule", arm.name, "best_perplexity") for arm in (a, b))
            if low is not None and high is not None:
                pairs += 1
                better += high.value < low.value
    if not pairs:
        return None
    return Answer(f"in {better} of {pairs} pairs", SAME if better > 0.75 * pairs else OTHER)


def _halves(results: Results, figure: Callable[[str], float | None]) -> tuple[float, float] | None:
    """A figure's mean over the half of the arms with the fewest updates a position (g x passes), and over
    the other half."""
    arms = sorted(scheduled(results), key=lambda arm: arm.groups * (arm.detached + arm.gradient))
    values = [value for arm in arms if (value := figure(arm.name)) is not None]
    if len(values) < 4:
        return None
    half = len(values) // 2
    far, near = values[:half], values[-half:]
    return sum(far) / half, sum(near) / half


def degrade(results: Results) -> Answer | None:
    """How much worse exact decoding is than the best finite number of passes."""

    def loss(name: str) -> float | None:
        exact, best = (mean(results, "schedule", name, f) for f in ("exact_perplexity", "best_perplexity"))
        return None if exact is None or best is None else exact.value / best.value - 1

    found = _halves(results, loss)
    if found is None:
        return None
    far, near = found
    return Answer(f"{percent(far)} far from it, {percent(near)} near", SAME if far > near else OTHER)


def harder(results: Results) -> Answer | None:
    """Jacobi passes that models of either kind need."""

    def passes(name: str) -> float | None:
        found = mean(results, "schedule", name, "converge_best_g1")
        return None if found is None else found.value

    found = _halves(results, passes)
    if found is None:
        return None
    far, near = found
    return Answer(f"{far:.1f} far from it, {near:.1f} near", SAME if near > far else OTHER)


def channels(results: Results) -> Answer | None:
    """Perplexity over k."""
    names = ("k_1", "k_L/4", "k_L/2", "k_3L/4", "k_L")
    found = [(name, mean(results, "channels", name, "perplexity")) for name in names]
    known = [(name, m.value) for name, m in found if m is not None]
    if len(known) < len(names):
        return None
    values = [value for _, value in known]
    shown = ", ".join(f"{name.replace('_', ' = ')}: {value:.2f}" for name, value in known)
    return Answer(shown, SAME if values == sorted(values, reverse=True) else OTHER)


FULL, HALF, VANILLA = "WhiteMatter k = L", "WhiteMatter k = L/2", "vanilla, L layers"
EXACT_DECODING = (
    "Exact decoding against the best number of passes, by how far training was from the fixed point"
)
JACOBI_PASSES = "Jacobi passes that a model needs, by how far its training was from the fixed point"


def _higher(sweep: str, a: str, b: str) -> Callable[[Results], Answer | None]:
    return versus(sweep, a, b, lower=False)


CLAIMS = tuple(
    Claim(*row)
    for row in (
        ("4.2", f"{FULL} against {VANILLA}", "−8.2 %", versus("main", "wm_full", "vanilla_L")),
        ("4.2", f"{FULL} against vanilla, 1.5 L layers", "−1.1 %", versus("main", "wm_full", "vanilla_1.5L")),
        ("4.2", f"{HALF} against {VANILLA}", "−6.3 %", versus("main", "wm_half", "vanilla_L")),
        (
            "4.2",
            f"{HALF} against vanilla, 1.5 L layers",
            "+1.0 %",
            _higher("main", "wm_half", "vanilla_1.5L"),
        ),
        ("4.2", f"{HALF} against LCKV of the same cache", "−5.0 %", versus("main", "wm_half", "lckv_half")),
        (
            "4.2",
            f"LCKV, half the cache, against {VANILLA}",
            "−1.3 %",
            versus("main", "lckv_half", "vanilla_L"),
        ),
        (
            "4.2",
            f"LCKV, fewer sources, against {VANILLA}",
            "−0.3 %",
            versus("main", "lckv_small", "vanilla_L"),
        ),
        *(
            ("—", f"{HALF} against {name}, {cache}", NOT_THERE, versus("main", "wm_half", arm))
            for name, arm, cache in (
                ("CLA2", "cla2", "the same cache"),
                ("YOCO", "yoco", "the same cache"),
                ("FusedKV", "fusedkv", "the same cache"),
                ("the Feedback Transformer", "feedback_transformer", "which caches one channel"),
                ("the Recurrent Transformer", "recurrent_transformer", "which caches L channels"),
            )
        ),
        ("4.5", f"Training FLOPs, {FULL} against vanilla", "2.50 x", flops("main", "wm_full", "vanilla_L")),
        ("4.5", f"Training FLOPs, {HALF} against vanilla", "2.32 x", flops("main", "wm_half", "vanilla_L")),
        (
            *("—", f"{FULL} against vanilla that was trained with the same FLOPs", NOT_THERE),
            versus("equal_compute", "wm_full", "vanilla_equal"),
        ),
        (
            "4.4",
            "Passes to within 1 % of exact, model trained exactly",
            "75 (g = 1), 4 (g = 16, 32)",
            convergence,
        ),
        ("4.4", "Converged prefill, the best g against Jacobi", "11.2 x at g = 16", speed("jacobi")),
        ("4.4", "Converged prefill, the best g against exact", "13.9 x at g = 16", speed("exact")),
        ("5.1", "The strongest schedule of training against the weakest", "−32 %", spread),
        ("5.1", "More passes of either kind, and more groups, are better", "yes", more_is_better),
        ("5.1", EXACT_DECODING, "worse far from it", degrade),
        ("5.1", JACOBI_PASSES, "more near it", harder),
        ("5.2", "One channel against vanilla", "−7.3 %", versus("channels", "k_1", "vanilla_L")),
        ("5.2", "More channels are better", "yes, less and less", channels),
        ("5.3", "k = L without feedback against k = L", "+7.5 %", _higher("channels", "no_feedback", "k_L")),
        (
            "5.3",
            "k = L without feedback against vanilla",
            "lower",
            versus("channels", "no_feedback", "vanilla_L"),
        ),
        ("5.3", "k = L without feedback against k = 1", "higher", _higher("channels", "no_feedback", "k_1")),
        ("5.3", "k = L, static against dynamic mixing", "about +2 %", _higher("channels", "static_L", "k_L")),
        ("5.3", "k = 1, static against dynamic mixing", "about +2 %", _higher("channels", "static_1", "k_1")),
    )
)
