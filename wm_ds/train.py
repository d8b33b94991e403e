"""Train: `python -m wm_ds.train configs/X.yaml [section.field=value …] [--dry-run]`.

Started by torchrun, by slurm/pretrain.sbatch, or alone. A run directory with a published checkpoint resumes.
Exit codes: 0 finished or stopped gracefully, 1 failed, 2 the configuration or the launch was refused.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from contextlib import ExitStack
from typing import Any, NamedTuple

from wm_ds.config.reference import summary


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    found = argparse.ArgumentParser(
        prog="python -m wm_ds.train",
        description="Train a language model.",
        epilog=f"All keys of a run with their meaning: docs/configuration.md. Its sections:\n{summary()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("config", help="the run's YAML")
    found.add_argument("overrides", nargs="*", metavar="section.field=value")
    found.add_argument(
        "--dry-run", action="store_true", help="check everything and print the run, train nothing"
    )
    found.add_argument(
        "--seq-len",
        type=int,
        metavar="T",
        help="with --dry-run: plan for rows of T tokens, without data",
    )
    return found


if __name__ == "__main__":  # before the imports that take seconds, so that --help need not wait for them
    parser().parse_intermixed_args()

from wm_ds import rollback
from wm_ds.checkpoint.layout_proof import LayoutError
from wm_ds.checkpoint.manager import Checkpoints
from wm_ds.checkpoint.mirror import Mirror, settle
from wm_ds.checkpoint.store import StoreRefused
from wm_ds.checkpoint.writer import SavePolicy
from wm_ds.config import load as configuration
from wm_ds.config import validate
from wm_ds.config.deepspeed_json import load_deepspeed
from wm_ds.config.schema import Config, ConfigError
from wm_ds.config.stages import PlannedStage
from wm_ds.data import shards
from wm_ds.data.prefetch import PrefetchIterator
from wm_ds.data.sequences import PackedSequences, evaluation_batches
from wm_ds.data.shards import ShardError
from wm_ds.distributed import log as terminal
from wm_ds.distributed import process_group
from wm_ds.distributed.environment import VariableError
from wm_ds.distributed.host_group import Agreement, speaks
from wm_ds.distributed.process_group import SetupError, World
from wm_ds.engine.compile import compile_blocks
from wm_ds.engine.deepspeed_config import table_for
from wm_ds.engine.diagnostics import observe
from wm_ds.engine.engine import Engine, TrainingFailed, build
from wm_ds.engine.init_weights import Shell
from wm_ds.errors import INTERRUPTED, WmError, describe, run_cli
from wm_ds.evaluate.samples import open_sampler
from wm_ds.families import model_config
from wm_ds.metrics import Metrics
from wm_ds.optim.param_rules import OptimizerError, format_table
from wm_ds.plan.flops import training
from wm_ds.plan.profile import Profiles
from wm_ds.run import evaluations, trackers
from wm_ds.run.claim import Attempt
from wm_ds.run.evaluations import Evaluations
from wm_ds.run.stopping import Signals, Stopping, clear_markers, write_marker
from wm_ds.run.stragglers import Stragglers
from wm_ds.run.watchdog import Watchdog
from wm_ds.start import (
    accept,
    check_addresses,
    check_branch,
    choose,
    claim,
    fetch,
    on_main,
    open_batches,
    open_data,
    open_mirror,
    position,
)

log = logging.getLogger("wm_ds.train")
PROBE_ROWS = 2  # held-out rows whose loss is recorded with every checkpoint
STOPPED_S = 10  # that a run which is asked to stop waits for its mirror
REFUSED = (ConfigError, SetupError, ShardError, LayoutError, VariableError, OptimizerError, StoreRefused)


class Beside(NamedTuple):
    """What goes on beside the steps of a run; none of it changes a number."""

    mirror: Mirror
    profiles: Profiles
    stragglers: Stragglers
    evaluations: Evaluations


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, train, and return the exit code."""
    return run_cli(command, arguments, refused=2)


