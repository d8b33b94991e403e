"""Train, measure and collect sweeps: many runs that differ in a few settings.

    python tools/sweep.py configs/sweeps/main.yaml --jobs 2     all arms and seeds that are not done yet
    python tools/sweep.py SWEEP [SWEEP …] --plan                what would be run, and what is done
    python tools/sweep.py SWEEP --quick                         its quick part: the whole path in minutes
    python tools/sweep.py SWEEP --slurm                         as an array of jobs
    python tools/sweep.py --report                              docs/results.md and its figures from the JSON

Every run is `python -m wm_ds.train` in a process of its own. Kill it whenever you like: the same command goes
on, and what is finished is not run again. A run that fails is reported and left. See docs/sweeps.md.
"""

import argparse
import sys
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("sweeps", nargs="*", metavar="SWEEP", help="configs/sweeps/X.yaml")
    found.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (default 1)")
    found.add_argument(
        "--threads", type=int, metavar="N", help="threads of each (default: the cores, shared out)"
    )
    found.add_argument("--quick", action="store_true", help="the sweeps' quick parts alone")
    found.add_argument("--plan", action="store_true", help="print the runs and how far they are; run nothing")
    found.add_argument("--slurm", action="store_true", help="submit what is not done as an array of jobs")
    found.add_argument(
        "--accept-code", action="store_true", help="keep runs that another version of the code has trained"
    )
    found.add_argument("--replace", action="store_true", help="overwrite results of another base config")
    found.add_argument(
        "--report", action="store_true", help="remake tables and figures from the JSON results alone"
    )
    found.add_argument(
        "--page", type=Path, default=Path("docs/results.md"), help="what --report fills (default %(default)s)"
    )
    return found


if __name__ == "__main__":  # before the imports that take seconds, so that --help need not wait for them
    parser().parse_args()

from wm_ds.errors import run_cli


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv, interrupted="stopped; the same command goes on from here")


def run(argv: list[str] | None = None) -> int:
    """The command, its errors as exceptions."""
    options = parser().parse_args(argv)
    if options.report:
        from wm_ds.sweep import report

        print(report.remake(options.page))
        return 0
    from wm_ds.sweep import command

    return command.run(options)


if __name__ == "__main__":
    sys.exit(main())
