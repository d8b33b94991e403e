"""`--dry-run`: check a run on any machine and show what it would do, training nothing."""

from __future__ import annotations

import json as json_module
from dataclasses import dataclass
from typing import Any

import torch

from wm_ds.config import load as configuration
from wm_ds.config import validate
from wm_ds.config.schema import Config
from wm_ds.data.loader import GlobalBatches
from wm_ds.data.sequences import PackedSequences
from wm_ds.distributed.process_group import planned_size
from wm_ds.engine.deepspeed_config import deepspeed_config, table_for
from wm_ds.engine.loss import IGNORE
from wm_ds.engine.zero3 import parameter_shapes
from wm_ds.families import cache_bytes, cached_kvs, model_config, num_groups, on_meta
from wm_ds.optim.learning_rate import RateSchedule, learning_rate
from wm_ds.optim.param_rules import format_table
from wm_ds.plan.flops import training
from wm_ds.plan.memory import GIB, Plan, configured
from wm_ds.plan.way import VOCABULARY, Run


@dataclass(frozen=True)
class Rows:
    """What a dry run must know of the data: the data itself, or what is assumed of it."""

    seq_len: int
    vocab_size: int
    eos_id: int | None = None
    batches: GlobalBatches | None = None
    holdout: PackedSequences | None = None


def rows_of(batches: GlobalBatches, holdout: PackedSequences) -> Rows:
    """The data as it is."""
    return Rows(batches.seq_len, batches.vocab_size, batches.eos_id, batches, holdout)


def assumed_rows(config: Config, seq_len: int) -> Rows:
    """Data that is not packed yet, in rows of `seq_len` tokens. Raises ConfigError where these do not fit."""
    vocabulary = config.model.vocab_size or VOCABULARY
    validate.check_against_data(
        config,
        vocab_size=vocabulary,
        seq_len=seq_len,
        sequences=config.batch.global_batch,
        num_groups=num_groups(config.model),
    )
    return Rows(seq_len, vocabulary)


def dry_run(config: Config, json: dict[str, Any], data: Rows) -> str:
    """The resolved run, parameter table, memory plan, schedule and first batches as text.

    The memory plan is the planner's (memory.py) for this run alone; the fake run that it needs takes seconds.
    The number of ranks is WORLD_SIZE, 1 where it is not set. Raises ConfigError, ShardError or OptimizerError
    for whatever a real start would refuse.
    """
    ranks = planned_size()
    validate.check_against_launch(config, json, ranks)
    accumulation = config.accumulation(ranks)
    n = config.sequence_parallel
    hf = model_config(config.model, vocab_size=data.vocab_size, seq_len=data.seq_len, eos_id=data.eos_id)
    lm = on_meta(hf)
    rows = table_for(config, lm)
    full = deepspeed_config(config, json, accumulation, parameter_shapes(lm), ranks)
    total = config.total_steps(data.seq_len)
    tokens = config.batch.global_batch * data.seq_len
    rate = RateSchedule(**configuration.rate_schedule(config, data.seq_len))
    points = sorted({1, max(1, rate.warmup), (total + rate.warmup) // 2, total})
    cost = training(hf, data.seq_len, config.recompute)
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
        memory_plan(configured(Run(config, hf, rows, data.seq_len, ranks), json)),
        "",
        "# batches and schedule",
        f"{total:,} steps of {config.batch.global_batch} = {total * tokens:,} tokens",
        *_data_lines(data, total * config.batch.global_batch),
        f"{accumulation} micro-batches of {config.batch.micro_batch} per "
        f"{f'group of {n} ranks (sequence_parallel)' if n > 1 else 'rank'} and step",
        f"warm-up {rate.warmup} steps; learning rate "
        + ", ".join(f"{learning_rate(p, rate):.3g} at step {p}" for p in points),
    ]
    if cost is not None:
        lines.append(
            f"{cost.model / 1e9:.4g} GFLOP a token "
            f"({cost.hardware / 1e9:.4g} with recompute = {config.recompute}), "
            f"{cost.model * total * tokens:.3g} FLOP for the run"
        )
    if data.batches is None:
        lines += ["", "all checks passed but those of the data, which was not opened; nothing was trained"]
        return "\n".join(lines)
    lines += _first_batches(config, data.batches, total, config.data_ranks(ranks))
    lines += ["", "all checks passed; nothing was trained"]
    return "\n".join(lines)


def _data_lines(data: Rows, trained: int) -> list[str]:
    if data.batches is None or data.holdout is None:
        return [f"assumed: rows of {data.seq_len} tokens, {data.vocab_size:,} in the vocabulary (--seq-len)"]
    return [
        f"{data.batches.rows:,} training sequences of {data.seq_len}, {len(data.holdout):,} held out "
        f"({trained / data.batches.rows:.2f} epochs)"
    ]


def _first_batches(config: Config, batches: GlobalBatches, total: int, data_ranks: int) -> list[str]:
    lines = []
    for b in range(min(2, total)):
        parts = batches.batch(b, 0, data_ranks, config.batch.micro_batch)
        samples = [int(i) for part in parts for i in part["sample_ids"]]
        valid = sum(int((part["labels"] != IGNORE).sum()) for part in parts)
        documents = sum(int(part["document_ids"].max(dim=1).values.add(1).sum()) for part in parts)
        lines.append(
            f"step {b + 1}, rank 0: samples {samples[:8]}{' …' * (len(samples) > 8)}, {documents} documents, "
            f"{valid:,} labels; starts {parts[0]['input_ids'][0, :8].tolist()}"
        )
    return lines


def memory_plan(found: Plan) -> str:
    """A plan as text, a part a line."""
    lines = [f"{name:20} {size / GIB:9.3f} GiB" for name, size in found.parts.items() if size]
    lines.append(f"{'peak on the device':20} {found.peak / GIB:9.3f} GiB, and what the figures leave out")
    if found.host:
        lines.append(f"{'in host memory':20} {found.host / GIB:9.3f} GiB, by offload")
    for name, size in found.traffic.items():
        lines.append(f"{f'sent, {name}':26} {size / GIB:9.3f} GiB a step")
    return "\n".join([*lines, *found.notes])
