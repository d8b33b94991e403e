"""The start of a run: its data, whether its directory is this run's, where it goes on, what is then fixed.

In this order: `open_data`, `claim` (nothing of the directory changes but its attempts), `choose`, and once
the checkpoint is loaded `accept`, which writes the run down.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from wm_ds import errors
from wm_ds.checkpoint.directory import checkpoints_dir, describe, list_checkpoints, step_name
from wm_ds.checkpoint.manager import CheckpointError, Checkpoints
from wm_ds.config import load as configuration
from wm_ds.config import validate
from wm_ds.config.schema import Config, ConfigError
from wm_ds.data import shards
from wm_ds.data.loader import GlobalBatches
from wm_ds.data.sequences import PackedSequences
from wm_ds.data.shards import ShardError
from wm_ds.distributed import process_group
from wm_ds.distributed.process_group import World
from wm_ds.engine.deepspeed_config import deepspeed_config
from wm_ds.errors import WmError
from wm_ds.families import num_groups
from wm_ds.optim.learning_rate import RateSchedule, continued, learning_rate
from wm_ds.run import directory
from wm_ds.run.ancestry import descended
from wm_ds.run.claim import Attempt, join

log = logging.getLogger(__name__)
T = TypeVar("T")


def open_data(config: Config) -> tuple[GlobalBatches, PackedSequences]:
    """The training batches and the held-out sequences. Raises ShardError or ConfigError."""
    batches = GlobalBatches(
        [s.model_dump() for s in config.data.sources()],
        global_batch=config.batch.global_batch,
        seed=config.run.seed,
    )
    validate.check_against_data(
        config,
        vocab_size=batches.vocab_size,
        seq_len=batches.seq_len,
        sequences=batches.rows,
        num_groups=num_groups(config.model),
    )
    holdout = PackedSequences(config.data.holdout or config.data.sources()[0].path, "holdout")
    if holdout.seq_len != batches.seq_len:
        raise ConfigError(
            f"data.holdout has rows of {holdout.seq_len} tokens, data.train of {batches.seq_len}"
        )
    return batches, holdout


def on_main(world: World, act: Callable[[], T]) -> T:
    """Rank 0's answer on every rank; its refusal stops all of them, as does a disk that cannot be written."""
    answer: Any = None
    problem: Exception | None = None
    if world.is_main:
        try:
            answer = act()
        except WmError as error:
            problem = error
        except OSError as error:
            problem = ConfigError(errors.describe(error))
    answer, problem = process_group.broadcast((answer, problem))
    if problem is not None:
        raise problem
    return answer


def claim(config: Config, json: dict[str, Any], world: World, batches: GlobalBatches) -> Attempt:
    """Take the run directory for this launch, after checking that it is this run's."""
    accumulation = config.accumulation(world.size)
    notes = [f"changed since the last start: {note}" for note in directory.check(config, content)]
    notes += check_branch(config)
    attempt = join(config.run.dir, solo=world.size == 1)
    positions = config.batch.global_batch * batches.seq_len
    log.info(
        f"{config.run.dir}: attempt {attempt.number}, {world.size} x {world.device.type}, "
        f"{config.total_steps(batches.seq_len)} steps of {config.batch.global_batch} x {batches.seq_len} = "
        f"{positions:,} tokens ({accumulation} micro-batches of {config.batch.micro_batch} per "
        f"{f'group of {config.sequence_parallel} ranks' if config.sequence_parallel > 1 else 'rank'})",
    )
    for note in notes:
        log.info(note)
    return attempt


def check_branch(config: Config) -> list[str]:
    """Check the checkpoint that this start would begin a branch with (`run.branch_from`); changes nothing.

    Returns what the branch does otherwise than its ancestor, one line each; nothing where the run is no
    branch, or has a checkpoint of its own to go on from. Raises ConfigError.
    """
    point = config.run.branch_point
    if point is None or list_checkpoints(config.run.dir):
        return []
    ancestor, step = Path(point[0]), point[1]
    said = f"run.branch_from = {config.run.branch_from}"
    if ancestor.resolve() == Path(config.run.dir).resolve():
        raise ConfigError(f"{said} is this run itself; give the branch another run.dir")
    notes = directory.check_branch(ancestor, config, content)
    found = [listed for listed in list_checkpoints(ancestor) if listed.step == step]
    if not found:
        raise ConfigError(f"{said}: no checkpoint of step {step}; {describe(ancestor)}")
    if found[0].problem is not None:
        raise ConfigError(f"{said}: {found[0].problem}; {describe(ancestor)}")
    return [f"unlike {ancestor}: {note}" for note in notes]


