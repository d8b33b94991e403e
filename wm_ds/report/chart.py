"""Line charts as vector graphics, small enough for a page of a run of any length.

A series keeps of every pixel column its lowest and highest point, so that no peak is lost. Hover values are
read back out of the drawing (page.js), from the scale that each chart names in its attributes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from html import escape

from wm_ds.report.reading import Point

WIDTH, HEIGHT = 460, 270
LEFT, RIGHT, TOP, BOTTOM = 62, 20, 8, 36
COLUMNS = 380
COLORS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
DASHES = ("", "6 3", "2 3", "8 3 2 3")


@dataclass(frozen=True)
class Series:
    """A curve: what it is called, its points in the order of x, and how it is drawn."""

    label: str
    points: list[Point]
    color: int = 0
    dash: int = 0
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart. `log`: the y axis; `unit` stands behind hover values; `why_empty` where nothing is drawn;
    `marks`: (x, what) of vertical lines; `cut`: values far above the rest may leave the frame."""

    title: str
    series: list[Series]
    unit: str = ""
    log: bool = False
    cut: bool = False
    why_empty: str = "not recorded"
    marks: list[tuple[float, str]] = field(default_factory=list)


def envelope(points: list[Point], columns: int = COLUMNS) -> list[Point]:
    """At most two points for each of `columns` equal stretches of x: the lowest and the highest, in order."""
    if len(points) <= 2 * columns:
        return points
    first, last = points[0][0], points[-1][0]
    width = (last - first) / columns or 1.0
    kept: list[Point] = []
    column: list[Point] = []
    number = 0
    for point in points:
        here = min(columns - 1, int((point[0] - first) / width))
        if here != number and column:
            kept += _extremes(column)
            column = []
        number = here
        column.append(point)
    return [points[0], *kept, *_extremes(column), points[-1]]


def _extremes(column: list[Point]) -> list[Point]:
    low, high = min(column, key=lambda p: p[1]), max(column, key=lambda p: p[1])
    return [low] if low == high else sorted((low, high))


def draw(chart: Chart) -> str:
    """The chart as HTML: a figure with its title, drawing and legend."""
    drawn = [
        (s, [p for p in envelope(s.points) if p[1] > 0] if chart.log else envelope(s.points))
        for s in chart.series
    ]
    drawn = [(s, points) for s, points in drawn if points]
    title = f"<figcaption>{escape(chart.title)}</figcaption>"
    if not drawn:
        return f'<figure class="empty">{title}<p>{escape(chart.why_empty)}</p></figure>'
    values = [y for _, points in drawn for _, y in points]
    (x0, x1), (y0, y1) = _span([x for _, points in drawn for x, _ in points]), _range(values, chart)
    above = sum(y > y1 for y in values)
    frame = _Frame(x0, x1, y0, y1, chart.log)
    lines = "".join(_curve(s, points, frame) for s, points in drawn)
    scale = f'data-x0="{x0:g}" data-x1="{x1:g}" data-y0="{y0:.9g}" data-y1="{y1:.9g}"'
    note = " Values above the frame are cut." if above else ""
    keys = "".join(_key(s) for s, _ in drawn) if len(drawn) > 1 or drawn[0][0].label else ""
    return (
        f'<figure>{title}<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(chart.title)}" {scale} data-log="{int(chart.log)}" '
        f'data-unit="{escape(chart.unit)}">{_axes(frame, chart.unit)}{_marks(chart, frame)}'
        f'<svg x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" height="{HEIGHT - TOP - BOTTOM}" '
        f'class="plot">{lines}</svg><line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/></svg>'
        f'<p class="legend">{keys}{note}</p></figure>'
    )


@dataclass(frozen=True)
class _Frame:
    """From values to the drawing's coordinates, inside of the axes."""

    x0: float
    x1: float
    y0: float
    y1: float
    log: bool

    def x(self, value: float) -> float:
        return (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = (math.log10(v) if self.log else v for v in (self.y0, self.y1))
        here = math.log10(value) if self.log else value
        return (high - here) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _span(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low - 1, high + 1) if low == high else (low, high)


def _range(values: list[float], chart: Chart) -> tuple[float, float]:
    """Of the y axis: all values, or all but the highest hundredth where those lie far above."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[-1]
    usual = ordered[(len(ordered) - 1) * 99 // 100]
    if chart.cut and high - low > 1.5 * (usual - low) > 0:
        high = usual
    if chart.log:
        return (low / 2, high * 2) if low == high else (low / 1.1, high * 1.1)
    pad = 0.04 * (high - low) or abs(high) * 0.05 or 1.0
    return low - pad, high + pad


def _curve(series: Series, points: list[Point], frame: _Frame) -> str:
    color = COLORS[series.color % len(COLORS)]
    at = [(frame.x(x), frame.y(y)) for x, y in points]
    text = " ".join(f"{x:.2f},{y:.2f}" for x, y in at)
    dash = f' stroke-dasharray="{DASHES[series.dash % 4]}"' if series.dash % 4 else ""
    name = escape(series.label)
    line = f'<polyline data-label="{name}" points="{text}" fill="none" stroke="{color}"{dash}/>'
    if not (series.dots or len(points) == 1):
        return line
    return line + "".join(f'<circle cx="{x:.2f}" cy="{y:.2f}" r="3" fill="{color}"/>' for x, y in at)


def _key(series: Series) -> str:
    color = COLORS[series.color % len(COLORS)]
    dash = f' stroke-dasharray="{DASHES[series.dash % 4]}"' if series.dash % 4 else ""
    line = f'<line x1="0" y1="4" x2="24" y2="4" stroke="{color}"{dash}/>'
    return f'<span><svg class="key" viewBox="0 0 24 8">{line}</svg>{escape(series.label)}</span> '


def _axes(frame: _Frame, unit: str) -> str:
    parts = []
    for value in ticks(frame.x0, frame.x1, 5):
        x = LEFT + frame.x(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{short(value)}</text>'
        )
    found = log_ticks(frame.y0, frame.y1) if frame.log else ticks(frame.y0, frame.y1, 5)
    for value in found:
        y = TOP + frame.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value)}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 3}" text-anchor="middle">step</text>')
    if unit:
        parts.append(f'<text x="{LEFT - 6}" y="{HEIGHT - 3}" text-anchor="end">{escape(unit)}</text>')
    return "".join(parts)


def _marks(chart: Chart, frame: _Frame) -> str:
    parts = []
    for value, what in chart.marks:
        if frame.x0 <= value <= frame.x1:
            x = LEFT + frame.x(value)
            place = f'x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"'
            parts.append(f'<line class="mark" {place}><title>{escape(what)}</title></line>')
    return "".join(parts)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers between two others, `most` of them at most."""
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(size * m for m in (1, 2, 2.5, 5, 10, 20, 25) if (high - low) / (size * m) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two numbers, or rounder ones where there are few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [10.0**e for e in powers if low <= 10.0**e <= high]
    if len(found) < 2:
        found = [m * 10.0**e for e in powers for m in (1, 2, 5) if low <= m * 10.0**e <= high]
    return found[:: -(-len(found) // 6)] if found else [low, high]


def short(value: float) -> str:
    """A number on an axis: `12k`, `0.003`, `1e-5`."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * 0.9999999:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"
