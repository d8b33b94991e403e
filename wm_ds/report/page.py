"""The page: one HTML file that needs nothing else, neither a network nor the runs."""

from __future__ import annotations

import time
from html import escape
from importlib.resources import files
from typing import Any

from wm_ds.distributed.log import duration
from wm_ds.report.chart import draw
from wm_ds.report.maps import maps, spread
from wm_ds.report.panels import panels
from wm_ds.report.reading import SAMPLES, Run, differences

MOST_EVENTS = 60  # shown of each run
MOST_SAMPLES = 8  # steps at which samples are shown


def page(runs: list[Run], now: float | None = None) -> str:
    """The whole page. `now`: when it was made, in seconds since the epoch."""
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
    title = "Report of " + (runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    parts = [f'<h1>{escape(title)}</h1><p class="soft">Made {made}.</p>', where_it_stands(runs)]
    if len(runs) > 1:
        parts.append(what_differs(runs))
    parts.append('<h2>Curves</h2><div class="grid3">')
    parts += [draw(chart) for chart in panels(runs)]
    parts.append("</div>")
    for run in runs:
        parts.append(f"<h2>{escape(run.name)}</h2>" if len(runs) > 1 else "")
        parts += [router_maps(run), samples(run), events(run), attempts(run), settings(run)]
    style, script = (files("wm_ds.report").joinpath(name).read_text() for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{escape(title)}</title><style>{style}</style></head>'
        "<body><main>"
        + "\n".join(part for part in parts if part)
        + f'</main><div id="tip"></div><script>{script}</script></body></html>\n'
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of cells that are HTML already."""
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{h}</th>" for h in head)}</tr>{body}</table></div>'


def where_it_stands(runs: list[Run]) -> str:
    """One row a run."""
    head = ["run", "state", "step", "loss", "held out", "tokens", "tokens/s", "MFU", "checkpoint", "starts"]
    head.append("last sign")
    rows = []
    for run in runs:
        s = run.state
        last = run.steps[-1] if run.steps else {}
        held = next((r["holdout_loss"] for r in reversed(run.rows) if "holdout_loss" in r), None)
        rows.append(
            [
                escape(run.name),
                f'<span class="state {s.state}">{s.state}</span> {escape(s.reason or "")}',
                "–"
                if s.step is None
                else f"{s.step:,}" + ("" if s.total is None else f"&nbsp;of&nbsp;{s.total:,}"),
                number(last.get("loss"), ".4f"),
                number(held, ".4f"),
                number(last.get("tokens"), ","),
                number(last.get("tokens_per_s"), ",.0f"),
                number(last.get("mfu"), ".1%"),
                number(s.checkpoint, ","),
                str(s.attempts),
                "–" if s.age_s is None else f"{duration(s.age_s)} ago",
            ]
        )
    return "<h2>Where it stands</h2>" + table(head, rows)


def number(value: object, form: str) -> str:
    """A number as said, a dash where there is none."""
    return format(value, form) if isinstance(value, int | float) else "–"


def what_differs(runs: list[Run]) -> str:
    """The settings in which the runs differ."""
    found = differences(runs)
    found.pop("run.dir", None)
    if not found:
        return "<h2>What differs</h2><p>Nothing but where they lie: the runs have the same settings.</p>"
    rows = [[escape(key), *(escape(said(value)) for value in row)] for key, row in found.items()]
    return "<h2>What differs</h2>" + table(["setting", *(escape(run.name) for run in runs)], rows)


def said(value: Any) -> str:
    """A setting's value, as short as it can be read."""
    text = "–" if value is None else str(value)
    return text if len(text) <= 120 else text[:117] + "…"


def settings(run: Run) -> str:
    """All settings, folded away."""
    text = "\n".join(f"{key} = {value}" for key, value in run.settings.items() if value is not None)
    return f"<details><summary>All settings</summary><pre>{escape(text)}</pre></details>"


def router_maps(run: Run) -> str:
    """Which channel reads which layers."""
    return "<h3>Router maps: which channel reads which layers</h3>" + maps(run)


def samples(run: Run) -> str:
    """What it wrote at fixed prompts, the newest first."""
    rows = spread(run.samples, MOST_SAMPLES)[::-1]
    if not rows:
        return f"<h3>Samples</h3><p>None: log.samples writes them on the way ({SAMPLES}).</p>"
    parts = []
    for index, row in enumerate(rows):
        texts = row.get("samples")
        body = "".join(
            f"<tr><td><pre>{escape(str(one.get('prompt')))}</pre></td>"
            f"<td><pre>{escape(str(one.get('text')))}</pre></td></tr>"
            for one in (texts if isinstance(texts, list) else [])
            if isinstance(one, dict)
        )
        table = f'<div class="wide"><table><tr><th>prompt</th><th>continuation</th></tr>{body}</table></div>'
        fold = " open" if index == 0 else ""
        parts.append(f"<details{fold}><summary>step {row['step']:,}</summary>{table}</details>")
    return "<h3>Samples</h3>" + "".join(parts)


def events(run: Run) -> str:
    """Skipped steps, spikes, rollbacks."""
    found = []
    for row in run.rows:
        if "rollback" in row:
            found.append((row, f"went back to step {row['step']}: {row['rollback']}"))
        elif "skipped" in row:
            found.append((row, f"skipped: {row['skipped']}"))
        elif "spike" in row:
            found.append((row, f"loss {number(row['loss'], '.4f')}: a spike of {row['spike']} sigma"))
    if not found:
        return "<h3>Skipped steps, spikes, rollbacks</h3><p>None.</p>"
    rows = [[f"{row['step']:,}", escape(str(what))] for row, what in found[-MOST_EVENTS:]]
    more = f"<p>{len(found)} in all; the last {len(rows)} are shown.</p>" if len(found) > len(rows) else ""
    return "<h3>Skipped steps, spikes, rollbacks</h3>" + more + table(["step", "what"], rows)


def attempts(run: Run) -> str:
    """Every start, and how it ended."""
    rows = [
        [
            str(one["number"]),
            escape(str(one["time"] or "–")),
            escape(str(one["where"] or "–")),
            escape(str(one["job"] or "–")),
            escape(str(one["result"] or "no end noted")),
            "–" if one["step"] is None else escape(str(one["step"])),
            escape(one["reason"] or ""),
        ]
        for one in run.attempts
    ]
    if not rows:
        return "<h3>Starts</h3><p>None.</p>"
    return "<h3>Starts</h3>" + table(["no.", "begun", "where", "job", "ended", "step", "reason"], rows)
