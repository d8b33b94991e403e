"""`--dry-run`: check a run on any machine and show what it would do, training nothing."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from typing import Any

import torch
from transformers.configuration_utils import PretrainedConfig

from wm_ds.config import load as configuration
from wm_ds.config.schema import Config
from wm_ds.config.stages import Past, Plan, PlannedStage, plan, rate_schedule
from wm_ds.config.validate import check_against_launch, check_stages
from wm_ds.data.loader import StagedBatches
from wm_ds.data.sequences import PackedSequences
from wm_ds.distributed.process_group import planned_size
from wm_ds.engine.deepspeed_config import deepspeed_config, table_for
from wm_ds.engine.loss import IGNORE
from wm_ds.engine.zero3 import parameter_shapes
from wm_ds.families import cache_bytes, cached_kvs, model_config, num_groups, on_meta
from wm_ds.optim.freeze import check_freeze
from wm_ds.optim.learning_rate import RateSchedule, learning_rate
from wm_ds.optim.param_rules import Row, format_table
from wm_ds.plan.activations import Body
from wm_ds.plan.flops import Flops, training
from wm_ds.plan.memory import GIB, measure
from wm_ds.plan.memory import Plan as MemoryPlan
from wm_ds.plan.memory import plan as plan_way
from wm_ds.plan.way import VOCABULARY, Run, configured_way


@dataclass(frozen=True)
class Rows:
    """What a dry run must know: the run's stages, and of the data itself or what is assumed of it."""

    stages: Plan
    vocab_size: int
    eos_id: int | None = None
    batches: StagedBatches | None = None
    holdout: PackedSequences | None = None


def rows_of(stages: Plan, batches: StagedBatches, holdout: PackedSequences) -> Rows:
    """The data as it is."""
    return Rows(stages, batches.vocab_size, batches.eos_id, batches, holdout)


def assumed_rows(config: Config, seq_len: int, past: Past = ()) -> Rows:
    """Data that is not packed yet, in rows of `seq_len` tokens. Raises ConfigError where these do not fit."""
    stages, vocabulary = plan(config, seq_len, past), config.model.vocab_size or VOCABULARY
    check_stages(stages, vocabulary, num_groups)
    return Rows(stages, vocabulary)


def dry_run(json: dict[str, Any], data: Rows) -> str:
    """The resolved run, parameter table, and each stage's memory plan, schedule and first batches as text.

    The memory plan is the planner's (memory.py) for this run alone; the fake run that it needs takes seconds.
    The number of ranks is WORLD_SIZE, 1 where it is not set. Raises ConfigError, ShardError or OptimizerError
    for whatever a real start would refuse.
    """
    stages, ranks = data.stages, planned_size()
    config = stages.config
    check_against_launch(config, json, ranks)
    hf = model_config(config.model, vocab_size=data.vocab_size, seq_len=stages.packed, eos_id=data.eos_id)
    lm = on_meta(hf)
    rows = table_for(config, lm)
    check_freeze(config, [row.name for row in rows])
    accumulation = max(stage.config.accumulation(ranks) for stage in stages.stages)
    full = deepspeed_config(config, json, accumulation, parameter_shapes(lm), ranks)
    lines = [
        "# the run",
        configuration.dump(config).rstrip(),
        "",
        "# DeepSpeed's configuration",
        json_module.dumps(full, indent=2),
        "",
        "# parameters",
        format_table(rows),
        f"the cache holds {cached_kvs(hf)} KVs a token for {hf.num_hidden_layers} layers: "
        f"{cache_bytes(hf, torch.bfloat16):,} bytes in bf16",
        "",
        f"# memory and communication of one of {ranks} rank{'s' * (ranks > 1)} (WORLD_SIZE)",
        "# states by arithmetic, activations from the model run on meta tensors (wm_ds/plan/memory.py)",
        *_memory(data, json, rows, ranks),
        "",
        "# batches and schedule",
        *_schedule(data, ranks),
    ]
    if data.batches is None:
        lines += ["", "all checks passed but those of the data, which was not opened; nothing was trained"]
        return "\n".join(lines)
    lines += _first_batches(stages, data.batches, config.data_ranks(ranks))
    lines += ["", "all checks passed; nothing was trained"]
    return "\n".join(lines)


def _hf(data: Rows, stage: PlannedStage) -> PretrainedConfig:
    """The model's configuration in a stage."""
    return model_config(
        stage.config.model, vocab_size=data.vocab_size, seq_len=stage.seq_len, eos_id=data.eos_id
    )


def _memory(data: Rows, json: dict[str, Any], rows: list[Row], ranks: int) -> list[str]:
    """The planner's figures, stage by stage; of stages that need the same once."""
    found: dict[str, list[str]] = {}
    measured: dict[str, Body] = {}
    for stage in data.stages.stages:
        hf = _hf(data, stage)
        run = Run(stage.config, hf, rows, stage.seq_len, ranks)
        key = f"{hf.to_json_string(use_diff=False)} {stage.seq_len}"
        if key not in measured:
            measured[key] = measure(run, stage.config.recompute)
        found.setdefault(memory_plan(plan_way(configured_way(run, json), measured[key])), []).append(
            stage.name
        )
    if not data.stages.staged:
        return list(found)
    return [line for text, names in found.items() for line in (f"{', '.join(names)}:", text)]


