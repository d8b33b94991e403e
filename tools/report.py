"""One page that shows what runs did: open it in any browser, send it to anybody.

    python tools/report.py RUN [RUN …] --output report.html

What was run (with several runs: in which settings they differ), where each stands, curves with hover values,
router maps over time, downstream scores, samples, every start with how it ended. The file needs no network
and no other file; a run may be at work meanwhile.
"""

import argparse
import sys
from pathlib import Path

from wm_ds.errors import run_cli
from wm_ds.files import write_atomically
from wm_ds.report.page import page
from wm_ds.report.reading import read_runs


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> None:
    """The command, its errors as exceptions."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="default: report.html")
    args = parser.parse_args(argv)
    text = page(read_runs(args.runs))
    write_atomically(args.output, text)
    print(f"{args.output}: {len(args.runs)} run{'s' * (len(args.runs) != 1)}, {len(text) / 1e3:,.0f} kB")


if __name__ == "__main__":
    sys.exit(main())
