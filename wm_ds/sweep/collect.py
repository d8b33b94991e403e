"""Results of a sweep: one JSON with every run, and over seeds the mean and deviation of every figure.

The file is complete without the runs: tables and figures are made from it, and a run that stands in it with
the same configuration, data and measuring counts as done wherever the sweep is started again.
"""

from __future__ import annotations

import math
import os
import platform
from pathlib import Path
from typing import Any

from wm_ds.config import load as configuration
from wm_ds.config.schema import Config
from wm_ds.files import write_json
from wm_ds.sweep.description import Sweep, SweepError
from wm_ds.sweep.measure import PARTS, found_parts, is_measured
from wm_ds.sweep.runs import Code, Run, read_json, seeds_of
from wm_ds.sweep.work import seconds_of

FORMAT = "wm_ds.sweep 1"


def previous(sweep: Sweep, path: str | Path, *, replace: bool) -> dict[str, Any]:
    """The results that are there; empty where there are none, or where they are to be replaced.

    Raises SweepError, with nothing touched, where they belong to another base or are no results.
    """
    file = Path(sweep.results)
    if replace or not file.exists():
        return {}
    found = read_json(file)
    if found is None or found.get("format") != FORMAT:
        raise SweepError(f"{file} holds no results of a sweep; give `results` in {path} another name")
    here = base_of(sweep)
    differing = sorted(k for k in here.keys() | found["base"].keys() if here.get(k) != found["base"].get(k))
    if differing:
        key = differing[0]
        raise SweepError(
            f"{file} holds results of another base configuration: {key} is {found['base'].get(key)!r} there "
            f"and {here.get(key)!r} in {sweep.base}; give `results` in {path} another name, or --replace them"
        )
    return found


def base_of(sweep: Sweep) -> dict[str, Any]:
    """The base as `section.key: value`, the data by its path, without what does not make another run: where
    and how often, and what every arm sets itself."""
    config: Config = configuration.load(sweep.base)
    said = config.model_dump(mode="json")
    for name in ("run", "log", "checkpoint", "evaluate"):
        said.pop(name)
    own = set.intersection(*(set(arm.set) for arm in sweep.arms.values()))
    return {key: value for key, value in _flat(said) if key not in own}


def _flat(said: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in said.items():
        found += _flat(value, f"{before}{key}.") if isinstance(value, dict) else [(before + key, value)]
    return found


def known(results: dict[str, Any], run: Run, sweep: Sweep) -> dict[str, Any] | None:
    """The run's entry in the results, where it stands there with this configuration and measuring."""
    for arm in results.get("arms", {}).values():
        for entry in arm["runs"]:
            same = entry["digest"] == run.digest and entry["seed"] == run.seed
            if same and entry["measured"]["settings"] == sweep.measure.model_dump():
                return entry
    return None


def check_code(runs: list[Run], results: dict[str, Any], sweep: Sweep, code: Code) -> None:
    """Raises SweepError where runs were trained by another version of the code than this one."""
    others: dict[str, list[str]] = {}
    for run in runs:
        entry = known(results, run, sweep) or run.record()
        if entry["code"] not in (None, code.digest):
            commit = (entry["commit"] or "unknown")[:7]
            others.setdefault(f"{entry['code']} (commit {commit})", []).append(f"{run.arm} seed {run.seed}")
    if others:
        version, names = next(iter(others.items()))
        count = sum(map(len, others.values()))
        raise SweepError(
            f"{count} of {len(runs)} runs ({names[0]}, …) were trained by code version {version}, and this "
            f"is {code.digest}: check that commit out, or give --accept-code (the results then say which run "
            "is whose), or another folder `runs` to train all anew"
        )


def collect(sweep: Sweep, path: str | Path, runs: list[Run], results: dict[str, Any]) -> dict[str, Any]:
    """Write down what is known of every run by now; returns it. Arms without a finished run have no runs."""
    arms: dict[str, Any] = {}
    for name, arm in sweep.arms.items():
        entries = []
        for run in [run for run in runs if run.arm == name]:
            entry = known(results, run, sweep) if not is_measured(run, sweep.measure) else _entry(run, sweep)
            if entry is not None:
                entries.append(entry)
        arms[name] = {
            "label": arm.label or name,
            "set": arm.set,
            "equal_flops_to": arm.equal_flops_to,
            "seeds": seeds_of(sweep, name),
            "runs": entries,
            "summary": summary([figures(entry) for entry in entries]),
        }
    report = {
        "format": FORMAT,
        "title": sweep.title,
        "sweep": str(path),
        "base": base_of(sweep),
        "measure": sweep.measure.model_dump(),
        "machine": machine(),
        "arms": arms,
    }
    file = Path(sweep.results)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, report, indent=1)
    return report


