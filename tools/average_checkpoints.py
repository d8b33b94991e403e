#!/usr/bin/env python
"""Average the weights of several checkpoints of a run into one of a run directory of its own.

python tools/average_checkpoints.py RUN --last 5 --output AVERAGED
python tools/average_checkpoints.py RUN --steps 8000 9000 10000 --weights linear --output AVERAGED
python tools/average_checkpoints.py RUN --last 8 --weights ema:0.9 --output AVERAGED

AVERAGED is a run directory with that one checkpoint and the run's records: export it (tools/export_hf.py),
evaluate it, or train on from it (run.dir=AVERAGED, or checkpoint.resume=AVERAGED in another run). The
optimizer's state in it is that of the newest checkpoint. docs/checkpoints.md says when an average serves
instead of a decay of the learning rate.

Weights of the checkpoints, oldest to newest: equal; linear (in proportion to 1, 2, … n); ema:D (in proportion
to D to the power of the age, the newest has age 0). One tensor is in memory at a time.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("run", type=Path, metavar="RUN", help="the run's directory")
    which = found.add_mutually_exclusive_group(required=True)
    which.add_argument("--steps", type=int, nargs="+", metavar="STEP", help="average these checkpoints")
    which.add_argument("--last", type=int, metavar="N", help="average the N newest checkpoints")
    found.add_argument("--weights", default="equal", metavar="equal|linear|ema:D", help="default: equal")
    found.add_argument("--output", type=Path, required=True, metavar="DIR", help="new run directory")
    return found


if __name__ == "__main__":  # before the imports that take seconds, so that --help need not wait for them
    parser().parse_args()

from wm_ds.checkpoint.average import average, newest, of_steps, weights_of
from wm_ds.checkpoint.directory import checkpoints_dir
from wm_ds.checkpoint.format import MANIFEST, CheckpointError
from wm_ds.distributed import log as terminal
from wm_ds.errors import run_cli


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> None:
    """The command, its errors as exceptions."""
    options = parser().parse_args(argv)
    terminal.start("stderr")  # standard output is for results
    count = len(options.steps) if options.last is None else options.last
    weights = weights_of(options.weights, max(count, 1))
    if not options.run.exists():
        raise CheckpointError(f"{options.run} does not exist")
    if (options.run / MANIFEST).is_file() and not checkpoints_dir(options.run).is_dir():
        raise CheckpointError(f"{options.run} is one checkpoint; give the directory of its run")
    if count < 2:
        chosen = f"--last {count}" if options.steps is None else f"--steps {options.steps[0]}"
        raise CheckpointError(f"{chosen} of {options.run}: an average needs two checkpoints or more")
    if options.steps is None:
        sources = newest(options.run, count)
    else:
        sources = of_steps(options.run, options.steps)
    path = average(sources, weights, options.output, options.weights)
    for source, weight in zip(sources, weights, strict=True):
        print(f"{source.name}  {weight:.6g}")
    print(path)


if __name__ == "__main__":
    sys.exit(main())
