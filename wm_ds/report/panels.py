"""Which charts the page has, and what each of them shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wm_ds.report.chart import Chart, Series
from wm_ds.report.reading import Point, Run, borders, natural, nested, resumes, scores, series

Curves = Callable[[Run], dict[str, list[Point]]]


def panels(runs: list[Run]) -> list[Chart]:
    """All charts, those of downstream scores last, one a task and metric."""
    marks = [mark for run in runs for mark in _marks(run, runs)]
    charts = [
        _chart("Loss", runs, _losses, "nats", cut=True, dots=("held out",)),
        _chart("Held-out loss by passes", runs, _held_out, "nats", dots=ALL, why_empty=_HELD_OUT),
        _chart("Learning rate", runs, _one("lr")),
        _chart("Gradient norm", runs, _one("grad_norm"), cut=True),
        _chart("Throughput", runs, _one("tokens_per_s"), "tokens/s"),
        _chart("Model FLOPs utilization", runs, _percent("mfu"), "%", why_empty="not known on this device"),
        _chart("Model TFLOP/s of a device", runs, _one("model_tflops_per_device"), "TFLOP/s"),
        _chart("Seconds of a step, by part", runs, _parts, "s", cut=True),
        _chart("Peak memory of the fullest rank", runs, _memory, "GiB", why_empty=_DETAILS),
        _chart("Residual of each pass", runs, _list("residuals", "pass"), log=True, why_empty=_POOL),
        _chart("Gain of the loop", runs, _list("gain", "pass"), why_empty=_POOL),
    ]
    names = sorted({name for run in runs for name in scores(run)}, key=natural)
    charts += [_chart(name, runs, _score(name), dots=ALL) for name in names]
    return [Chart(**{**vars(chart), "marks": marks}) for chart in charts]


ALL = ("",)
_HELD_OUT = "no held-out evaluation yet"
_DETAILS = "recorded every log.details_every steps"
_POOL = "recorded every log.details_every steps, of a model with passes"


def _chart(title: str, runs: list[Run], curves: Curves, unit: str = "", **look: Any) -> Chart:
    """One run: a color a curve. Several: a color a run, a dash a curve.

    `look`: fields of Chart, and `dots`, the names of the curves whose points show.
    """
    dots = look.pop("dots", ())
    found = []
    for index, run in enumerate(runs):
        for number, (name, points) in enumerate(curves(run).items()):
            alone = len(runs) == 1
            label = name if alone else f"{run.name}{', ' if name else ''}{name}"
            shown = name in dots or dots == ALL
            found.append(Series(label, points, number if alone else index, 0 if alone else number, shown))
    return Chart(title, found, unit=unit, **look)


def _marks(run: Run, runs: list[Run]) -> list[tuple[float, str]]:
    of = "" if len(runs) == 1 else f" of {run.name}"
    found = [(step, f"a stage{of} ends at step {step:,.0f}") for step in borders(run.rows)]
    return found + [(step, f"another start{of} goes on after step {step:,.0f}") for step in resumes(run.rows)]


def _one(key: str) -> Curves:
    return lambda run: {"": series(run.steps, key)}


def _percent(key: str) -> Curves:
    return lambda run: {"": [(x, 100 * y) for x, y in series(run.steps, key)]}


def _losses(run: Run) -> dict[str, list[Point]]:
    return {"training": series(run.steps, "loss"), "held out": series(run.rows, "holdout_loss")}


def _held_out(run: Run) -> dict[str, list[Point]]:
    found = {"as trained": series(run.rows, "holdout_loss")}
    return found | {"twice the passes": series(run.rows, "holdout_loss_double_passes")}


def _parts(run: Run) -> dict[str, list[Point]]:
    rows = [{"step": row["step"]} | row["time"] for row in run.steps if isinstance(row.get("time"), dict)]
    return {name: series(rows, name) for name in (rows[-1] if rows else {}) if name != "step"}


def _memory(run: Run) -> dict[str, list[Point]]:
    rows = [
        row for row in run.rows if isinstance(row.get("peak_memory_gib"), list) and row["peak_memory_gib"]
    ]
    return {"": series([row | {"peak": max(row["peak_memory_gib"])} for row in rows], "peak")}


def _list(key: str, word: str) -> Curves:
    return lambda run: {f"{word} {number}": points for number, points in nested(run.rows, key).items()}


def _score(name: str) -> Curves:
    return lambda run: {"": scores(run).get(name, [])}
