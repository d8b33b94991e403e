#!/usr/bin/env python
"""Look into checkpoints, check them, go back to one, or lay one out anew for another number of ranks.

python tools/reshape_checkpoint.py RUN_DIR --list              # what there is, newest save first
python tools/reshape_checkpoint.py RUN_DIR --verify            # sizes and sha256 of every file of all
python tools/reshape_checkpoint.py CHECKPOINT --verify         # of one
python tools/reshape_checkpoint.py RUN_DIR --rewind 5000       # make step 5000 the latest, set newer aside
python tools/reshape_checkpoint.py CHECKPOINT --ranks 8 --out NEW_RUN_DIR

Training resumes at any world size and ZeRO stage from any checkpoint as it is. --ranks writes the same state
into that many fragment files of equal size, one tensor in memory at a time: to merge the thousand files of a
large run into a few before moving them, or to split one file that many ranks will read at once.
CHECKPOINT is a directory with a manifest.json, or a run directory, whose latest is then meant.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("path", type=Path, metavar="RUN_DIR|CHECKPOINT")
    action = found.add_mutually_exclusive_group(required=True)
    action.add_argument("--list", action="store_true", help="list the checkpoints of a run")
    action.add_argument("--verify", action="store_true", help="check every file against its sha256")
    action.add_argument("--rewind", type=int, metavar="STEP", help="make this step the latest")
    action.add_argument("--ranks", type=int, metavar="N", help="write the checkpoint as N files, see --out")
    found.add_argument("--out", type=Path, metavar="RUN_DIR", help="where --ranks writes to")
    return found


if __name__ == "__main__":  # before the imports that take seconds, so that --help need not wait for them
    parser().parse_args()

import torch

from wm_ds.checkpoint.directory import (
    LATEST,
    checkpoints_dir,
    describe,
    go_back,
    latest,
    leftovers,
    list_checkpoints,
    step_name,
)
from wm_ds.checkpoint.format import (
    MANIFEST,
    CheckpointError,
    Reader,
    read_manifest,
    verify,
    verify_each,
)
from wm_ds.checkpoint.rewrite import Fragment, write_new
from wm_ds.distributed import log as terminal
from wm_ds.errors import run_cli

log = logging.getLogger("wm_ds.reshape_checkpoint")


def list_all(run_dir: Path) -> int:
    """Print what is in RUN_DIR/checkpoints. Exit code 1 if something there cannot be loaded."""
    listed = list_checkpoints(run_dir)
    if not listed and not leftovers(run_dir):
        raise CheckpointError(f"there are no checkpoints in {checkpoints_dir(run_dir)}")
    pointer = checkpoints_dir(run_dir) / LATEST
    named = pointer.read_text().strip() if pointer.is_file() else None
    print(f"{'checkpoint':24} {'ranks':>5} {'stage':>5} {'MiB':>10}  saved at")
    for found in listed:
        if found.problem is not None:
            print(f"{found.path.name:24} damaged: {found.problem}")
            continue
        run = read_manifest(found.path).run
        mark = f"  <- {LATEST}" if found.path.name == named else ""
        columns = f"{run['world_size']:>5} {run['zero_stage']:>5} {found.size / 2**20:>10.1f}"
        print(f"{found.path.name:24} {columns}  {run['saved_at']}{mark}")
    for path in leftovers(run_dir):
        print(f"{path.name:24} a save or removal that never ended; the next save removes it")
    if named is not None and named not in {c.path.name for c in listed}:
        print(f"`{LATEST}` names {named!r}, which is no checkpoint")
        return 1
    return int(any(c.problem for c in listed))


def verify_all(path: Path) -> int:
    """Check one checkpoint, or all of a run directory. Exit code 1 if a file is not as its manifest says."""
    if not checkpoints_dir(path).is_dir():
        read_manifest(path)  # a path that holds no checkpoint at all is a mistake, not damage
    targets = [c.path for c in list_checkpoints(path)] if checkpoints_dir(path).is_dir() else [path]
    if not targets:
        raise CheckpointError(describe(path))
    bad = 0
    for target in targets:
        problems = verify_aloud(target)
        print(f"{target}: {'ok' if not problems else 'DAMAGED'}")
        for problem in problems:
            print(f"  {problem}")
        bad += bool(problems)
    return int(bad > 0)


def verify_aloud(path: Path) -> list[str]:
    """What is wrong with a checkpoint's files, one line each; logs each file as it is read."""
    problems = []
    for name, problem in verify_each(path):
        log.info(f"{path.name}/{name}: {problem or 'ok'}")
        problems += [problem] if problem else []
    return problems


def rewind(run_dir: Path, step: int) -> int:
    """Make `step` the checkpoint that the run resumes from; later saves are renamed, not removed."""
    target = checkpoints_dir(run_dir) / step_name(step)
    if not target.is_dir():
        raise CheckpointError(f"no checkpoint of step {step}; {describe(run_dir)}")
    problems = verify(target)
    if problems:
        raise CheckpointError(f"step {step} cannot be resumed from: {'; '.join(problems)}")
    for old, new in go_back(run_dir, target):
        log.info(f"{old} is now {new}")
    print(f"the run resumes from {target}")
    return 0


def reshape(source: Path, run_dir: Path, ranks: int) -> int:
    """Write the state of `source` into `ranks` equal fragment files below `run_dir`, and publish it there.

    The run that `source` belongs to goes on in `run_dir`: what it records about itself is copied with it.
    """
    manifest = read_manifest(source)
    problems = verify_aloud(source)
    if problems:
        raise CheckpointError("; ".join(problems))
    step = int(manifest.run["step"])
    target = checkpoints_dir(run_dir) / step_name(step)
    if target.exists():
        raise CheckpointError(f"{target} exists; give --out another directory")
    with Reader(source, manifest) as reader:

        def content(part: Fragment) -> torch.Tensor:
            out = torch.empty(part.stop - part.start, dtype=part.dtype)
            reader.read_into(out, part.name, part.kind, part.start)
            return out

        print(write_new(run_dir, manifest, content, source, files=ranks))
    return 0


def checkpoint_at(path: Path) -> Path:
    """The checkpoint that `path` means."""
    if (path / MANIFEST).is_file() or not checkpoints_dir(path).is_dir():
        return path
    found, remarks = latest(path)
    for remark in remarks:
        log.info(remark)
    if found is None:
        raise CheckpointError(describe(path))
    return found


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> int:
    """The command, its errors as exceptions."""
    options = parser().parse_args(argv)
    terminal.start("stderr")  # standard output is for results
    if (options.ranks is None) != (options.out is None):
        parser().error("--ranks and --out go together")
    if options.ranks is not None and options.ranks < 1:
        parser().error(f"--ranks is {options.ranks}, must be 1 or more")
    if not options.path.exists():
        raise CheckpointError(f"{options.path} does not exist")
    if options.list:
        return list_all(options.path)
    if options.verify:
        return verify_all(options.path)
    if options.rewind is not None:
        return rewind(options.path, options.rewind)
    return reshape(checkpoint_at(options.path), options.out, options.ranks)


if __name__ == "__main__":
    sys.exit(main())
