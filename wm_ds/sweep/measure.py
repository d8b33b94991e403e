"""Measuring one trained run: `python -m wm_ds.sweep.measure RUN OUTPUT SETTINGS`, as sweeps start it.

Each part is written as soon as it is known, so that a kill costs one part at most:

    model       parameters, bytes that the cache takes a token (in bf16), how training ended
    perplexity  as trained, on many rows: what arms are compared by
    passes      with 1 … N cyclic passes at the trained groups, on some rows, and as trained on the same ones
    starts      few passes from either start, with the trained groups, twice as many, and one (Jacobi)
    exact       exact autoregressive evaluation of the same rows
    converge    for each number of groups: perplexity pass by pass until it is near exact, and near the best
                of `passes`, on fewer rows

A model without passes has the same perplexity by every schedule, so only its first two parts take time.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wm_ds.errors import run_cli
from wm_ds.files import write_json
from wm_ds.sweep.description import Measure

if TYPE_CHECKING:
    from wm_ds.sweep.runs import Run

log = logging.getLogger("wm_ds.sweep.measure")
MEASURER = "wm_ds.sweep.measure"
PARTS = ("model", "perplexity", "passes", "starts", "exact", "converge")


def measure_command(run: Run, settings: Measure) -> list[str]:
    """The words behind `python` that measure a run."""
    output = str(run.beside(".measured.json"))
    return ["-m", MEASURER, str(run.folder), output, json.dumps(settings.model_dump())]


def is_measured(run: Run, settings: Measure) -> bool:
    """Whether every part is there, with these settings."""
    return set(PARTS) <= found_parts(run.beside(".measured.json"), settings, run.steps).keys()


def found_parts(path: Path, settings: Measure, step: int) -> dict[str, Any]:
    """The parts that were measured so far; none where other settings or another checkpoint were."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    same = isinstance(found, dict) and found.get("settings") == settings.model_dump()
    return found if same and found.get("step") == step else {}


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(command, arguments)


def command(arguments: list[str] | None = None) -> None:
    """What main does, its errors as exceptions."""
    from wm_ds.distributed import log as terminal

    terminal.start()
    folder, output, settings = sys.argv[1:4] if arguments is None else arguments
    measure(Path(folder), Path(output), Measure.model_validate_json(settings))


def measure(folder: Path, output: Path, settings: Measure) -> dict[str, Any]:
    """All parts that are not in `output` yet, one after another; returns them. Raises WmError."""
    from wm_ds.sweep.probe import Probe

    probe = Probe(folder, settings)
    found = found_parts(output, settings, probe.step)
    found |= {"settings": settings.model_dump(), "step": probe.step}
    for part in PARTS:
        if part in found:
            continue
        begun = time.perf_counter()
        found[part] = getattr(probe, part)(found)
        log.info("measured %s of %s in %.1f s", part, folder, time.perf_counter() - begun)
        write_json(output, found, indent=1)
    return found


if __name__ == "__main__":
    sys.exit(main())
