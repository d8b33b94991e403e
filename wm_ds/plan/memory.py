"""What a run needs in memory and sends over the network, for every ZeRO stage, recomputation and micro-batch.

States (weights, gradients, optimizer) follow from the parameters' shapes by arithmetic. Activations come from
running the real model on meta tensors (activations.py).

Not in any figure: what kernels use inside one call, the CUDA context and NCCL (about 1.5 GiB a GPU), and the
allocator's fragmentation. `RESERVE` of the GPU is left free for them.

With sequence_parallel every figure of a row is of one rank's part of it.

w: bytes of a stored weight (bf16: 2, autocast and fp32: 4); P parameters, N GPUs, L layers, D width,
k channels, G KV heads of width d, B rows of T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers.configuration_utils import PretrainedConfig

from wm_ds.config.schema import Config
from wm_ds.engine.deepspeed_config import sums_own_gradients
from wm_ds.engine.loss import CHUNK_LOGITS
from wm_ds.engine.zero3 import default_gather, limits
from wm_ds.optim.exchange import EXCHANGE_ELEMENTS
from wm_ds.optim.param_rules import Row
from wm_ds.plan.activations import Body, body, storage_dtype
from wm_ds.plan.flops import training

GIB = 1 << 30
RESERVE = 0.08  # of a GPU, for what is not in the figures


@dataclass(frozen=True)
class Plan:
    """One way to run, and its bytes per GPU at the worst moment of a step."""

    stage: int
    offload: bool
    gather: str | None
    recompute: str
    micro_batch: int
    accumulation: int
    parts: dict[str, float]
    host: float
    """Bytes per GPU in the host's memory: what is offloaded, and the gradients that its update needs."""
    traffic: dict[str, float]
    """Bytes that each GPU sends in a step."""
    hardware_flops: float | None
    """Per token, recomputation included."""
    notes: list[str] = field(default_factory=list)
    """What costs more memory than one might think."""

    @property
    def peak(self) -> float:
        return sum(self.parts.values())


# States, by arithmetic


def plans(
    config: Config,
    hf: PretrainedConfig,
    rows: list[Row],
    length: int,
    gpus: int,
    *,
    stages: tuple[int, ...] = (0, 1, 2, 3),
    recomputes: tuple[str, ...] | None = None,
    micro_batches: tuple[int, ...] | None = None,
    buckets: tuple[int, int] = (50_000_000, 50_000_000),
) -> Iterator[Plan]:
    """Every sensible way to run, cheapest in recomputation first.

    `rows`: the optimizer's table (engine.table_for). `buckets`: DeepSpeed's reduce and all-gather bucket.
    """
    multi_pass = hf.model_type != "qwen3"
    if recomputes is None:
        recomputes = ("none", "layer", "group", "group+layer") if multi_pass else ("none", "layer")
    per_gpu = config.batch.global_batch // config.data_ranks(gpus)
    if micro_batches is None:
        micro_batches = tuple(2**i for i in range(12) if per_gpu % 2**i == 0 and 2**i <= per_gpu)
    for recompute in recomputes:
        measured = body(hf, length, config.precision, recompute, config.sequence_parallel)
        cost = training(hf, length, recompute)
        for stage in stages:
            gathers: tuple[str | None, ...] = (None,)
            if stage == 3:
                gathers = ("step", "traversal") if "layer" in recompute else ("step",)
                gathers = gathers if multi_pass else (default_gather("vanilla"),)
            for gather in gathers:
                for offload in (False, True) if stage >= 2 else (False,):
                    for micro in micro_batches:
                        yield plan(
                            config, hf, rows, length, gpus, measured, stage=stage, gather=gather,
                            recompute=recompute, micro_batch=micro, offload=offload,
                            offload_weights=offload and stage == 3, buckets=buckets,
                            flops=None if cost is None else cost.hardware,
                        )  # fmt: skip


