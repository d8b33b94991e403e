"""The start of a run: its data, whether its directory is this run's, where it goes on, what is then fixed.

In this order: `fetch` (from a mirror, where there is one), `position` and `open_data`, `claim` (nothing of
the directory changes but its attempts), `choose`, and once the checkpoint is loaded `accept`, which writes
the run down.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from wm_ds import errors
from wm_ds.checkpoint import mirror
from wm_ds.checkpoint.directory import (
    checkpoints_dir,
    describe,
    latest,
    list_checkpoints,
    step_name,
)
from wm_ds.checkpoint.format import read_manifest
from wm_ds.checkpoint.manager import CheckpointError, Checkpoints
from wm_ds.checkpoint.mirror import Mirror, MirrorPolicy
from wm_ds.checkpoint.store import Store
from wm_ds.config import validate
from wm_ds.config.schema import Config, ConfigError
from wm_ds.config.stages import Past, Plan, PlannedStage, plan, rate_schedule
from wm_ds.data import shards
from wm_ds.data.loader import StageData, StagedBatches
from wm_ds.data.sequences import PackedSequences
from wm_ds.data.shards import ShardError
from wm_ds.data.skip import NOTHING, LeftOut, merged
from wm_ds.distributed import process_group
from wm_ds.distributed.process_group import World
from wm_ds.engine.deepspeed_config import deepspeed_config
from wm_ds.errors import WmError
from wm_ds.families import model_config, num_groups
from wm_ds.optim.learning_rate import RateSchedule, continued, learning_rate
from wm_ds.run import directory, trained_with
from wm_ds.run.ancestry import descended
from wm_ds.run.claim import Attempt, join

log = logging.getLogger(__name__)
T = TypeVar("T")


class Position(NamedTuple):
    """Where a run stands before anything is built: the step that it will go on from, the ends of the stages
    that are over there, and the batches of its order that it leaves out."""

    step: int
    past: Past
    left_out: LeftOut


def position(config: Config) -> Position:
    """Where a start of the run would go on.

    At step 0 for a new run, and where `choose` will refuse what is there. Raises ConfigError for a damaged
    history.
    """
    try:
        found = latest(config.run.dir)[0]
        begin = _beginning_of(config)
        if found is None and begin is not None:
            found = latest(begin)[0] if checkpoints_dir(begin).is_dir() else begin
        step = 0 if found is None else int(read_manifest(found).run["step"])
    except (CheckpointError, OSError):
        found, step = None, 0
    if found is None:
        return Position(0, [], left_out(config, config.run.dir))
    origin = found.parent.parent
    over = trained_with.over(directory.history(origin).get("stages", []), step)
    return Position(step, over, left_out(config, origin))


def left_out(config: Config, origin: str | Path) -> LeftOut:
    """The batches that a run leaves out: by `data.skip`, and by rollbacks of its own and of the run in
    `origin` that it goes on from."""
    return merged([*config.data.skip, *(tuple(entry["batches"]) for entry in _rollbacks(config, origin))])


def _rollbacks(config: Config, origin: str | Path) -> list[dict[str, Any]]:
    """As the run's history has them; before it has one, those of the run in `origin`."""
    own = directory.history(config.run.dir)
    if own or config.run.branch_from is None:
        return (own or directory.history(origin)).get("rollbacks", [])
    return [entry | {"inherited": True} for entry in directory.history(origin).get("rollbacks", [])]


def _beginning_of(config: Config) -> Path | None:
    """What a run without checkpoints of its own begins with: a checkpoint, or a run whose latest is meant."""
    branch = config.run.branch_point
    if branch is not None:
        return checkpoints_dir(branch[0]) / step_name(branch[1])
    resume = config.checkpoint.resume
    if resume is not None and mirror.is_address(resume):
        return mirror.fetched(resume, config.run.dir)
    return None if resume is None else Path(resume)


def check_addresses(config: Config) -> None:
    """Raise StoreRefused where an address elsewhere is of no known kind, or its package not installed."""
    for address in (config.checkpoint.mirror, config.checkpoint.resume):
        if address is not None and (address == config.checkpoint.mirror or mirror.is_address(address)):
            Store(address)


def fetch(config: Config) -> None:
    """Bring here what a run without checkpoints of its own goes on from and has elsewhere; rank 0.

    Raises StoreError; a mirror that cannot be reached, but that this start can do without, is a warning.
    """
    run_dir, c = config.run.dir, config.checkpoint
    if c.mirror is not None:
        mirror.check(run_dir, c.mirror)
        if not mirror.has_checkpoints(run_dir):
            mirror.restore(run_dir, c.mirror)
    own = mirror.has_checkpoints(run_dir)
    if c.resume is not None and mirror.is_address(c.resume) and not own:
        mirror.fetch_beginning(c.resume, run_dir)


