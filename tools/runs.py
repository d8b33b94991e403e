"""List the runs below a folder, and how each of them is.

    python tools/runs.py [FOLDER] [--state running,failed] [--json]

One line a run: its state, step and length, loss, tokens per second, newest checkpoint, attempts, and how long
ago it wrote anything. Running ones come first, then those that need a look (failed, stale). The states are
told from the run directories alone:

    running   its ranks have shown themselves within the last five minutes
    failed    its last attempt ended with an error
    stale     its last attempt ended without a word: killed, or its machine is gone
    stopped   gracefully; the same command goes on from there
    new       nothing has been started
    done      complete
"""

import argparse
import json
import sys
from pathlib import Path

from wm_ds.distributed.log import duration
from wm_ds.errors import WmError, run_cli
from wm_ds.run.state import STATES, State, StateError, runs_below, state_of

ORDER = ("running", "failed", "stale", "stopped", "new", "done")


class RunsError(WmError):
    """There is nothing to list."""


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> int:
    """The command, its errors as exceptions; the exit code is 1 where a run could not be read."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="default: runs")
    parser.add_argument("--state", metavar="STATE[,…]", help=f"only these: {', '.join(STATES)}")
    parser.add_argument("--json", action="store_true", help="everything that is known, as JSON")
    args = parser.parse_args(argv)
    if not args.folder.is_dir():
        raise RunsError(f"{args.folder} is no folder; give the one that holds the runs")
    wanted = wanted_states(args.state)
    states, unreadable = [], []
    for path in runs_below(args.folder):
        try:
            states.append(state_of(path))
        except StateError as error:
            unreadable.append(f"error: {error}")
    if not states and not unreadable:
        raise RunsError(f"{args.folder} holds no run (a folder with config.yaml and attempts)")
    shown = [state for state in states if state.state in wanted]
    shown.sort(key=lambda state: (ORDER.index(state.state), state.path))
    if args.json:
        print(json.dumps([state.as_dict() for state in shown], indent=1))
    elif shown:
        print(table(shown, args.folder))
    elif states:
        print(f"none of {len(states)} runs is {' or '.join(wanted)}")
    for line in unreadable:
        print(line, file=sys.stderr)
    return 1 if unreadable else 0


def wanted_states(said: str | None) -> list[str]:
    """The states in `--state`. Raises RunsError for one that does not exist."""
    names = list(STATES) if said is None else [name.strip() for name in said.split(",")]
    for name in names:
        if name not in STATES:
            raise RunsError(f"--state {name}: there is no such state; choose of {', '.join(STATES)}")
    return names


def table(states: list[State], folder: Path) -> str:
    """One line a run; below it the reason, where it ended with one that matters."""
    rows = [["run", "state", "step", "loss", "tok/s", "saved", "tries", "ago"]]
    rows += [cells(state, folder) for state in states]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row, state in zip(rows, [None, *states]):
        # Words to the left, numbers to the right.
        parts = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("  ".join(parts).rstrip())
        if state is not None and state.reason and state.state in ("failed", "stale", "stopped"):
            lines.append(f"    {state.reason}")
    return "\n".join(lines)


def cells(state: State, folder: Path) -> list[str]:
    """A run's line."""
    path = Path(state.path)
    name = path.name if path == folder else str(path.relative_to(folder))
    step = "-" if state.step is None else f"{state.step}"
    return [
        shortened(name),
        state.state,
        step if state.total is None else f"{step}/{state.total}",
        "-" if state.loss is None else f"{state.loss:.4f}",
        "-" if state.tokens_per_s is None else compact(state.tokens_per_s),
        "-" if state.checkpoint is None else f"{state.checkpoint}",
        f"{state.attempts}",
        "-" if state.age_s is None else duration(state.age_s),
    ]


def shortened(name: str, most: int = 26) -> str:
    """A name that leaves room for the rest in 80 columns; its end tells runs apart."""
    return name if len(name) <= most else "…" + name[1 - most :]


def compact(value: float) -> str:
    """`832`, `1.2k`, `3.4M`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.1f}{letter}"
    return f"{value:.0f}"


if __name__ == "__main__":
    sys.exit(main())
