"""Going back behind a row of spikes (`guard.rollback`): to a checkpoint from before it, without its batches.

The decision follows from numbers that all ranks share. What is done about it lies in the run directory
before a step is taken again: first the checkpoints that hold spikes are set aside, then history.json has
which batches are left out from now on. A kill before that leaves a run that comes to the same decision
again, a kill after it one that goes on as this one would have.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from wm_ds.checkpoint.directory import checkpoints_dir, go_back, list_checkpoints
from wm_ds.checkpoint.format import read_manifest
from wm_ds.checkpoint.manager import Checkpoints
from wm_ds.config.schema import Config
from wm_ds.data.skip import LeftOut, merged
from wm_ds.engine.engine import Engine, TrainingFailed
from wm_ds.errors import describe
from wm_ds.run import directory
from wm_ds.run.claim import Attempt
from wm_ds.start import on_main

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rollback:
    """One rollback, as history.json and metrics.jsonl have it.

    Attributes:
        at: the step after which it was decided.
        to: the step of the checkpoint that the run went back to.
        batches: those that are left out, first and last (skip.py says how they are numbered).
        attempt: the one that did it.
        number: counts the run's own.
    """

    at: int
    to: int
    batches: tuple[int, int]
    attempt: int
    number: int


def is_due(engine: Engine) -> bool:
    """Whether the steps just taken were as many spikes in a row as the run bears. The same on all ranks."""
    return engine.guard.rollback is not None and engine.spikes_in_a_row >= engine.guard.rollback


def roll_back(
    config: Config,
    engine: Engine,
    checkpoints: Checkpoints,
    attempt: Attempt,
    begun_from: Path | None,
    out: LeftOut,
) -> tuple[Rollback, LeftOut]:
    """Put the engine back behind the spikes; returns what was done and what is left out from now on.

    `begun_from`: the checkpoint that this launch began with, where the run has none of its own from before
    the spikes. `out`: what was left out so far. A collective. Raises TrainingFailed on all ranks where
    guard.max_rollbacks have been made, or nothing is there to go back to.
    """
    checkpoints.wait()
    done, path = on_main(engine.world, lambda: _decide(config, engine, attempt, begun_from, out))
    engine.load_state_dict(checkpoints.load(path)["engine"])
    return done, merged([*out.spans, done.batches])


def _decide(
    config: Config, engine: Engine, attempt: Attempt, begun_from: Path | None, out: LeftOut
) -> tuple[Rollback, Path]:
    """Choose the checkpoint and write down what is left out; rank 0."""
    said = f"step {engine.steps}: {engine.spikes_in_a_row} spikes of the loss in a row"
    known = directory.history(config.run.dir)
    before = [entry for entry in known.get("rollbacks", []) if not entry.get("inherited")]
    if len(before) >= config.guard.max_rollbacks:
        raise TrainingFailed(
            f"{said}, and the run has gone back {len(before)} times (guard.max_rollbacks = "
            f"{config.guard.max_rollbacks}): perhaps it is not the data. The checkpoints are intact; look "
            "at the spikes' samples in metrics.jsonl, lower optim.lr, or leave batches out by data.skip"
        )
    good = _from_before(config, engine.spiking_since, begun_from)
    if good is None:
        raise TrainingFailed(
            f"{said}, and there is no checkpoint from before step {engine.spiking_since} to go back to "
            f"(guard.rollback = {config.guard.rollback})"
        )
    step = int(read_manifest(good).run["step"])
    batches = (out.consumed(step) + 1, out.consumed(engine.steps))
    done = Rollback(engine.steps, step, batches, attempt.number, len(before) + 1)
    attempt.check()
    own = good.parent.resolve() == checkpoints_dir(config.run.dir).resolve()
    try:
        for old, new in go_back(config.run.dir, good if own else None):
            log.info("%s holds spikes; it is now %s", old, new)
        directory.amend(config.run.dir, rollbacks=[*known.get("rollbacks", []), asdict(done)])
    except OSError as error:
        raise TrainingFailed(
            f"{said}, and going back cannot be written down: {describe(error)}; start again"
        ) from None
    return done, good


def _from_before(config: Config, spiking_since: int, begun_from: Path | None) -> Path | None:
    """The newest checkpoint that no spike of the row is in."""
    for found in list_checkpoints(config.run.dir):
        if found.problem is None and found.step < spiking_since:
            return found.path
    if begun_from is not None and int(read_manifest(begun_from).run["step"]) < spiking_since:
        return begun_from
    return None