def configured(
    config: Config, json: dict[str, Any], hf: PretrainedConfig, rows: list[Row], length: int, gpus: int
) -> Plan:
    """The run as its configuration and its DeepSpeed file (`json`) say."""
    zero = json.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    moved = {part: zero.get(f"offload_{part}", {}).get("device") == "cpu" for part in ("optimizer", "param")}
    gather = (config.zero3.gather or default_gather(config.model.family)) if stage == 3 else None
    cost = training(hf, length, config.recompute)
    measured = body(hf, length, config.precision, config.recompute, config.sequence_parallel)
    return plan(
        config, hf, rows, length, gpus, measured,
        stage=stage, gather=gather, recompute=config.recompute, micro_batch=config.batch.micro_batch,
        offload=moved["optimizer"], offload_weights=moved["param"],
        buckets=(int(zero.get("reduce_bucket_size", 5e8)), int(zero.get("allgather_bucket_size", 5e8))),
        flops=None if cost is None else cost.hardware,
    )  # fmt: skip


def plan(
    config: Config,
    hf: PretrainedConfig,
    rows: list[Row],
    length: int,
    gpus: int,
    measured: Body,
    *,
    stage: int,
    gather: str | None,
    recompute: str,
    micro_batch: int,
    offload: bool = False,
    offload_weights: bool = False,
    buckets: tuple[int, int] = (50_000_000, 50_000_000),
    flops: float | None = None,
) -> Plan:
    """One way to run. See the module's text for what is arithmetic and what is measured.

    `offload` puts masters and optimizer state into the host's memory, `offload_weights` (stage 3) the cut
    weights as well.
    """
    w = storage_dtype(config.precision).itemsize
    total = sum(math.prod(r.shape) for r in rows)
    state = sum(math.prod(r.shape) * (4 if r.rule == "muon" else 8) for r in rows)
    accumulation = config.batch.global_batch // (config.data_ranks(gpus) * micro_batch)
    own = length // config.sequence_parallel
    share = 1 / gpus
    multi_pass = hf.model_type != "qwen3"
    local = config.optim.clips_locally
    # Every group of every pass uses every weight: no gradient is complete before the end of backward.
    whole = stage < 2 or local or multi_pass
    cut = share if stage >= 1 else 1.0
    masters = 0 if stage == 0 and w == 4 else 4 * total
    optimizer = (masters + state) * cut
    gradients = w * total * (1.0 if whole else share)
    summed = config.precision == "bf16" and accumulation > 1  # micro-batches, in fp32 (engine/engine.py)
    notes = []
    if whole and stage >= 2:
        why = "every group of every pass uses every weight"
        why = "optim.clip_rule = local clips before the reduction" if local else why
        notes.append(f"gradients are whole on every GPU: {why}")
    if summed and sums_own_gradients(config, stage, accumulation):
        gradients += 4 * total
        notes.append(
            "micro-batches' bf16 gradients are summed in fp32: 4 more bytes a parameter on every GPU"
        )
    if stage >= 2:
        gradients += (4 if summed and not local else w) * total * share
    sizes = dict(limits(gather, [(r.name, r.shape) for r in rows])) if gather else {}
    gathered = 0.0
    if stage == 3:
        gathered = w * min(total, sizes["stage3_max_live_parameters"])
    bucket = min(buckets[0], total) * w * (2 if stage >= 2 else 1) if stage else 0
    if stage in (1, 2):
        # A second copy of the stored weights, seen alive on two CPU ranks, and the gathering of updates.
        bucket += w * total + min(buckets[1], total) * w
    muon = sum(math.prod(r.shape) for r in rows if r.rule == "muon")
    if stage == 0:
        # The reduction flattens all gradients; AdamW's temporaries are smaller than that or about as large.
        step = 4 * max(min(total, 500_000_000), 3 * (total - muon))
    else:
        # fp32 gradients of the own part, scaled; Muon's update and its exchange, there and back.
        step = 8 * total * cut + 4 * muon * cut + 12 * min(EXCHANGE_ELEMENTS, muon * cut)
        step += bucket - (min(buckets[0], total) * w * (2 if stage >= 2 else 1))
    chunk = max(1, min(micro_batch * own, CHUNK_LOGITS // hf.vocab_size))
    logits = chunk * hf.vocab_size * (8 + (2 if config.precision != "fp32" else 4))
    head = 4 * hf.vocab_size * hf.hidden_size  # its gradient is made in forward, in fp32
    moved = measured.entries * config.entries_on_host
    during_loss = (measured.kept - moved) * micro_batch + logits + head
    during_backward = (measured.peak - moved) * micro_batch
    parts = {
        "parameters": 0.0 if offload_weights else w * total * (share if stage == 3 else 1.0),
        "gathered parameters": gathered,
        "gradients": gradients,
        "optimizer": 0.0 if offload else optimizer,
        "activations": max(0.0, measured.peak - measured.pool) * micro_batch,
        "pool": (min(measured.pool, measured.peak) - moved) * micro_batch,
        "logits": max(0.0, during_loss - gradients - during_backward),
        "buffers": bucket,
    }
    # Activations are gone when the optimizer steps, and above stage 0 so are whole gradients.
    reduced = gradients if stage == 0 else w * total * share
    stepping = parts["parameters"] + parts["optimizer"] + reduced + step
    parts["buffers"] += max(0.0, stepping - sum(parts.values()))
    sent = traffic(hf, total, w, gpus, stage, gather, recompute, accumulation, muon_bytes(rows, stage, gpus))
    if local and stage >= 2 and gpus > 1:
        sent["gradients"] /= accumulation  # clipped and reduced once
    if config.sequence_parallel > 1:
        wide = 4 if config.precision == "fp32" else 2
        tokens = micro_batch * accumulation * length
        sent["shared rows"] = sequence_bytes(hf, tokens, wide, config.sequence_parallel, recompute)
    host = (optimizer + 4 * total * share) * offload + w * total * share * offload_weights
    host += moved * micro_batch
    return Plan(stage, offload, gather, recompute, micro_batch, accumulation, parts, host, sent, flops, notes)


def muon_bytes(rows: list[Row], stage: int, gpus: int) -> float:
    """Bytes that Muon's exchange of pieces sends a step: all matrices there and back at stage 3."""
    matrices = 4 * sum(math.prod(r.shape) for r in rows if r.rule == "muon")
    return 2 * matrices / gpus if stage == 3 else 0.0


def sequence_bytes(hf: PretrainedConfig, tokens: int, wide: int, ranks: int, recompute: str) -> float:
    """Bytes that one of `ranks` ranks sends in the all-to-alls of a step over `tokens` tokens of shared rows.

    `wide`: bytes of a number that travels, in the dtype of products. A layer sends its queries and outputs at
    every traversal and in backward; new pool entries go once for every token and pass, and their gradients
    back. The last layer runs in the last pass only, whose last group writes no entries.
    """
    layers, detached, graded = hf.num_hidden_layers, hf.no_grad_passes, hf.grad_passes
    once = graded * (layers - 1) + 1  # traversals of a layer that carry gradient
    traversals = (detached + graded) * (layers - 1) + 1 + once
    if "layer" in recompute:
        traversals += once
    if "group" in recompute:
        traversals += once + min(1, detached) * (layers - 1)
    if recompute == "group+layer":
        traversals -= 1 / hf.num_groups  # the last group's step is made again up to its last layer only
    writes = 1 + detached + graded - 1 / hf.num_groups + 1 + graded - 1 / hf.num_groups
    queries = 2 * hf.num_attention_heads * hf.head_dim
    entries = 2 * hf.num_kv_channels * hf.num_key_value_heads * hf.head_dim
    return tokens / ranks * (ranks - 1) / ranks * wide * (queries * traversals + entries * writes)


def traffic(
    hf: PretrainedConfig,
    total: int,
    w: int,
    gpus: int,
    stage: int,
    gather: str | None,
    recompute: str,
    accumulation: int,
    muon: float,
) -> dict[str, float]:
    """Bytes that each GPU sends in a step, by purpose; rings send (N-1)/N of what is moved."""
    if gpus == 1:
        return {}
    ring = (gpus - 1) / gpus
    moved = {"gradients": w * total * ring * (2 if stage == 0 else 1)}
    if stage in (2, 3):
        moved["gradients"] *= accumulation
    if stage in (1, 2):
        moved["updated weights"] = w * total * ring
    if stage == 3:
        times = 1
        if gather == "traversal" and hf.model_type != "qwen3":
            passes, groups = hf.no_grad_passes + hf.grad_passes, hf.num_groups
            forward, again = passes * groups, hf.grad_passes * groups
            times = forward + again * (2 + (recompute == "group+layer"))
        elif gather == "traversal":
            times = 2
        moved["gathered weights"] = w * total * ring * times * accumulation
    if muon:
        moved["Muon's matrices"] = muon
    return moved