def command(arguments: list[str] | None = None) -> int:
    """What main does, its errors as exceptions."""
    options = parser().parse_intermixed_args(arguments)
    started = time.monotonic()
    terminal.start()
    # Before anything that takes time: who is told to stop while the run starts must not die of it, nor train.
    signals = Signals(speaks=os.environ.get("RANK", "0") == "0")
    if not options.dry_run:
        signals.install()
    try:
        if options.seq_len is not None and options.seq_len < 1:
            raise ConfigError(f"--seq-len {options.seq_len} must be 1 or more")
        if options.dry_run:
            return plan(options.config, options.overrides, options.seq_len)
        if options.seq_len is not None:
            raise ConfigError("--seq-len goes with --dry-run; a run's row length is its data's")
        return run(options.config, options.overrides, started, signals)
    finally:
        signals.restore()


def load(path: str, overrides: list[str]) -> tuple[Config, dict[str, Any]]:
    """The run's configuration and DeepSpeed's, checked by themselves and against each other."""
    config = configuration.load(path, overrides)
    json = load_deepspeed(config.deepspeed)
    validate.check_against_deepspeed(config, json)
    trackers.check(config)
    check_addresses(config)
    return config, json


def plan(path: str, overrides: list[str], seq_len: int | None) -> int:
    """Print what the run would be, of its data's rows or of rows of `seq_len` tokens; the exit code."""
    from wm_ds.plan.dry_run import assumed_rows, dry_run, rows_of

    config, json = load(path, overrides)
    evaluations.check_tasks(config)
    _, past, left_out = position(config)
    data = assumed_rows(config, seq_len, past) if seq_len else rows_of(*open_data(config, past, left_out))
    for note in check_branch(data.stages):
        log.info(note)
    print(dry_run(json, data))
    return 0


def run(path: str, overrides: list[str], started: float, signals: Signals) -> int:
    """Meet the other ranks and train; the exit code."""
    config, json = load(path, overrides)
    # What the file and the launch contradict is refused before ranks meet and anything is built.
    validate.check_against_launch(config, json, process_group.launch_size()[2])
    stages, *_ = open_data(config, *position(config)[1:])
    open_sampler(config, stages.packed)
    world = process_group.init(config.run.timeout_minutes)
    try:
        train(config, json, world, started, signals)
    except REFUSED as error:
        say(world, error)
        return 2
    except WmError as error:  # a checkpoint, too many skipped steps, a newer attempt
        say(world, error)
        return 1
    except (Exception, KeyboardInterrupt) as error:
        # No error of the command line: the watchdog notes it for the other ranks, and shows where it was.
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    process_group.shutdown()
    return 0


def say(world: World, error: WmError) -> None:
    """Why the run ends: rank 0's error, or that of a rank alone, with its number."""
    if speaks(str(error)):
        log.error("error: %s%s", "" if world.is_main else f"rank {world.rank}: ", error)


