"""The figures of the page of results, as SVG, from the JSON results alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wm_ds.files import write_atomically
from wm_ds.sweep.claims import Results, mean, passes_by_groups, scheduled

PERPLEXITY = "held-out perplexity (lower is better)"


def draw(results: Results, folder: Path) -> list[Path]:
    """Draw every figure that has results; returns their files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    # The same results give the same bytes.
    pyplot.rcParams.update({"svg.hashsalt": "wm_ds", "svg.fonttype": "path", "font.size": 9})
    drawn = []
    for name, make in FIGURES.items():
        figure = make(results)
        if figure is None:
            continue
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
        pyplot.close(figure)
        path = folder / f"{name}.svg"
        write_atomically(path, picture.getvalue())
        drawn.append(path)
    return drawn


def _panels(count: int, height: float = 4.2) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(
        1, count, figsize=(5.6 * count, height), squeeze=False, layout="constrained"
    )
    for axis in grid.flat:
        axis.grid(alpha=0.25)
    return figure, list(grid.flat)


def _finished(results: Results, *sweeps: str) -> dict[str, tuple[str, str, str]]:
    """(sweep, arm, label) of every arm with a run, arms of one label once."""
    found: dict[str, tuple[str, str, str]] = {}
    for sweep in sweeps:
        for name, arm in results.get(sweep, {}).get("arms", {}).items():
            if arm["runs"]:
                found.setdefault(arm["label"], (sweep, name, arm["label"]))
    return found


