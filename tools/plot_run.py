"""Draw the curves of one or several runs from their metrics.jsonl.

    python tools/plot_run.py RUN [RUN ...] [--output curves.png] [--x tokens|step]

Panels: loss (training, held out), learning rate, gradient norm, throughput, for WhiteMatter the residual
of each pass, and scores of downstream tasks where evaluations.jsonl has some. Several runs are overlaid; a
dotted line marks where a run was resumed, a dash-dotted one where a stage of it ends. Steps that ran
twice, because a run was killed after its last checkpoint, are drawn once, as the later attempt had them.

Runs that began with a checkpoint of another one (run.branch_from) are drawn as a family: the ancestor's curve
up to the last branch point, once, and every branch from its point on. An ancestor that is itself named is
drawn whole.
"""

import argparse
import io
import math
import os
import sys
from pathlib import Path
from typing import Any

from wm_ds.errors import WmError, run_cli
from wm_ds.files import write_atomically
from wm_ds.report.reading import borders, nested, resumes, series
from wm_ds.run.ancestry import chain, located
from wm_ds.run.evaluations_file import read_evaluations
from wm_ds.run.metrics_file import read_metrics

Rows = list[dict[str, Any]]


class PlotError(WmError):
    """A run that cannot be drawn."""


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> None:
    """The command, its errors as exceptions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--output", type=Path, help="PNG to write (default RUN/curves.png of the first run)")
    parser.add_argument("--x", choices=("tokens", "step"), default="tokens")
    parser.add_argument("--text", action="store_true", help="also sketch the loss on the terminal")
    args = parser.parse_args(argv)
    runs = family(args.runs)
    output = args.output or args.runs[0] / "curves.png"
    draw(runs, args.x, output)
    if args.text:
        for name, rows in runs.items():
            print(sketch(series(rows, "loss", args.x), f"training loss of {name} over {args.x}"))
    print(output)


def family(folders: list[Path]) -> dict[str, Rows]:
    """What is drawn of each run and of their ancestors, by the name in the legend; ancestors first.

    Raises PlotError for a run without a step. An ancestor that is gone is left out, and that is said.
    """
    named = {Path(os.path.realpath(folder)): folder for folder in folders}
    begins: dict[Path, tuple[Path, int]] = {}  # a branch's ancestor, and the step that it began with
    for folder in named:
        descendant = folder
        for ancestor in reversed(chain(folder)):
            there = Path(os.path.realpath(located(ancestor, descendant)))
            begins[descendant] = (there, ancestor.step)
            descendant = there
    shown = {folder: steps_of(path) for folder, path in named.items()}
    for folder in {there for there, _ in begins.values()} - shown.keys():
        last = max(step for there, step in begins.values() if there == folder)
        try:
            shown[folder] = [row for row in steps_of(folder) if row.get("step", 0) <= last]
        except PlotError as error:
            print(f"an ancestor is not drawn: {error}", file=sys.stderr)
    order = sorted(shown, key=lambda folder: len(chain(folder)))  # of equals: as they were named
    short = len({folder.name for folder in order}) == len(order)
    drawn: dict[str, Rows] = {}
    for folder in order:
        name = folder.name if short else str(named.get(folder, folder))
        rows = place(shown[folder])
        if folder in begins:
            there, step = begins[folder]
            name += f" (from {there.name}@{step})"
            rows = row_at(place(shown.get(there, [])), step, rows[0].get("attempt")) + rows
        drawn[name] = rows
    return drawn


def steps_of(folder: Path) -> Rows:
    """The rows of a run. Raises PlotError where it has no step."""
    rows = read_metrics(folder / "metrics.jsonl") + [
        row for row in read_evaluations(folder) if isinstance(row.get("tasks"), dict)
    ]
    if not any("loss" in row for row in rows):
        raise PlotError(f"{folder / 'metrics.jsonl'} is missing or has no step yet")
    return rows


def row_at(rows: Rows, step: int, attempt: Any) -> Rows:
    """An ancestor's row at the branch point, with which the branch's begin, so that the curves meet."""
    return [row | {"attempt": attempt} for row in rows if row.get("step") == step and "loss" in row][-1:]


def place(rows: Rows) -> Rows:
    """Give the rows of evaluations, which say only their step, the number of tokens at that step."""
    tokens = {row["step"]: row["tokens"] for row in rows if "tokens" in row}
    return [{"tokens": tokens.get(row["step"]), **row} for row in rows]


def residuals(rows: Rows, x: str) -> dict[str, list[tuple[float, float]]]:
    """One series for each pass, from rows with a list of residuals; 0 has no place on a logarithmic axis."""
    found = nested(rows, "residuals", x)
    return {f"pass {n}": [point for point in points if point[1] > 0] for n, points in found.items()}


def scores(rows: Rows, x: str) -> dict[str, list[tuple[float, float]]]:
    """One series for each downstream task's metric; standard errors are left out."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        for task, metrics in (row.get("tasks") or {}).items():
            for metric, value in metrics.items():
                if "stderr" not in metric and row.get(x) is not None and math.isfinite(value):
                    found.setdefault(f"{task} {metric}", []).append((row[x], value))
    return found


