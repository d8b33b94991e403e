"""Proof that a change moves no numbers: `make same-numbers BASE=main`.

That is `python -m tests.goldens.compare REV [--all]`.

The probe runs in a git worktree of REV and in this tree as it is, uncommitted changes included; both on this
machine, so every golden must be bitwise equal. `--pin` writes this tree's goldens to pinned.json instead, for
a commit that is meant to move numbers and says so. Exit status: 0 equal, 1 different, 2 no comparison.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path

from . import probe

TOLERANCE = 2e-3  # of values on another machine: after steps of training in bf16, which magnify a last bit
PINNED = Path(__file__).parent / "pinned.json"


def differing(ours: dict, theirs: dict) -> list[str]:
    """Names whose hashes differ."""
    return [name for name in ours if name in theirs and ours[name][0] != theirs[name][0]]


def near(ours: list, theirs: list) -> bool:
    """Whether the values agree closely. Bytes without values must be equal."""
    a, b = ours[1], theirs[1]
    if len(a) != len(b) or not a:
        return False
    return all(math.isclose(x, y, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for x, y in zip(a, b))


def describe(ours: dict, theirs: dict, names: list[str]) -> str:
    """The names that differ, with the first value that does."""
    lines = []
    for name in names:
        pairs = [(x, y) for x, y in zip(ours[name][1], theirs[name][1]) if x != y]
        lines.append(
            f"  {name}" + (f": {pairs[0][0]!r} became {pairs[0][1]!r}" if pairs else ": other bytes")
        )
    return "\n".join([f"{len(names)} goldens differ:", *lines])


def of_revision(revision: str, everything: bool) -> dict:
    """The goldens of a revision's code, run in a worktree of it that is removed again."""
    with tempfile.TemporaryDirectory(prefix="revision-") as name:
        tree = Path(name) / "tree"
        _git("worktree", "add", "--detach", str(tree), revision)
        try:
            if not (tree / "tests/goldens/probe.py").exists():
                raise ValueError(f"{revision} has no tests/goldens: compare with a later revision")
            return probe.run(tree, everything=everything)
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> None:
    done = subprocess.run(["git", *arguments], cwd=probe.ROOT, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {done.stderr.strip()}")


def main(arguments: list[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.goldens.compare", description=__doc__)
    parser.add_argument("revision", nargs="?", help="the revision to compare with, main for instance")
    parser.add_argument("--all", action="store_true", help="the whole matrix of training runs; many minutes")
    parser.add_argument("--pin", action="store_true", help="write pinned.json from this tree")
    options = parser.parse_args(arguments)
    if (options.revision is None) != options.pin:
        parser.error("give a revision, or --pin")
    try:
        if options.pin:
            probe.write(PINNED, probe.run(everything=options.all))
            return 0
        theirs = of_revision(options.revision, options.all)["goldens"]
        ours = probe.run(everything=options.all)["goldens"]
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    names = differing(theirs, ours)
    for name in theirs.keys() ^ ours.keys():
        print(f"only in {'this tree' if name in ours else options.revision}: {name}")
    if names:
        print(describe(theirs, ours, names))
        return 1
    print(f"{len(theirs.keys() & ours.keys())} goldens are bitwise equal to those of {options.revision}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
