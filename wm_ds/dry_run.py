"""`--dry-run`: check a run on any machine and show what it would do, training nothing."""

from __future__ import annotations

import json as json_module
import math
from typing import Any

import torch
from transformers.initialization import no_init_weights

from . import config as configuration
from .build import model_class, model_config, open_data
from .config import Config
from .distributed import launch_size
from .engine import deepspeed_config, table_for
from .flops import training
from .loss import IGNORE
from .optim import Row, format_table, learning_rate
from .zero3 import parameter_shapes

GIB = 1 << 30


def dry_run(config: Config, json: dict[str, Any]) -> str:
    """The resolved run, parameter table, memory plan, schedule and first batches as text.

    The number of ranks is WORLD_SIZE, 1 where it is not set. Raises ConfigError, ShardError or OptimizerError
    for whatever a real start would refuse.
    """
    ranks = launch_size()[2]
    accumulation = config.accumulation(ranks)
    n = config.sequence_parallel
    batches, holdout = open_data(config)
    hf = model_config(
        config.model, vocab_size=batches.vocab_size, seq_len=batches.seq_len, eos_id=batches.eos_id
    )
    with torch.device("meta"), no_init_weights():
        lm = model_class(hf)(hf)
        lm.tie_weights()
    rows = table_for(config, lm)
    full = deepspeed_config(config, json, accumulation, parameter_shapes(lm), ranks)
    total = config.total_steps(batches.seq_len)
    tokens = config.batch.global_batch * batches.seq_len
    schedule = configuration.schedule_steps(config, batches.seq_len)
    points = sorted({1, max(1, schedule["warmup"]), (total + schedule["warmup"]) // 2, total})
    cost = training(hf, batches.seq_len, config.recompute)
    lines = [
        "# the run",
        configuration.dump(config).rstrip(),
        "",
        "# DeepSpeed's configuration",
        json_module.dumps(full, indent=2),
        "",
        "# parameters",
        format_table(rows),
        "",
        f"# memory per rank, {ranks} rank{'s' * (ranks > 1)} (WORLD_SIZE), states only",
        memory_plan(config, json, rows, ranks),
        "",
        "# batches and schedule",
        f"{batches.rows:,} training sequences of {batches.seq_len}, {len(holdout):,} held out; "
        f"{total:,} steps of {config.batch.global_batch} = {total * tokens:,} tokens "
        f"({total * config.batch.global_batch / batches.rows:.2f} epochs)",
        f"{accumulation} micro-batches of {config.batch.micro_batch} per "
        f"{f'group of {n} ranks (sequence_parallel)' if n > 1 else 'rank'} and step",
        f"warm-up {schedule['warmup']} steps; learning rate "
        + ", ".join(f"{learning_rate(p, **schedule):.3g} at step {p}" for p in points),
    ]
    if cost is not None:
        lines.append(
            f"{cost.model / 1e9:.4g} GFLOP a token "
            f"({cost.hardware / 1e9:.4g} with recompute = {config.recompute}), "
            f"{cost.model * total * tokens:.3g} FLOP for the run"
        )
    for b in range(min(2, total)):
        parts = batches.batch(b, 0, config.data_ranks(ranks), config.batch.micro_batch)
        samples = [int(i) for part in parts for i in part["sample_ids"]]
        valid = sum(int((part["labels"] != IGNORE).sum()) for part in parts)
        documents = sum(int(part["document_ids"].max(dim=1).values.add(1).sum()) for part in parts)
        lines.append(
            f"step {b + 1}, rank 0: samples {samples[:8]}{' …' * (len(samples) > 8)}, {documents} documents, "
            f"{valid:,} labels; starts {parts[0]['input_ids'][0, :8].tolist()}"
        )
    lines += ["", "all checks passed; nothing was trained"]
    return "\n".join(lines)


def memory_plan(config: Config, json: dict[str, Any], rows: list[Row], ranks: int) -> str:
    """Weights, gradients, masters and optimizer state of one rank by where they lie, as text.

    Activations, buckets and fragmentation come on top. WhiteMatter and the local clip rule hold one whole
    gradient on every rank at every stage: each parameter is used in every group of every pass, so none is
    complete, and none can be reduced, before the end of backward.
    """
    zero = json.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    parameters = sum(math.prod(r.shape) for r in rows)
    width = 2 if config.precision in ("bf16", "fp16") else 4
    share = 1 / ranks
    local = config.optim.clip > 0 and config.optim.clip_rule == "local"
    whole_gradient = stage < 2 or local or config.model.family == "whitematter"
    state = sum(math.prod(r.shape) * (4 if r.rule == "muon" else 8) for r in rows)
    masters = 0 if stage == 0 and width == 4 else 4 * parameters
    if stage == 3 and width == 4:
        masters = 0  # the partitioned parameters are the masters
    entries = [
        ("weights", width * parameters * (share if stage == 3 else 1), "offload_param"),
        ("gradients", width * parameters * (1 if whole_gradient else share), ""),
        ("fp32 masters", masters * (share if stage >= 1 else 1), "offload_optimizer"),
        ("optimizer state", state * (share if stage >= 1 else 1), "offload_optimizer"),
    ]
    lines = []
    device = 0.0
    for name, size, key in entries:
        host = bool(key) and zero.get(key, {}).get("device") == "cpu"
        device += 0 if host else size
        note = " (host memory)" if host else ""
        if name == "gradients" and whole_gradient and stage >= 2:
            note = " (whole on every rank: " + (
                "clip_rule local)" if local else "every group uses every weight)"
            )
        lines.append(f"{name:16} {size / GIB:8.3f} GiB{note}")
    lines.append(f"{'on the device':16} {device / GIB:8.3f} GiB, activations and buckets come on top")
    return "\n".join(lines)
