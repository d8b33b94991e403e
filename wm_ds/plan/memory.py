"""What a way to run needs in a GPU's memory at the worst moment of a step, and what it puts into the host's.

States (weights, gradients, optimizer) follow from the parameters' shapes by arithmetic. Activations come from
running the real model on meta tensors (activations.py).

Not in any figure: what kernels use inside one call, the CUDA context and NCCL (about 1.5 GiB a GPU), and the
allocator's fragmentation. `RESERVE` of the GPU is left free for them.

With sequence_parallel every figure of a row is of one rank's part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from wm_ds.engine.deepspeed_config import sums_own_gradients
from wm_ds.engine.loss import CHUNK_LOGITS
from wm_ds.engine.zero3 import limits
from wm_ds.optim.exchange import EXCHANGE_ELEMENTS
from wm_ds.plan.activations import Body, body
from wm_ds.plan.flops import training
from wm_ds.plan.traffic import traffic
from wm_ds.plan.way import Run, Way, configured_way, ways

GIB = 1 << 30
RESERVE = 0.08  # of a GPU, for what is not in the figures


@dataclass(frozen=True)
class States:
    """Bytes per GPU of what does not depend on the tokens.

    Attributes:
        parameters: weights as stored, the part that this GPU holds.
        gathered: weights that stage 3 has gathered at a time.
        gradients: during backward.
        optimizer: master weights and the optimizer's state.
        buffers: DeepSpeed's.
        stepping: all that is there while the optimizer steps, when activations are gone.
        host: what offload puts into the host's memory, and the gradients that its update needs.
        notes: what costs more than one might think.
    """

    parameters: float
    gathered: float
    gradients: float
    optimizer: float
    buffers: float
    stepping: float
    host: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Activations:
    """Bytes per GPU of a micro-batch: see Body. `logits`: of the loss, the head's gradient included."""

    kept: float
    peak: float
    pool: float
    logits: float
    host: float


@dataclass(frozen=True)
class Plan:
    """A way to run, and its bytes per GPU at the worst moment of a step, by what they are spent on."""

    way: Way
    parts: dict[str, float]
    host: float
    """Bytes per GPU in the host's memory."""
    traffic: dict[str, float]
    """Bytes that each GPU sends in a step."""
    hardware_flops: float | None
    """Per token, recomputation included; None for a model whose FLOPs are not known."""
    notes: tuple[str, ...]

    @property
    def peak(self) -> float:
        """Bytes per GPU at the worst moment of a step."""
        return sum(self.parts.values())


def plans(run: Run, recompute: str) -> Iterator[Plan]:
    """Every sensible way to run under one recompute policy."""
    measured = measure(run, recompute)
    return (plan(way, measured) for way in ways(run, recompute))


def configured(run: Run, json: dict[str, Any]) -> Plan:
    """The run as its configuration and its DeepSpeed file (`json`) say."""
    return plan(configured_way(run, json), measure(run, run.config.recompute))


def measure(run: Run, recompute: str) -> Body:
    """A row's activations; takes seconds."""
    return body(run.hf, run.length, run.config.precision, recompute, run.config.sequence_parallel)


def plan(way: Way, measured: Body) -> Plan:
    """What a way to run needs and sends; `measured`: of its recompute policy."""
    held, made = states(way), activations(way, measured)
    cost = training(way.run.hf, way.run.length, way.recompute)
    return Plan(
        way,
        peak(held, made),
        held.host + made.host,
        traffic(way),
        None if cost is None else cost.hardware,
        held.notes,
    )


