"""Heat maps of the routers: which channel reads which layers, per branch, from first record to last."""

from __future__ import annotations

from typing import Any

from wm_ds.report.reading import Rows, Run

CELL = 14
MOST_CELLS = 3000  # of all maps of a run
BRANCHES = (("key", "keys"), ("value", "values"))


def maps(run: Run) -> str:
    """The maps of a run as HTML; a line where it has none."""
    records = [row for row in run.rows if _shares(row)]
    if not records:
        return (
            "<p>No router maps: they are recorded every log.details_every steps of a model with a pool.</p>"
        )
    rows, columns = (len(part) for part in (_shares(records[0])["key"], _shares(records[0])["key"][0]))
    count = max(2, min(6, MOST_CELLS // (2 * rows * columns)))
    chosen = spread(records, count)
    parts = []
    for branch, words in BRANCHES:
        drawn = "".join(
            f"<figure><figcaption>step {row['step']:,}</figcaption>{_map(_shares(row)[branch])}</figure>"
            for row in chosen
        )
        parts.append(f'<h4>Mixing weights of the {words}</h4><div class="maps">{drawn}</div>')
    return "".join(parts)


def spread(rows: Rows, count: int) -> Rows:
    """`count` rows from the first to the last, evenly."""
    if len(rows) <= count:
        return rows
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]


def _shares(row: dict[str, Any]) -> dict[str, list[list[float]]]:
    """The record of a row; empty where there is none, or it is no table of numbers."""
    found = row.get("router_share")
    if not isinstance(found, dict):
        return {}
    for branch, _ in BRANCHES:
        table = found.get(branch)
        if not (isinstance(table, list) and table and all(isinstance(r, list) and r for r in table)):
            return {}
        if not all(isinstance(v, int | float) for r in table for v in r):
            return {}
    return found


def _map(table: list[list[float]]) -> str:
    """Channels down, layers across; the darker, the larger the share."""
    k, L = len(table), max(map(len, table))
    left, top = 30, 4
    parts = []
    for j, row in enumerate(table):
        for s, share in enumerate(row):
            place = f'x="{left + s * CELL}" y="{top + j * CELL}"'
            words = f"channel {j}, state {s}: {100 * share:.1f} %"
            shade = f'fill-opacity="{min(1.0, max(0.0, share)) ** 0.5:.2f}"'
            parts.append(f"<rect {place} {shade}><title>{words}</title></rect>")
    width, height = left + L * CELL + 4, top + k * CELL + 30
    labels = [
        f'<text x="{left - 4}" y="{top + j * CELL + 11}" text-anchor="end">{j}</text>'
        for j in range(0, k, max(1, k // 8))
    ]
    labels += [
        f'<text x="{left + s * CELL + 7}" y="{top + k * CELL + 13}" text-anchor="middle">{s}</text>'
        for s in range(0, L, max(1, L // 8))
    ]
    middle = left + L * CELL / 2
    labels.append(f'<text x="{middle}" y="{height - 4}" text-anchor="middle">state of layer</text>')
    return (
        f'<svg class="map" viewBox="0 0 {width} {height}" style="max-width:{width * 1.6:.0f}px" role="img" '
        f'aria-label="channels by layers">{"".join(parts)}{"".join(labels)}</svg>'
    )
