"""The page of results, from the JSON files alone: tables between markers, and the figures beside them.

    <!-- sweep: claims -->        the paper's claims, one a row
    <!-- sweep: NAME -->          the arms of results/NAME.json, one a row
    <!-- sweep: figure NAME TEXT -->   the figure results/NAME.svg, once there is anything to draw
    <!-- sweep: price -->         what fewer passes cost and lose (price.py)
    <!-- sweep: made NAME … -->   what made those results: commits, machine, hours
    <!-- end -->                  of each of these

What stands outside the markers is a person's, and stays.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from wm_ds.files import write_atomically
from wm_ds.sweep import figures, price
from wm_ds.sweep.claims import CLAIMS, NOISE, NOT_THERE, PENDING, Results
from wm_ds.sweep.collect import FORMAT
from wm_ds.sweep.description import SweepError
from wm_ds.sweep.runs import read_json

NOTHING = PENDING.capitalize() + "."
_BLOCK = re.compile(r"(<!-- sweep: ([^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def remake(page: Path) -> str:
    """Fill `page` and draw the figures into the folder of its name beside it; what was made, in words.

    Raises SweepError where the page or a result cannot be used; the page is then as it was.
    """
    if not page.is_file():
        raise SweepError(f"{page} is no file; --page names the one to fill")
    folder = page.with_suffix("")
    results = load_results(folder)
    text = page.read_text(encoding="utf-8")
    found = _BLOCK.findall(text)
    if not found:
        raise SweepError(f"{page} has no marker `<!-- sweep: NAME -->`, so there is nothing to fill")
    drawn = figures.draw(results, folder)
    filled = _BLOCK.sub(lambda m: f"{m[1]}\n{block(m[2].split(), results, drawn)}\n\n{m[3]}", text)
    write_atomically(page, filled)
    lines = [f"{page}: {len(found)} parts filled"] + [str(path) for path in drawn]
    for name, report in results.items():
        lines += [f"note: {line}" for line in missing(name, report)]
    return "\n".join(lines)


def load_results(folder: Path) -> Results:
    """All results in a folder, by name. Raises SweepError for a file that is none."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        report = read_json(path)
        if report is None or report.get("format") != FORMAT:
            raise SweepError(f"{path} holds no results of a sweep; move it elsewhere, or make it again")
        found[path.stem] = report
    return found


def missing(name: str, report: dict[str, Any]) -> list[str]:
    """Seeds that an arm has no run of, one line an arm."""
    lines = []
    for arm, entry in report["arms"].items():
        there = {run["seed"] for run in entry["runs"]}
        absent = [seed for seed in entry["seeds"] if seed not in there]
        if absent:
            seeds = ", ".join(map(str, absent))
            lines.append(
                f"{name}: arm {arm} lacks seed{'s' * (len(absent) > 1)} {seeds}; "
                f"`python tools/sweep.py {report['sweep']}` runs what is missing"
            )
    return lines


def block(words: list[str], results: Results, drawn: list[Path]) -> str:
    """What stands between a pair of markers; `drawn`: the figures that there are."""
    if words[0] == "figure":
        there = [path for path in drawn if path.stem == words[1]]
        return f"![{' '.join(words[2:])}]({there[0].parent.name}/{there[0].name})" if there else NOTHING
    if words == ["claims"]:
        return claims_table(results)
    if words == ["price"]:
        return price.section(results, NOTHING)
    if words[0] == "made":
        return made(words[1:], results)
    return arms_table(results.get(words[0]))


def claims_table(results: Results) -> str:
    """The claims."""
    lines = ["| § | claim | paper | here | order |", "|---|---|---|---|---|"]
    for claim in CLAIMS:
        answer = claim.answer(results)
        ours, order = (PENDING, "") if answer is None else (answer.ours, answer.order)
        order = "" if claim.paper == NOT_THERE and order != NOISE else order
        lines.append(f"| {claim.section} | {claim.text} | {claim.paper} | {ours} | {order} |")
    return "\n".join(lines)


# Title, figure of the summary, unit, format.
_COLUMNS = (
    ("perplexity", "perplexity", 1.0, ".3f"),
    ("exact", "exact_perplexity", 1.0, ".3f"),
    ("Jacobi passes", "converge_exact_g1", 1.0, ".1f"),
    ("training PFLOP", "training_flops", 1e15, ".3f"),
    ("tokens, M", "tokens", 1e6, ".2f"),
    ("cache, B/token", "cache_bytes_per_token", 1.0, ",.0f"),
    ("body, M", "parameters", 1e6, ".2f"),
    ("wall, min", "wall_s", 60.0, ".1f"),
    ("CPU, min", "cpu_s", 60.0, ".1f"),
)


def arms_table(report: dict[str, Any] | None) -> str:
    """The arms of a sweep."""
    if report is None:
        return NOTHING
    lines = [
        "| arm | seeds | " + " | ".join(title for title, *_ in _COLUMNS) + " |",
        "|---|---|" + "---|" * len(_COLUMNS),
    ]
    for arm in report["arms"].values():
        cells = [arm["label"], f"{len(arm['runs'])} of {len(arm['seeds'])}"]
        if not arm["runs"]:
            cells += [PENDING] + [""] * (len(_COLUMNS) - 1)
        else:
            cells += [cell(arm["summary"].get(name), unit, form) for _, name, unit, form in _COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(found: dict[str, Any] | None, unit: float, form: str) -> str:
    """A mean, and its deviation where it has one that is not nothing."""
    if found is None or found["mean"] is None:
        return "—"
    text = format(found["mean"] / unit, form)
    return f"{text} ± {format(found['deviation'] / unit, form)}" if found["deviation"] else text


def made(names: list[str], results: Results) -> str:
    """Which code, which machine, how long."""
    lines = []
    for name in names:
        report = results.get(name)
        runs = [run for arm in (report or {"arms": {}})["arms"].values() for run in arm["runs"]]
        if report is None or not runs:
            lines.append(f"- {name}: {PENDING}")
            continue
        commits = sorted({(run["commit"] or "unknown")[:7] for run in runs})
        hours = [sum(run["training"][what] or 0.0 for run in runs) / 3600 for what in ("wall_s", "cpu_s")]
        machine = report["machine"]
        where = ", ".join(machine["gpus"]) or f"{machine['cores']} cores, {machine['cpu']}"
        lines.append(
            f"- {name}: {len(runs)} runs, {hours[0]:.1f} hours of training ({hours[1]:.1f} of CPU time); "
            f"commit {', '.join(commits)}; {where}; torch {machine['torch']}; "
            f"`python tools/sweep.py {report['sweep']}`"
        )
    return "\n".join(lines)