def states(way: Way) -> States:
    """Weights, gradients, optimizer and DeepSpeed's buffers."""
    run, stage, share = way.run, way.stage, way.share
    w, total, muon = run.weight_bytes, run.parameters, run.muon_parameters
    cut = share if stage >= 1 else 1.0
    masters = 0 if stage == 0 and w == 4 else 4 * total
    optimizer = (masters + run.optimizer_bytes) * cut
    gradients, notes = _gradients(way)
    gathered = 0.0
    if way.gather:
        sizes = limits(way.gather, [(row.name, row.shape) for row in run.rows])
        gathered = w * min(total, sizes["stage3_max_live_parameters"])
    reduction = way.reduce_buffers * w if stage else 0
    # A second copy of the stored weights while the optimizer steps, seen alive on two CPU ranks.
    copies = w * total if stage in (1, 2) else 0
    if stage == 0:
        # The reduction flattens all gradients; AdamW's temporaries are smaller than that or about as large.
        step: float = 4 * max(min(total, 500_000_000), 3 * (total - muon))
    else:
        # fp32 gradients of the own part, scaled; Muon's update and its exchange, there and back.
        step = 8 * total * cut + 4 * muon * cut + 12 * min(EXCHANGE_ELEMENTS, muon * cut) + copies
    parameters = 0.0 if way.offload_weights else w * total * (share if stage == 3 else 1.0)
    on_gpu = 0.0 if way.offload else optimizer
    # Above stage 0 whole gradients are gone when the optimizer steps.
    reduced = gradients if stage == 0 else w * total * share
    return States(
        parameters=parameters,
        gathered=gathered,
        gradients=gradients,
        optimizer=on_gpu,
        buffers=reduction,
        stepping=parameters + on_gpu + reduced + step,
        host=(optimizer + 4 * total * share) * way.offload + w * total * share * way.offload_weights,
        notes=notes,
    )


def _gradients(way: Way) -> tuple[float, tuple[str, ...]]:
    """Bytes per GPU during backward, and why they are more than one might think."""
    run, stage = way.run, way.stage
    w, total, local = run.weight_bytes, run.parameters, run.config.optim.clips_locally
    # Every group of every pass uses every weight: no gradient is complete before the end of backward.
    whole = stage < 2 or local or run.multi_pass
    size, notes = w * total * (1.0 if whole else way.share), []
    if whole and stage >= 2:
        why = "every group of every pass uses every weight"
        why = "optim.clip_rule = local clips before the reduction" if local else why
        notes.append(f"gradients are whole on every GPU: {why}")
    summed = run.config.precision == "bf16" and way.accumulation > 1  # micro-batches, in fp32 (engine.py)
    if summed and sums_own_gradients(run.config, stage, way.accumulation):
        size += 4 * total
        notes.append(
            "micro-batches' bf16 gradients are summed in fp32: 4 more bytes a parameter on every GPU"
        )
    if stage >= 2:
        size += (4 if summed and not local else w) * total * way.share
    return size, tuple(notes)


def activations(way: Way, measured: Body) -> Activations:
    """A micro-batch's activations and loss."""
    run = way.run
    vocabulary, width = run.hf.vocab_size, run.hf.hidden_size
    chunk = max(1, min(way.micro_batch * run.own_length, CHUNK_LOGITS // vocabulary))
    logits = chunk * vocabulary * (8 + (2 if run.config.precision != "fp32" else 4))
    moved = measured.entries * run.config.entries_on_host
    return Activations(
        kept=(measured.kept - moved) * way.micro_batch,
        peak=(measured.peak - moved) * way.micro_batch,
        pool=(min(measured.pool, measured.peak) - moved) * way.micro_batch,
        logits=logits + 4 * vocabulary * width,  # the head's gradient is made in forward, in fp32
        host=moved * way.micro_batch,
    )


def peak(held: States, made: Activations) -> dict[str, float]:
    """Bytes per GPU at the worst moment of a step, by what they are spent on: backward, or the loss where it
    needs more than backward and gradients, or the optimizer's step where that needs more than both."""
    parts = {
        "parameters": held.parameters,
        "gathered parameters": held.gathered,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "activations": max(0.0, made.peak - made.pool),
        "pool": made.pool,
        "logits": max(0.0, made.kept + made.logits - held.gradients - made.peak),
        "buffers": held.buffers,
    }
    parts["buffers"] += max(0.0, held.stepping - sum(parts.values()))
    return parts