def train(config: Config, json: dict[str, Any], world: World, started: float, signals: Signals) -> None:
    """The run, from its last checkpoint or the beginning, to its end or to a reason to stop.

    `started`: when the process began (time.monotonic), `signals`: those noted since then.
    """
    if config.run.deterministic:
        process_group.make_deterministic()
    on_main(world, lambda: evaluations.check_tasks(config))
    on_main(world, lambda: fetch(config))
    step, past, left_out = on_main(world, lambda: position(config))
    stages, batches, holdout = open_data(config, past, left_out)
    sampler = open_sampler(config, stages.packed)
    attempt = on_main(world, lambda: claim(stages, step, world))
    watchdog = Watchdog(attempt, rank=world.rank, local_rank=world.local_rank, world=world.size).start()
    limit = config.run.time_limit_minutes
    agreement = Agreement()
    stopping = Stopping(
        config.run.dir,
        agreement,
        time_limit_s=None if limit is None else limit * 60,
        started=started,
        signals=signals,
    )

    total = stages.total
    hf_config = model_config(
        config.model, vocab_size=batches.vocab_size, seq_len=stages.packed, eos_id=batches.eos_id
    )
    shell = Shell(hf_config, recompute=config.recompute, entries_on_host=config.entries_on_host)
    if config.compile:
        compile_blocks(shell.lm)
    log.info(format_table(table_for(config, shell.lm)))
    engine = build(config, json, shell.lm, world, stages.packed, shell.values(config.run.seed))
    mirror = open_mirror(config, world)
    checkpoints = Checkpoints(
        engine.ds,
        config.run.dir,
        policy=SavePolicy(config.checkpoint.keep_last, config.checkpoint.keep_every or 0),
        timeout_s=config.run.timeout_minutes * 60,
        attempt=attempt,
        mirror=mirror,
    )
    found = choose(config, checkpoints, step)
    if found is not None:
        engine.load_state_dict(checkpoints.load(found)["engine"])
    checkpoints.prove("the first step")
    accepted = on_main(world, lambda: accept(stages, json, world, attempt, found, step))
    engine.rate = accepted.rate
    on_main(world, lambda: clear_markers(config.run.dir))
    mirror.offer_newest()
    metrics = Metrics(stages, attempt=attempt.number, world=world, begun=engine.steps)

    watch = config.watch
    beside = Beside(
        mirror,
        Profiles(config, engine.lm, world),
        Stragglers(agreement, engine.own_parts, config.log.every, watch.straggler, watch.straggler_intervals),
        Evaluations(config, is_main=world.is_main, begun=engine.steps),
    )
    began, reason = engine.steps, stopping.before_the_first_step()
    stage = enter(stages.at(max(1, engine.steps)), None, engine, metrics)
    with ExitStack() as opened:
        opened.push(watchdog.note_error)
        stream = opened.enter_context(batches.iterate(engine.steps, *engine.data_rank))
        metrics.start()
        while engine.steps < total and reason is None:
            watchdog.beat(engine.steps + 1)
            stage = enter(stages.at(engine.steps + 1), stage, engine, metrics)
            in_detail = due(config.log.details_every, engine.steps + 1, total)
            take_step(engine, stream, metrics, left_out.batch(engine.steps + 1), in_detail, beside)
            if rollback.is_due(engine):
                stream.close()
                done, left_out = rollback.roll_back(config, engine, checkpoints, attempt, found, left_out)
                metrics.rolled_back(done.at, done.to, done.batches, done.number)
                beside.evaluations.rolled_back(done.to)
                stage = enter(stages.at(max(1, engine.steps)), stage, engine, metrics)
                batches = open_batches(stages, left_out)
                stream = opened.enter_context(batches.iterate(engine.steps, *engine.data_rank))
                reason = stopping.check(save_failed=checkpoints.failed)
                continue
            if due(config.evaluate.every, engine.steps, total):
                evaluate(stage.config, engine, holdout, metrics)
            if sampler is not None and due(sampler.said.every, engine.steps, total):
                began_at = time.perf_counter()
                texts = sampler.texts(engine)
                metrics.samples(engine.steps, texts, time.perf_counter() - began_at)
            reason = stopping.check(save_failed=checkpoints.failed)
            if due(config.checkpoint.every, engine.steps, total) or reason is not None:
                last = engine.steps == total or reason is not None
                state = {"engine": engine.state_dict(), "holdout": probe(config, engine, holdout)}
                state |= accepted.known
                checkpoints.save(engine.steps, state, wait=last)
                score(beside, engine.steps, total, reason, checkpoints, agreement, watchdog)
                metrics.pause()
    how: dict[str, Any] = {"step": engine.steps, "began": began}
    if engine.steps < total:
        how["reason"] = reason
    settle(
        mirror, agreement, watchdog.beat, STOPPED_S if "reason" in how else config.run.timeout_minutes * 60
    )
    finish(config, engine, total, how, attempt, metrics, world)
    beside.evaluations.close(done=engine.steps >= total)
    watchdog.stop()
    engine.ds.destroy()


def enter(stage: PlannedStage, now: PlannedStage | None, engine: Engine, metrics: Metrics) -> PlannedStage:
    """Go on as `stage` says, where the run is in another one now; returns it."""
    if stage is not now:
        engine.enter(stage)
        metrics.enter(stage, training(engine.lm.config, stage.seq_len, stage.config.recompute))
    return stage