def _entry(run: Run, sweep: Sweep) -> dict[str, Any]:
    record = run.record()
    parts = found_parts(run.beside(".measured.json"), sweep.measure, run.steps)
    return {
        "seed": run.seed,
        "digest": run.digest,
        "code": record["code"],
        "commit": record["commit"],
        "lr": run.config.optim.lr,
        "steps": run.steps,
        "tokens": run.tokens,
        "training_flops": run.flops,
        "training": seconds_of(record, "train"),
        "attempts": sum(a["what"] == "train" for a in record["attempts"]),
        "measured": {name: parts[name] for name in ("settings", *PARTS)},
    }


def figures(entry: dict[str, Any]) -> dict[str, float | None]:
    """The numbers of one run that are averaged over seeds."""
    measured = entry["measured"]
    curve = measured["passes"]["perplexities"]
    trained = measured["perplexity"]["perplexity"]
    found: dict[str, float | None] = {
        "perplexity": trained,
        "perplexity_some": measured["passes"]["as_trained"],
        "exact_perplexity": measured["exact"]["perplexity"],
        "best_perplexity": min([*curve, measured["passes"]["as_trained"]]),
        "training_flops": entry["training_flops"],
        "tokens": entry["tokens"],
        "wall_s": entry["training"]["wall_s"],
        "cpu_s": entry["training"]["cpu_s"],
        "cache_bytes_per_token": measured["model"]["cache_bytes_per_token"],
        "parameters": measured["model"]["parameters_without_embeddings"],
    }
    for number, value in enumerate(curve, start=1):
        found[f"passes_{number}"] = value
    for one in measured.get("starts", {"curves": []})["curves"]:
        for number, value in enumerate(one["perplexities"], start=1):
            found[f"{one['start']}_g{one['groups']}_{number}"] = value
    for entry_of_g in measured["converge"]["groups"]:
        for goal in ("exact", "best"):
            reached = entry_of_g["reached"].get(goal)
            name = f"converge_{goal}_g{entry_of_g['groups']}"
            found[name] = None if reached is None else reached["passes"]
            found[f"{name}_s"] = None if reached is None else reached["seconds_per_row"]
    found["exact_s"] = measured["exact"]["seconds_per_row"]
    return found


def summary(rows: list[dict[str, float | None]]) -> dict[str, dict[str, float | int | None]]:
    """Mean and standard deviation (of a sample: n - 1) of every figure over the seeds that have it."""
    found: dict[str, dict[str, float | int | None]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [value for row in rows if (value := row.get(name)) is not None]
        if not values:
            found[name] = {"mean": None, "deviation": None, "n": 0}
            continue
        mean = math.fsum(values) / len(values)
        squares = math.fsum((value - mean) ** 2 for value in values)
        deviation = math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else None
        found[name] = {"mean": mean, "deviation": deviation, "n": len(values)}
    return found


def machine() -> dict[str, Any]:
    """What the results were collected on, in words."""
    import torch

    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            name = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "gpus": gpus, "torch": torch.__version__}