def _schedule(data: Rows, ranks: int) -> list[str]:
    """Steps, tokens, rows, FLOPs and learning rate, stage by stage and of the whole run."""
    stages = data.stages
    rate = RateSchedule(**rate_schedule(stages))
    points = sorted({1, max(1, rate.warmup), (stages.total + rate.warmup) // 2, stages.total})
    lines = []
    for stage in stages.stages:
        own = _of_stage(data, stage, ranks)
        if stages.staged:
            ends = sorted({stage.first, stage.last})
            own.append(f"learning rate {_rates(stages, rate, ends)}")
            own = [f"{stage.name}, steps {stage.first:,} to {stage.last:,}:", *(f"  {line}" for line in own)]
        lines += own
    lines.append(f"warm-up {rate.warmup} steps; learning rate {_rates(stages, rate, points)}")
    cost = [_flops(data, stage) for stage in stages.stages]
    known = [
        c.model * s.steps * s.positions for c, s in zip(cost, stages.stages, strict=True) if c is not None
    ]
    if stages.staged:
        lines.append(f"the run: {stages.total:,} steps, {stages.tokens:,} tokens")
        alone = _flops(data, plan(stages.config.model_copy(update={"stages": None}), stages.packed).at(1))
        if alone is not None and len(known) == len(cost):
            one = alone.model * stages.tokens
            lines.append(
                f"{sum(known):.3g} FLOP for the run; {one:.3g} for as many tokens in one stage, without "
                f"`stages` ({sum(known) / one:.2f} times)"
            )
    return lines


def _of_stage(data: Rows, stage: PlannedStage, ranks: int) -> list[str]:
    config, n, cost = stage.config, stage.config.sequence_parallel, _flops(data, stage)
    lines = [
        f"{stage.steps:,} steps of {config.batch.global_batch} = {stage.steps * stage.positions:,} tokens"
    ]
    if data.batches is None or data.holdout is None:
        lines.append(
            f"assumed: rows of {stage.seq_len} tokens, {data.vocab_size:,} in the vocabulary (--seq-len)"
        )
    else:
        lines += [
            f"{drawn.path}: {drawn.rows:,} of {drawn.epoch:,} training sequences of {stage.seq_len}, epochs "
            f"{drawn.before:.2f} to {drawn.after:.2f}"
            for drawn in data.batches.drawn(stage.index, stage.steps)
        ]
        if gone := data.batches.passed_over(stage.index, stage.steps):
            lines.append(f"{gone:,} batches of these are left out (data.skip, rollbacks)")
    lines.append(
        f"{config.accumulation(ranks)} micro-batches of {config.batch.micro_batch} per "
        f"{f'group of {n} ranks (sequence_parallel)' if n > 1 else 'rank'} and step"
    )
    if config.freeze:
        lines.append(f"frozen: {', '.join(config.freeze)}")
    if cost is not None:
        lines.append(
            f"{cost.model / 1e9:.4g} GFLOP a token "
            f"({cost.hardware / 1e9:.4g} with recompute = {config.recompute}), "
            f"{cost.model * stage.steps * stage.positions:.3g} FLOP"
        )
    return lines


def _flops(data: Rows, stage: PlannedStage) -> Flops | None:
    return training(_hf(data, stage), stage.seq_len, stage.config.recompute)


def _rates(stages: Plan, rate: RateSchedule, points: list[int]) -> str:
    return ", ".join(
        f"{learning_rate(step, rate) * stages.at(step).lr_factor:.3g} at step {step}" for step in points
    )


def _first_batches(stages: Plan, batches: StagedBatches, data_ranks: int) -> list[str]:
    """The first two batches of every stage."""
    lines = []
    for step in sorted(
        {s for stage in stages.stages for s in (stage.first, stage.first + 1) if s <= stage.last}
    ):
        parts = batches.batch(step - 1, 0, data_ranks)
        samples = [int(i) for part in parts for i in part["sample_ids"]]
        valid = sum(int((part["labels"] != IGNORE).sum()) for part in parts)
        documents = sum(int(part["document_ids"].max(dim=1).values.add(1).sum()) for part in parts)
        lines.append(
            f"step {step}, rank 0: samples {samples[:8]}{' …' * (len(samples) > 8)}, {documents} documents, "
            f"{valid:,} labels; starts {parts[0]['input_ids'][0, :8].tolist()}"
        )
    return lines


def memory_plan(found: MemoryPlan) -> str:
    """A plan as text, a part a line."""
    lines = [f"{name:20} {size / GIB:9.3f} GiB" for name, size in found.parts.items() if size]
    lines.append(f"{'peak on the device':20} {found.peak / GIB:9.3f} GiB, and what the figures leave out")
    if found.host:
        lines.append(f"{'in host memory':20} {found.host / GIB:9.3f} GiB, by offload")
    for name, size in found.traffic.items():
        lines.append(f"{f'sent, {name}':26} {size / GIB:9.3f} GiB a step")
    return "\n".join([*lines, *found.notes])
