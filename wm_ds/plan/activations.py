"""Memory of a step's activations, by running the model on meta tensors: nothing is computed or allocated.

The real model runs forward and backward under a tracker of storages (meta_run.py). To stay within seconds the
run is made small in directions in which memory is exactly affine: two or four groups of the size of the run's
groups, one and two gradient passes, at the full number of layers or, for deep models, at two smaller ones;
batch 1. A layerwise start is of whole rows, not of groups: with it, only the depth is made smaller.

The run takes the paths of the CPU: attention kernels on CUDA (flash, flex) save other small tensors than
those. Where ranks share rows the model runs as one rank of its group, with all-to-alls that go nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.configuration_utils import PretrainedConfig
from transformers.initialization import no_init_weights

from wm_ds.engine.loss import document_mask
from wm_ds.families import construct, family_of
from wm_ds.model.attention import MAX_RUNS_WITH_GRAD, MIN_QUERIES_PER_RUN
from wm_ds.model.layout import document_positions
from wm_ds.model.shard import Shard
from wm_ds.plan.meta_run import MetaTracker, as_on_cpu

EXTRA_LAYERS = 2  # between the two depths of an extrapolation


@dataclass(frozen=True)
class Body:
    """Bytes of one row through the model's body, apart from parameters and their gradients.

    `kept` is alive between forward and backward, `peak` at the worst moment; `pool` is the pool's part of
    `peak`: its buffers, their gradients and the overwritten entries; `entries` is these entries' part.
    """

    kept: float
    peak: float
    pool: float
    entries: float = 0.0


def storage_dtype(precision: str) -> torch.dtype:
    """What weights are stored in."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _variant(hf: PretrainedConfig, **fields: Any) -> PretrainedConfig:
    """The same configuration with other fields, checked again."""
    kept = {k: v for k, v in hf.to_dict().items() if k not in ("model_type", "architectures", "dtype")}
    return type(hf)(**(kept | fields))


class PretendedShard(Shard):
    """The first of some ranks that share a row: sizes as if there were others, numbers of no meaning."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """See Shard; as much memory, nothing sent."""
        return x.contiguous().clone()


def _measure(
    hf: PretrainedConfig, length: int, precision: str, recompute: str, ranks: int = 1, backward: bool = True
) -> tuple[float, float]:
    """(kept, peak) bytes of one row of `length` tokens on meta tensors; forward's peak without `backward`."""
    with torch.device("meta"), as_on_cpu():
        with no_init_weights():
            lm = construct(hf, recompute=recompute, dtype=storage_dtype(precision)).train()
        ids = torch.zeros(1, length, dtype=torch.long)
        documents = torch.zeros(1, length, dtype=torch.int32)
        arguments: dict[str, Any] = {"document_ids": documents}
        if not family_of(hf).takes_documents:
            mask, positions = document_mask(documents, lm.dtype), document_positions(documents)
            arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
        else:
            lm.model.shard = PretendedShard(ranks)
        tracker = MetaTracker(lm.parameters())
        with tracker:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                hidden = lm.model(input_ids=ids, **arguments).last_hidden_state
            kept = tracker.current["activations"]
            if backward:
                tracker.in_backward = True
                hidden.backward(torch.zeros_like(hidden))
        return kept, tracker.peaks["activations"]


def body(hf: PretrainedConfig, length: int, precision: str, recompute: str, ranks: int = 1) -> Body:
    """One row of `length` tokens through the model's body, or one of `ranks` ranks' part of it."""
    layers = hf.num_hidden_layers
    shallow = max(2, getattr(hf, "num_kv_channels", 1))
    family = family_of(hf)
    # Which layers of a model share KV follows from its depth: such a one is run as it is, once.
    follows_depth = family.own_code and not family.has_passes
    if layers > shallow + EXTRA_LAYERS and not follows_depth:
        ends = []
        for depth in (shallow, shallow + EXTRA_LAYERS):
            layer_types = {} if family.own_code else {"layer_types": None}
            shallower = _variant(hf, num_hidden_layers=depth, **layer_types)
            ends.append(_body(shallower, length, precision, recompute, ranks))
        slope = (layers - shallow) / EXTRA_LAYERS
        kept, peak = (
            getattr(ends[0], name) + slope * (getattr(ends[1], name) - getattr(ends[0], name))
            for name in ("kept", "peak")
        )
        return Body(kept, peak, ends[0].pool, ends[0].entries)
    return _body(hf, length, precision, recompute, ranks)


def _body(hf: PretrainedConfig, length: int, precision: str, recompute: str, ranks: int) -> Body:
    if not family_of(hf).has_passes:
        return Body(*_measure(hf, length, precision, recompute), 0.0)
    whole = hf.schedule != "cyclic" or hf.start != "embedding" or length < 4 * hf.num_groups
    if not family_of(hf).has_pool or whole:
        pool, waiting = _pool_bytes(hf, length, precision, recompute, ranks)
        return Body(*_measure(hf, length, precision, recompute, ranks), pool, waiting)
    # The last group's pool is left out, which is a larger part of few groups: where pools are kept, use more.
    groups = 2 if "group" in recompute else 4
    short = -(-length // hf.num_groups) * groups
    shape = {"num_groups": groups, "no_grad_passes": min(1, hf.no_grad_passes)}
    one, two = (_variant(hf, grad_passes=passes, **shape) for passes in (1, 2))
    kept, _ = _measure(one, short, precision, recompute, ranks, backward=False)
    more, peak = _measure(two, short, precision, recompute, ranks)
    # Kept is so much per token and pass; the masks alone grow with the square of the length.
    ratio, w = length / short, 2 if precision != "fp32" else 4
    alive = (1, 1) if recompute == "group+layer" else (groups, hf.num_groups)  # groups whose masks are kept
    full = kept - alive[0] / groups * _mask_bytes(short, groups, w)
    full = ratio * (full + (hf.grad_passes - 1) * (more - kept))
    full += alive[1] / hf.num_groups * _mask_bytes(length, hf.num_groups, w)
    # Backward holds one group's working set and, for every token, gradients of its pool entries, its
    # embedding and its final state.
    entries = 2 * hf.num_kv_channels * hf.num_key_value_heads * hf.head_dim
    per_token = 4 * entries + (4 + storage_dtype(precision).itemsize) * hf.hidden_size
    worst = full + (peak - more) + (length - short) * per_token / ranks
    return Body(full, worst, *_pool_bytes(hf, length, precision, recompute, ranks))


def _mask_bytes(length: int, groups: int, w: int) -> float:
    """Additive masks of all groups: runs of queries, each against its prefix of the row."""
    queries = -(-length // groups)
    runs = max(1, min(MAX_RUNS_WITH_GRAD, queries // MIN_QUERIES_PER_RUN))
    return length * length * (runs + 1) / (2 * runs) * w


def _pool_bytes(
    hf: PretrainedConfig, length: int, precision: str, recompute: str, ranks: int
) -> tuple[float, float]:
    """Buffer, its gradient and the overwritten entries that wait for backward; and these entries alone."""
    w = 2 if precision != "fp32" else 4
    channels = getattr(hf, "num_kv_channels", 1)
    entries = 2 * channels * hf.num_key_value_heads * hf.head_dim * length / ranks
    passes = hf.grad_passes + min(1, hf.no_grad_passes)
    if "group" in recompute and hf.no_grad_passes <= 1 and ranks == 1 and hf.start == "embedding":
        passes -= 1  # the start's entries are made again (model/work.py)
    return entries * (w + 4 + w * passes), entries * w * passes