def quality(results: Results) -> Any | None:
    """Perplexity against training FLOPs, and against the cache."""
    arms = list(_finished(results, "main", "equal_compute").values())
    if not arms:
        return None
    figure, (left, right) = _panels(2, 5.4)
    columns = (
        (left, "training_flops", 1e12, "training compute (TFLOP)"),
        (right, "cache_bytes_per_token", 1.0, "KV cache (bytes per token, bf16)"),
    )
    for axis, column, unit, title in columns:
        for index, (sweep, arm, label) in enumerate(arms):
            x, y = mean(results, sweep, arm, column), mean(results, sweep, arm, "perplexity")
            assert x is not None
            assert y is not None
            axis.errorbar(
                x.value / unit,
                y.value,
                yerr=y.deviation if y.n > 1 else None,
                fmt="osD^v<>PX*"[index // 10 % 10] if len(arms) > 10 else "o",
                color=f"C{index % 10}",
                capsize=3,
                label=label if axis is left else None,
            )
        axis.set_xlabel(title)
        axis.set_ylabel(PERPLEXITY)
        axis.set_xscale("log")
        values = [m.value / unit for s, a, _ in arms if (m := mean(results, s, a, column))]
        _plain_ticks(axis.xaxis, values)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _plain_ticks(axis: Any, values: list[float]) -> None:
    """Ticks of a logarithmic axis (an x or y axis of matplotlib) at round numbers in reach, written out."""
    from matplotlib import ticker

    low, high = min(values) / 1.15, max(values) * 1.15
    many = high > 20 * low
    steps = [m * 10.0**e for e in range(-3, 12) for m in ((1, 2, 5) if many else (1, 1.5, 2, 3, 4, 5, 7))]
    axis.axes.set(**{f"{axis.axis_name}lim": (low, high)})
    axis.set_major_locator(ticker.FixedLocator([s for s in steps if low <= s <= high]))
    axis.set_major_formatter(ticker.FuncFormatter(lambda x, _: f"{x:,.0f}" if x >= 10 else f"{x:g}"))
    axis.set_minor_locator(ticker.NullLocator())


def passes(results: Results) -> Any | None:
    """Perplexity by the number of passes, as a multiple of exact evaluation's."""
    arms = [
        (sweep, arm, label)
        for sweep, arm, label in _finished(results, "main").values()
        if mean(results, sweep, arm, "passes_1") is not None
    ]
    if not arms:
        return None
    figure, (axis,) = _panels(1)
    for index, (sweep, arm, label) in enumerate(arms):
        exact, points, number = mean(results, sweep, arm, "exact_perplexity"), [], 1
        while exact and (found := mean(results, sweep, arm, f"passes_{number}")) is not None:
            points.append((number, 100 * (found.value / exact.value - 1)))
            number += 1
        axis.plot(*zip(*points), "o-", markersize=4, color=f"C{index}", label=label)
    axis.axhline(0, color="gray", linewidth=0.8)
    axis.set_yscale("symlog", linthresh=1.0)
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("passes over the row, at the groups of training")
    axis.set_ylabel("perplexity over exact evaluation's (%)")
    axis.legend(fontsize=8, frameon=False)
    return figure


def convergence(results: Results) -> Any | None:
    """Passes and time to within 1 % of exact, by the number of groups (the paper's Figure 5)."""
    arms = [
        (arm, label)
        for _, arm, label in _finished(results, "exact").values()
        if passes_by_groups(results, "exact", arm)
    ]
    if not arms:
        return None
    figure, (left, right) = _panels(2)
    shown: dict[Any, list[float]] = {left: [], right: []}
    for index, (arm, label) in enumerate(arms):
        counts = {g: n for g, n in passes_by_groups(results, "exact", arm).items() if n is not None}
        left.plot(list(counts), list(counts.values()), "o-", color=f"C{index}", label=label)
        shown[left] += counts.values()
        times = {g: mean(results, "exact", arm, f"converge_exact_g{g}_s") for g in counts}
        seconds = {g: 1e3 * m.value for g, m in times.items() if m is not None}
        right.plot(list(seconds), list(seconds.values()), "o-", color=f"C{index}", label=label)
        shown[right] += seconds.values()
        exact = mean(results, "exact", arm, "exact_s")
        if exact is not None:
            right.axhline(
                1e3 * exact.value,
                color=f"C{index}",
                linestyle="--",
                linewidth=1,
                label=f"exact evaluation of the model {label}",
            )
            shown[right].append(1e3 * exact.value)
    for axis, title in ((left, "passes needed"), (right, "time needed (ms per row)")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("groups g of a pass (1 is Jacobi iteration)")
        axis.set_title("to come within 1 % of exact perplexity", fontsize=9)
        axis.set_ylabel(title)
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        if shown[axis]:
            _plain_ticks(axis.yaxis, shown[axis])
        axis.legend(fontsize=8, frameon=False)
    return figure


def schedule(results: Results) -> Any | None:
    """The paper's Figure 6 a: best perplexity, exact perplexity and Jacobi passes, by the schedule."""
    arms = scheduled(results)
    if not arms:
        return None
    figure, axes = _panels(3)
    shown = (
        ("best_perplexity", "perplexity at the best number of passes"),
        ("exact_perplexity", "perplexity of exact decoding"),
        ("converge_best_g1", "Jacobi passes to within 1 % of the best"),
    )
    groups = sorted({arm.groups for arm in arms})
    for axis, (column, title) in zip(axes, shown):
        for index, g in enumerate(groups):
            for gradient, style in ((1, "o--"), (2, "s-")):
                points = [
                    (arm.detached, found.value)
                    for arm in arms
                    if (arm.groups, arm.gradient) == (g, gradient)
                    and (found := mean(results, "schedule", arm.name, column)) is not None
                ]
                if points:
                    name = "Jacobi" if g == 1 else f"g = {g}"
                    label = f"{name}, {gradient} with gradient" if axis is axes[0] else None
                    axis.plot(*zip(*sorted(points)), style, markersize=5, color=f"C{index}", label=label)
        axis.set_xlabel("passes without gradient")
        axis.set_ylabel(title)
        axis.set_xticks(sorted({arm.detached for arm in arms}))
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def channels(results: Results) -> Any | None:
    """The paper's Figure 6 b: perplexity over k, vanilla, and the ablations."""
    share = {"k_1": None, "k_L/4": 0.25, "k_L/2": 0.5, "k_3L/4": 0.75, "k_L": 1.0}
    layers = results.get("channels", {}).get("base", {}).get("model.num_hidden_layers", 1)
    points = [
        (1 if part is None else part * layers, found)
        for name, part in share.items()
        if (found := mean(results, "channels", name, "perplexity")) is not None
    ]
    if not points:
        return None
    figure, (axis,) = _panels(1)
    axis.errorbar(
        [k for k, _ in points],
        [found.value for _, found in points],
        yerr=[found.deviation or 0.0 if found.n > 1 else 0.0 for _, found in points],
        fmt="o-",
        capsize=3,
        label="WhiteMatter",
    )
    others = (
        ("no_feedback", "^", "k = L without feedback", layers),
        ("static_1", "s", "static mixing", 1),
        ("static_L", "s", None, layers),
    )
    for name, mark, label, k in others:
        found = mean(results, "channels", name, "perplexity")
        if found is not None:
            color = "C2" if mark == "s" else "C1"
            axis.plot([k], [found.value], mark, color=color, label=label, markersize=7)
    vanilla = mean(results, "channels", "vanilla_L", "perplexity")
    if vanilla is not None:
        axis.axhline(vanilla.value, color="gray", linestyle="--", label="vanilla")
    axis.set_xlabel(f"KV channels k (of L = {layers} layers)")
    axis.set_ylabel(PERPLEXITY)
    axis.set_xticks([k for k, _ in points])
    axis.legend(fontsize=8, frameon=False)
    return figure


FIGURES: dict[str, Callable[[Results], Any | None]] = {
    "quality": quality,
    "passes": passes,
    "convergence": convergence,
    "schedule": schedule,
    "channels": channels,
}
