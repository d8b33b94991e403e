"""A checkpoint made from others on disk, without an engine: laid out anew, or averaged.

One fragment is in memory at a time, and a fragment is at most one tensor. What is written lies below a run
directory of its own, with the records that make it a run's, and gets its name as a save's checkpoint does.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wm_ds.checkpoint.directory import partial_path, publish
from wm_ds.checkpoint.engine_state import even_cuts
from wm_ds.checkpoint.format import Entry, Manifest, State, write_file, write_fragments
from wm_ds.files import write_atomically
from wm_ds.run.ancestry import HISTORY
from wm_ds.run.directory import CONFIG

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fragment:
    """Elements [start, stop) of one kind of state of a flattened tensor."""

    name: str
    kind: str
    start: int
    stop: int
    dtype: torch.dtype


def cut(layout: Manifest, file: int, files: int) -> Iterator[Fragment]:
    """What goes into file `file` of `files`: of each kind of state an equal part of all tensors in a row."""
    kinds = dict.fromkeys(kind for entry in layout.tensors.values() for kind in entry.states)
    for kind in kinds:
        numels = {name: entry.numel for name, entry in layout.tensors.items() if kind in entry.states}
        for name, (start, stop) in even_cuts(numels, file, files).items():
            if start < stop:
                dtype = getattr(torch, layout.tensors[name].states[kind].dtype)
                yield Fragment(name, kind, start, stop, dtype)


def write_new(
    run_dir: Path,
    layout: Manifest,
    content: Callable[[Fragment], torch.Tensor],
    source: Path,
    *,
    files: int,
) -> Path:
    """Publish a checkpoint of `layout`'s tensors below `run_dir` as its latest; returns its path.

    `content` gives a fragment's numbers, in one dimension. What lies beside the fragments (the trainer's
    state, the generators of every rank), and what makes a directory that run's, is that of checkpoint
    `source`. After an error nothing is left of it. Raises OSError, and CheckpointError where `content` is not
    what the layout says.
    """
    step = int(layout.run["step"])
    partial = partial_path(run_dir, step, "rewrite")
    shutil.rmtree(partial, ignore_errors=True)
    with _removed_after_an_error(run_dir, partial):
        partial.mkdir(parents=True)
        records: dict[str, Any] = {}
        tensors = {name: Entry(e.shape, e.role, e.updates) for name, e in layout.tensors.items()}
        for file in range(files):
            name = f"part_{file:05d}.safetensors"
            wanted = list(cut(layout, file, files))
            for part in wanted:
                dtype = str(part.dtype).removeprefix("torch.")
                state = tensors[part.name].states.setdefault(part.kind, State(dtype))
                state.fragments.append((name, part.start, part.stop))
            specs = [(f"{f.name}:{f.kind}:{f.start}", f.dtype, f.stop - f.start) for f in wanted]
            records[name] = write_fragments(partial / name, specs, (content(part) for part in wanted))
            log.info(f"{name}: {records[name]['size'] / 2**20:.1f} MiB")
        for name in layout.files:
            if name.endswith(".json"):
                records[name] = write_file(partial / name, (source / name).read_bytes())
        new = Manifest(layout.run, tensors, layout.tied, records)
        new.check_coverage()
        _copy_records(source, run_dir)
        return publish(run_dir, partial, step, new, fence=lambda: None)


@contextlib.contextmanager
def _removed_after_an_error(run_dir: Path, partial: Path) -> Iterator[None]:
    """Remove `partial`, and folders above it up to `run_dir` that were not there before, after an error."""
    new = [folder for folder in (partial.parent, run_dir) if not folder.exists()]
    try:
        yield
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        for folder in new:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _copy_records(source: Path, run_dir: Path) -> None:
    """What makes a directory that run's, without which a start refuses it; never over records there."""
    run = source.parent.parent
    if not (run / CONFIG).is_file():
        log.info(f"{run} has no {CONFIG}: train from it with another run.dir and checkpoint.resume={run_dir}")
        return
    for name in (CONFIG, HISTORY):
        if (run / name).is_file() and not (run_dir / name).exists():
            write_atomically(run_dir / name, (run / name).read_bytes())