def open_mirror(config: Config, world: World) -> Mirror:
    """What sends the run's checkpoints elsewhere, on rank 0 of a run that has that; else it sends nothing."""
    c, policy = config.checkpoint, None
    if c.mirror is not None and world.is_main:
        policy = MirrorPolicy(c.mirror, c.mirror_mib_per_s, c.mirror_keep_last, c.mirror_keep_every or 0)
    return Mirror(config.run.dir, policy)


def open_data(
    config: Config, past: Past = (), left_out: LeftOut = NOTHING
) -> tuple[Plan, StagedBatches, PackedSequences]:
    """The run's stages, its training batches and its held-out rows. Raises ShardError or ConfigError.

    `past` and `left_out`: see `Position`. Held-out rows keep the length that they were packed with through
    all stages.
    """
    first = config.data.sources()[0].path
    stages = plan(config, shards.load_manifest(first)["seq_len"], past)
    rate_schedule(stages)
    batches = open_batches(stages, left_out)
    validate.check_stages(stages, batches.vocab_size, num_groups)
    for stage in stages.stages:  # what its model refuses is refused now, not when the stage is entered
        try:
            model_config(
                stage.config.model, vocab_size=batches.vocab_size, seq_len=stage.seq_len, eos_id=None
            )
        except ConfigError as error:
            raise ConfigError(f"{stage.name}: {error}" if stages.staged else str(error)) from None
    holdout = PackedSequences(config.data.holdout or first, "holdout")
    if holdout.seq_len != stages.packed:
        raise ConfigError(f"data.holdout has rows of {holdout.seq_len} tokens, data.train of {stages.packed}")
    return stages, batches, holdout


def open_batches(stages: Plan, left_out: LeftOut) -> StagedBatches:
    """The training batches of a run's stages. Raises ShardError."""
    of_stages = [_data_of(stages, stage) for stage in stages.stages]
    return StagedBatches(of_stages, seed=stages.config.run.seed, left_out=left_out)


def _data_of(stages: Plan, stage: PlannedStage) -> StageData:
    config = stage.config
    return StageData(
        [source.model_dump() for source in config.data.sources()],
        config.batch.global_batch,
        steps=None if stage is stages.stages[-1] else stage.steps,
        seq_len=config.data.seq_len,
        packed=stages.packed,
        micro_batch=config.batch.micro_batch,
        name=stage.name if stages.staged else "",
    )


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


def claim(stages: Plan, step: int, world: World) -> Attempt:
    """Take the run directory for a launch that goes on at `step`, after checking that it is this run's."""
    config = stages.config
    notes = [f"changed since the last start: {note}" for note in directory.check(stages, step, content)]
    notes += check_branch(stages)
    notes += check_left_out(config, config.run.dir, step)
    attempt = join(config.run.dir, solo=world.size == 1)
    log.info(
        f"{config.run.dir}: attempt {attempt.number}, {world.size} x {world.device.type}, "
        f"{stages.total} steps, {stages.tokens:,} tokens"
    )
    who = f"group of {config.sequence_parallel} ranks" if config.sequence_parallel > 1 else "rank"
    for stage in stages.stages:
        batch = stage.config.batch
        log.info(
            f"steps {stage.first} to {stage.last}: {batch.global_batch} x {stage.seq_len} = "
            f"{stage.positions:,} tokens ({stage.config.accumulation(world.size)} micro-batches of "
            f"{batch.micro_batch} per {who})"
        )
    for note in notes:
        log.info(note)
    return attempt


def check_branch(stages: Plan) -> list[str]:
    """Check the checkpoint that this start would begin a branch with (`run.branch_from`); changes nothing.

    Returns what the branch does otherwise than its ancestor, one line each; nothing where the run is no
    branch, or has a checkpoint of its own to go on from. Raises ConfigError.
    """
    config = stages.config
    point = config.run.branch_point
    if point is None or list_checkpoints(config.run.dir):
        return []
    ancestor, step = Path(point[0]), point[1]
    said = f"run.branch_from = {config.run.branch_from}"
    if os.path.realpath(ancestor) == os.path.realpath(config.run.dir):
        raise ConfigError(f"{said} is this run itself; give the branch another run.dir")
    notes = directory.check_branch(ancestor, stages, step, content)
    found = [listed for listed in list_checkpoints(ancestor) if listed.step == step]
    if not found:
        raise ConfigError(f"{said}: no checkpoint of step {step}; {describe(ancestor)}")
    if found[0].problem is not None:
        raise ConfigError(f"{said}: {found[0].problem}; {describe(ancestor)}")
    notes += check_left_out(config, ancestor, step)
    return [f"unlike {ancestor}: {note}" for note in notes]