def take_step(
    engine: Engine,
    stream: PrefetchIterator,
    metrics: Metrics,
    batch: int,
    in_detail: bool,
    beside: Beside,
) -> None:
    """One step on the next batch, which has the number `batch` in the order of the data, and its row."""
    waited = stream.waited_s
    micro_batches = next(stream)
    waited = stream.waited_s - waited
    news = beside.mirror.news()
    beside.profiles.before(engine.steps + 1)
    result = engine.step(micro_batches)
    own = {} if beside.profiles.active else result.seconds  # a profiler takes its time
    beside.profiles.after(result.step)
    told, asked = beside.stragglers.after(result.step, own, waited, beside.profiles.requested)
    if asked:
        beside.profiles.request(result.step)
    if result.step % metrics.every == 0:
        beside.evaluations.poll()
    details = observe(engine, micro_batches[0]) if in_detail else {}
    if batch != engine.steps:
        details["batch"] = batch
    metrics.step(result, total_tokens=engine.tokens, data_s=waited, extra=details | news | told)


def score(
    beside: Beside,
    step: int,
    total: int,
    reason: str | None,
    checkpoints: Checkpoints,
    agreement: Agreement,
    watchdog: Watchdog,
) -> None:
    """Have downstream tasks scored on the checkpoint of `step`, if they are due; wait for it if it says so
    and there is no `reason` to stop."""
    if beside.evaluations.saved(step, total) and reason is None:
        checkpoints.wait()
        evaluations.settle(beside.evaluations, agreement, watchdog.beat)


def due(every: int | None, step: int, total: int) -> bool:
    """Whether something done every `every` steps, and at the end, is due after `step`."""
    return step == total or (every is not None and step % every == 0)


def probe(config: Config, engine: Engine, holdout: PackedSequences) -> dict[str, Any]:
    """The loss of a few held-out rows now, for the checkpoint: an export must come to it again."""
    loss, tokens = engine.evaluate(list(evaluation_batches(holdout, *engine.data_rank, 1, PROBE_ROWS)))
    return {
        "rows": min(PROBE_ROWS, len(holdout)),
        "loss": loss,
        "tokens": tokens,
        "precision": config.precision,
        "content": shards.content(holdout.manifest),
    }


def evaluate(config: Config, engine: Engine, holdout: PackedSequences, metrics: Metrics) -> None:
    """Held-out loss with the trained number of passes, and with twice as many."""
    start = time.perf_counter()
    micro = config.batch.micro_batch
    rows = list(evaluation_batches(holdout, *engine.data_rank, micro, config.evaluate.sequences))
    loss, tokens = engine.evaluate(rows)
    losses = {"holdout_loss": loss}
    if config.evaluate.double_passes and engine.passes:
        losses["holdout_loss_double_passes"], _ = engine.evaluate(rows, schedule=engine.passes_schedule(2))
    metrics.evaluation(engine.steps, losses, tokens, time.perf_counter() - start)


def finish(
    config: Config,
    engine: Engine,
    total: int,
    how: dict[str, Any],
    attempt: Attempt,
    metrics: Metrics,
    world: World,
) -> None:
    """Publish how the run ended (`how`: the marker's content); the checkpoint is written by now."""
    done = engine.steps >= total
    if done and how.get("began") == total:
        log.info("nothing left to do: an earlier attempt has reached step %d of %d", total, total)
    log.info(
        f"done: {engine.steps} steps, {engine.tokens:,} tokens"
        if done
        else f"stopped after step {engine.steps} of {total} ({how['reason']}); start again to resume",
    )
    if engine.skipped:
        log.info("%d steps were skipped, see metrics.jsonl", engine.skipped)
    metrics.close()
    process_group.barrier()
    on_main(world, lambda: note_end(config.run.dir, attempt, "done" if done else "stopped", how))


def note_end(run_dir: str, attempt: Attempt, result: str, how: dict[str, Any]) -> None:
    """Leave how the run ended in its directory; rank 0. Raises TrainingFailed where it cannot."""
    try:
        write_marker(run_dir, result, how)
        attempt.record_end(result=result, **how, clean=True)
    except OSError as error:
        raise TrainingFailed(
            f"{describe(error)}: the checkpoint of step {how['step']} is written, but not that the run is "
            f"{result}; make room and start it again, which goes on from there"
        ) from None


if __name__ == "__main__":
    trackers.end(main())
