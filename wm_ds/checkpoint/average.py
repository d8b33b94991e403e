"""The average of several checkpoints of one run, as a checkpoint of a run directory of its own.

Weights are averaged in float64, piece by piece, and rounded once to the type that they are stored in; one
tensor is in memory at a time. Whatever is no weight (the optimizer's state and its counts, buffers, the
generators, the trainer's counters) is that of the newest of them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from wm_ds.checkpoint.directory import checkpoints_dir, describe, list_checkpoints, step_name
from wm_ds.checkpoint.format import WEIGHT, CheckpointError, Manifest, Reader, read_manifest, verify
from wm_ds.checkpoint.rewrite import Fragment, write_new

log = logging.getLogger(__name__)
PIECE = 2**22  # elements that are averaged at once


def weights_of(rule: str, count: int) -> list[float]:
    """The weights of `count` checkpoints, oldest first; they sum to 1.

    equal: 1/n each. linear: in proportion to 1, 2, … n. ema:D with 0 < D < 1: in proportion to D^age, age 0
    for the newest (an exponential moving average over the checkpoints, without the bias of its beginning).
    Raises CheckpointError for any other rule.
    """
    name, _, number = rule.partition(":")
    if rule == "equal":
        raw = [1.0] * count
    elif rule == "linear":
        raw = [float(place) for place in range(1, count + 1)]
    else:
        try:
            decay = float(number) if name == "ema" else 0.0
        except ValueError:
            decay = 0.0
        if not 0.0 < decay < 1.0:
            raise CheckpointError(
                f"--weights {rule}: write equal, linear, or ema:D with D between 0 and 1 (ema:0.9, say)"
            )
        raw = [decay**age for age in reversed(range(count))]
    return [value / sum(raw) for value in raw]


def of_steps(run_dir: Path, steps: Sequence[int]) -> list[Path]:
    """The run's checkpoints of these steps, in order of steps. Raises CheckpointError for one that is twice
    or not there."""
    twice = sorted({step for step in steps if list(steps).count(step) > 1})
    if twice:
        raise CheckpointError(f"step {twice[0]} is given twice; give every step once (--weights sets shares)")
    paths = [checkpoints_dir(run_dir) / step_name(step) for step in sorted(steps)]
    missing = [str(step) for step, path in zip(sorted(steps), paths) if not path.is_dir()]
    if missing:
        raise CheckpointError(
            f"no checkpoint of step{'s' * (len(missing) > 1)} {', '.join(missing)}; {describe(run_dir)}"
        )
    return paths


def newest(run_dir: Path, count: int) -> list[Path]:
    """The run's `count` newest saves, in order of steps. Raises CheckpointError where there are not so many,
    or where one of them is damaged."""
    listed = list_checkpoints(run_dir)
    complete = [found for found in listed if found.problem is None]
    if len(complete) < count:
        raise CheckpointError(
            f"--last {count}: {run_dir} has {len(complete)} complete checkpoint{'s' * (len(complete) != 1)} "
            f"({describe(run_dir)}); checkpoint.keep_last and checkpoint.keep_every say how many a run keeps"
        )
    chosen = complete[:count]
    damaged = [found for found in listed if found.problem is not None]
    between = [found for found in damaged if found.step > min(other.step for other in chosen)]
    if between:
        raise CheckpointError(
            f"--last {count}: one of them is damaged: {between[0].problem}; name the others with --steps"
        )
    return sorted((found.path for found in chosen), key=lambda path: path.name)


def average(sources: Sequence[Path], weights: Sequence[float], run_dir: Path, rule: str) -> Path:
    """Publish the average of `sources` (oldest first) below the new directory `run_dir`; returns its path.

    `rule` is how the weights were made, for the record. Raises CheckpointError where the checkpoints are not
    of one model, where one is damaged, and where `run_dir` holds something; OSError where it cannot be
    written, and nothing is left of it then.
    """
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise CheckpointError(f"{run_dir} exists; give --output a directory that does not")
    manifests = [read_manifest(source) for source in sources]
    for source, manifest in zip(sources[:-1], manifests[:-1]):
        _check_same_model(source, manifest, sources[-1], manifests[-1])
    for source in sources:
        problems = verify(source)
        if problems:
            raise CheckpointError("; ".join(problems))
        log.info(f"{source.name}: ok")
    layout = manifests[-1]
    layout.run |= {
        "saved_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "averaged": {
            "steps": [int(manifest.run["step"]) for manifest in manifests],
            "rule": rule,
            "weights": list(weights),
        },
    }
    files = sum(name.endswith(".safetensors") for name in layout.files)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(Reader(*pair)) for pair in zip(sources, manifests)]
        return write_new(run_dir, layout, _mean_of(readers, weights), sources[-1], files=files)


def _mean_of(readers: list[Reader], weights: Sequence[float]) -> Callable[[Fragment], torch.Tensor]:
    roles = {name: entry.role for name, entry in readers[-1].manifest.tensors.items()}

    def content(part: Fragment) -> torch.Tensor:
        out = torch.empty(part.stop - part.start, dtype=part.dtype)
        if part.kind != WEIGHT or roles[part.name] == "buffer":
            readers[-1].read_into(out, part.name, part.kind, part.start)
            return out
        for low in range(0, out.numel(), PIECE):
            high = min(low + PIECE, out.numel())
            total = torch.zeros(high - low, dtype=torch.float64)
            piece = torch.empty_like(total)
            for reader, weight in zip(readers, weights, strict=True):
                reader.read_into(piece, part.name, WEIGHT, part.start + low)
                total += weight * piece
            out[low:high] = total
        return out

    return content


def _check_same_model(path: Path, one: Manifest, last: Path, other: Manifest) -> None:
    """Raise CheckpointError unless both hold the same tensors in the same shapes."""
    shapes, wanted = ({n: e.shape for n, e in manifest.tensors.items()} for manifest in (one, other))
    found = [f"{name} is only in {last.name}" for name in wanted if name not in shapes]
    found += [f"{name} is only in {path.name}" for name in shapes if name not in wanted]
    found += [
        f"{name} is {list(shape)} in {path.name} and {list(wanted[name])} in {last.name}"
        for name, shape in shapes.items()
        if name in wanted and wanted[name] != shape
    ]
    if not found and one.tied != other.tied:
        found = [f"tied weights are {one.tied} in {path.name} and {other.tied} in {last.name}"]
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise CheckpointError(
            f"{path} and {last} are not of one model: {'; '.join(found[:3])}{more}; only checkpoints of one "
            "run can be averaged"
        )