def kinds_of_scores(runs: dict[str, Rows], x: str) -> dict[str, list[str]]:
    """The panels of downstream scores, with what is drawn in each: shares, and what is not below 1."""
    highest: dict[str, float] = {}
    for rows in runs.values():
        for label, points in scores(rows, x).items():
            highest[label] = max([highest.get(label, 0.0), *(value for _, value in points)])
    shares = [label for label, value in highest.items() if value <= 1]
    others = [label for label in highest if label not in shares]
    found = {"downstream tasks": shares, "downstream tasks (perplexities and others)": others}
    return {title: labels for title, labels in found.items() if labels}


def mark(axis: Any, rows: Rows, x: str, color: str) -> None:
    """Draw lines where the run was resumed and where its stages end."""
    for places, style in ((resumes(rows, x), ":"), (borders(rows, x), "-.")):
        for at in places:
            axis.axvline(at, color=color, linestyle=style, linewidth=1)


def draw(runs: dict[str, Rows], x: str, output: Path) -> None:
    """Draw the panels of all runs into `output`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [("loss", "loss (nats per token)"), ("lr", "learning rate"), ("grad_norm", "gradient norm")]
    panels += [("tokens_per_s", "tokens per second")]
    with_residuals = any(residuals(rows, x) for rows in runs.values())
    with_scores = kinds_of_scores(runs, x)
    count = len(panels) + with_residuals + len(with_scores)
    columns = min(3, count)
    lines = -(-count // columns)
    # Constrained: each legend stands under its own panel, which gives way to it.
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(4.6 * columns, 3.8 * lines), squeeze=False, layout="constrained"
    )
    axes = list(grid.flat[:count])
    iteration = axes[min(len(panels), count - 1)]
    for unused in grid.flat[count:]:
        unused.remove()
    for index, (name, rows) in enumerate(runs.items()):
        color = f"C{index}"
        for axis, (key, title) in zip(axes, panels):
            points = series(rows, key, x)
            axis.plot(*zip(*points), color=color, linewidth=1, alpha=0.85, label=name)
            axis.set_title(title, fontsize=10)
            mark(axis, rows, x, color)
        held_out = series(rows, "holdout_loss", x)
        if held_out:
            axes[0].plot(
                *zip(*held_out),
                "o-",
                color=color,
                markersize=4,
                markerfacecolor="white",
                label=f"{name}, held out",
            )
        if with_residuals:
            for shade, (label, points) in enumerate(residuals(rows, x).items()):
                style = ["-", "--", "-.", ":"][shade % 4]
                iteration.plot(*zip(*points), style, color=color, linewidth=1, label=f"{name}, {label}")
            iteration.set_title("residual of each pass", fontsize=10)
            iteration.set_yscale("log")
        for axis, (title, labels) in zip(axes[count - len(with_scores) :], with_scores.items()):
            axis.set_title(title, fontsize=10)
            draw_scores(axis, scores(rows, x), labels, name, color)
    for axis in [axes[0], *axes[len(panels) :]]:
        axis.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.16), frameon=False)
    for axis in axes:
        axis.set_xlabel(x, fontsize=9)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.25)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    pyplot.close(figure)
    write_atomically(output, picture.getvalue())


def draw_scores(
    axis: Any, of_run: dict[str, list[tuple[float, float]]], labels: list[str], name: str, color: str
) -> None:
    """Draw those of a run's scores that belong into a panel."""
    for shade, label in enumerate(label for label in labels if label in of_run):
        style = ["o-", "s--", "^-.", "v:"][shade % 4]
        axis.plot(*zip(*of_run[label]), style, color=color, markersize=4, label=f"{name}, {label}")


def sketch(points: list[tuple[float, float]], title: str, width: int = 64, height: int = 10) -> str:
    """A curve in characters: the mean of each column's points."""
    left, right = points[0][0], points[-1][0]
    columns: list[list[float]] = [[] for _ in range(width)]
    for at, value in points:
        columns[min(width - 1, int((at - left) / max(right - left, 1e-9) * width))].append(value)
    means = [sum(column) / len(column) if column else None for column in columns]
    known = [mean for mean in means if mean is not None]
    top, bottom = max(known), min(known)
    lines = [f"{title}"]
    for level in range(height, -1, -1):
        value = bottom + (top - bottom) * level / height
        marks = [
            "•" if m is not None and round((m - bottom) / max(top - bottom, 1e-9) * height) == level else " "
            for m in means
        ]
        lines.append(f"{value:8.3f} │{''.join(marks).rstrip()}")
    lines.append(f"{'':8} └{'─' * width}")
    lines.append(f"{'':10}{left:<{width // 2},.0f}{right:>{width // 2},.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