def content(path: str) -> str | None:
    """What the packed data at `path` holds, as a checksum; None where there is none."""
    try:
        return shards.content(shards.load_manifest(path))
    except ShardError:
        return None


def choose(config: Config, checkpoints: Checkpoints) -> Path | None:
    """The checkpoint to go on from. Raises ConfigError where the one that checkpoint.resume names is none."""
    own = any((Path(config.run.dir) / "checkpoints").glob("step_*"))
    branch = config.run.branch_point
    begin = config.checkpoint.resume if branch is None else checkpoints_dir(branch[0]) / step_name(branch[1])
    try:
        return checkpoints.choose(otherwise=begin)
    except CheckpointError as error:
        if config.checkpoint.resume is None or own:
            raise
        raise ConfigError(f"checkpoint.resume = {config.checkpoint.resume}: {error}") from None


def accept(
    config: Config,
    json: dict[str, Any],
    world: World,
    batches: GlobalBatches,
    found: Path | None,
    step: int,
) -> RateSchedule:
    """The learning rate of a run that goes on at `step` from `found`, once its start is written down; rank 0.

    What has happened is fixed: a warm-up that is over is not run again because a run was made longer, nor
    does a rate that has begun to fall rise. Only a branch (`run.branch_from`) has its own rate from where it
    begins. Raises ConfigError where nothing would be trained.
    """
    total = config.total_steps(batches.seq_len)
    own = found is None or found.parent.parent.resolve() == Path(config.run.dir).resolve()
    if step > total or (step == total and not own):
        raise ConfigError(
            f"{found} is at step {step} and this run has {total} steps: nothing would be trained; give it "
            f"more than {step} steps (or tokens)"
        )
    planned = RateSchedule(**configuration.rate_schedule(config, batches.seq_len))
    origin = Path(config.run.dir) if own or found is None else found.parent.parent
    before = directory.recorded(origin)
    known = directory.history(origin)
    rates = known.get("rates", [])
    if before is not None and not rates:
        rates = [{"from": 0, **configuration.rate_schedule(before, batches.seq_len)}]
    rates = [past for past in rates if past["from"] <= step]
    rate = planned
    if not own and config.run.branch_from is not None:
        log.info(_beginning(config, rates, planned, step))
        rates = []
    elif step > 0 and before is not None and rates:
        last = _rate(rates[-1])
        said = before.optim.warmup != config.optim.warmup
        rate = continued(last, planned, step, warmup_changed=said)
        for line in changes_of_rate(last, planned, rate, step):
            log.info(line)
    rates = [past for past in rates if past["from"] < step]
    if not rates or _rate(rates[-1]) != rate:
        rates.append({"from": step, **asdict(rate)})
    full = deepspeed_config(config, json, config.accumulation(world.size), ())
    contents = [content(source.path) for source in config.data.sources()]
    ancestry = known.get("ancestry", []) if own else descended(origin, step)
    directory.record(config, full, world, {"data": contents, "rates": rates, "ancestry": ancestry})
    return rate


def _beginning(config: Config, rates: list[dict[str, Any]], planned: RateSchedule, step: int) -> str:
    """What a person should know of the learning rate of a branch that begins at `step`."""
    said = f"a branch of {config.run.branch_from}"
    if rates:
        last = _rate(rates[-1])
        said += f", where the learning rate was {learning_rate(step, last):.3g}"
    return f"{said}; from here on: {_points(planned, step)}"


def _points(rate: RateSchedule, step: int) -> str:
    points = {step + 1, (step + 1 + rate.total) // 2, rate.total}
    return ", ".join(f"{learning_rate(p, rate):.3g} at step {p}" for p in sorted(points))


def _rate(past: dict[str, Any]) -> RateSchedule:
    """A learning-rate schedule of the run's history, without the step from which it held."""
    return RateSchedule(**{key: value for key, value in past.items() if key != "from"})


def changes_of_rate(before: RateSchedule, planned: RateSchedule, rate: RateSchedule, step: int) -> list[str]:
    """What a person should know of the learning rate of a run that goes on with another length."""
    lines = []
    if rate.warmup != planned.warmup:
        lines.append(
            f"the warm-up stays {rate.warmup} steps, as it was; optim.warmup would be {planned.warmup} now"
        )
    if rate.cap < before.cap:
        lines.append(
            f"the learning rate had begun to fall before step {step}: it does not rise again. To train on at "
            "the peak, start another run.dir with run.branch_from = RUN@STEP, a step from before it fell"
        )
    if rate != before and (rate.total != before.total or lines):
        lines.append(
            f"{before.total} steps became {rate.total}; learning rate from here on: {_points(rate, step)}"
        )
    return lines