def check_left_out(config: Config, origin: str | Path, step: int) -> list[str]:
    """Refuse a `data.skip` by which steps would have had other batches that the run in `origin` has taken.

    Returns what else it changes, in words.
    """
    known = directory.history(origin)
    if not known or known.get("skip", []) == [list(span) for span in config.data.skip]:
        return []
    old, new = merged(known.get("skip", [])), merged(config.data.skip)
    spans = [tuple(entry["batches"]) for entry in known.get("rollbacks", [])]
    before, now = (merged([*one.spans, *spans]) for one in (old, new))
    if before.before(step) != now.before(step):
        raise ConfigError(
            f"data.skip is {old} in {origin} and {new} here, by which steps up to {step} would have had "
            f"other batches; {before.consumed(step)} batches are consumed there: leave out later ones only"
        )
    return [f"data.skip: {old} -> {new}"] if old != new else []


def content(path: str) -> str | None:
    """What the packed data at `path` holds, as a checksum; None where there is none."""
    try:
        return shards.content(shards.load_manifest(path))
    except ShardError:
        return None


def choose(config: Config, checkpoints: Checkpoints, step: int) -> Path | None:
    """The checkpoint to go on from, which is of `step`: the run's data and stages were opened for that one.

    Raises ConfigError where the one that checkpoint.resume names is none.
    """
    own = any((Path(config.run.dir) / "checkpoints").glob("step_*"))
    try:
        found = checkpoints.choose(otherwise=_beginning_of(config))
    except CheckpointError as error:
        if config.checkpoint.resume is None or own:
            raise
        raise ConfigError(f"checkpoint.resume = {config.checkpoint.resume}: {error}") from None
    if found is not None and int(read_manifest(found).run["step"]) != step:
        raise CheckpointError(f"{found} is there since this launch began at step {step}: start again")
    return found


@dataclass(frozen=True)
class Accepted:
    """What is fixed at a start: the learning rate, and for checkpoints what the run is trained with."""

    rate: RateSchedule
    known: dict[str, Any]


def accept(
    stages: Plan, json: dict[str, Any], world: World, attempt: Attempt, found: Path | None, step: int
) -> Accepted:
    """What holds in a run that goes on at `step` from `found`, once its start is written down; rank 0.

    What has happened is fixed: a warm-up that is over is not run again because a run was made longer, nor
    does a rate that has begun to fall rise. Only a branch (`run.branch_from`) has its own rate from where it
    begins. Raises ConfigError where nothing would be trained.
    """
    config, total = stages.config, stages.total
    own = found is None or found.parent.parent.resolve() == Path(config.run.dir).resolve()
    if step > total or (step == total and not own):
        raise ConfigError(
            f"{found} is at step {step} and this run has {total} steps: nothing would be trained; give it "
            f"more than {step} steps (or tokens)"
        )
    planned = RateSchedule(**rate_schedule(stages))
    origin = Path(config.run.dir) if own or found is None else found.parent.parent
    before, history = directory.recorded(origin), directory.history(origin)
    rates = history.get("rates", [])
    if before is not None and not rates:
        rates = [{"from": 0, **rate_schedule(plan(before, stages.packed))}]
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
    trained, now = directory.trained(origin, stages, content), trained_with.record(stages, content)
    changed = trained_with.changes(trained, now, step) if trained else []
    skip, skipped = [list(span) for span in config.data.skip], history.get("skip", [])
    if own and history and skip != skipped:
        changed.append(f"data.skip: {skipped} -> {skip}")
    changes = list(history.get("changes", [])) if own else []
    if changed:
        changes.append({"attempt": attempt.number, "step": step, "what": changed})
    known = {"stages": now, "changes": changes}
    full = deepspeed_config(config, json, config.accumulation(world.size), ())
    contents = [content(source.path) for source in config.data.sources()]
    history = {
        "data": contents,
        "rates": rates,
        "ancestry": history.get("ancestry", []) if own else descended(origin, step),
        "skip": skip,
        "rollbacks": _rollbacks(config, origin),
    }
    directory.record(config, full, world, history | known)
    return Accepted(rate, known)


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
