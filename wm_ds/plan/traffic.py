"""What each GPU sends over the network in a step, in bytes: arithmetic.

Rings send (N-1)/N of what is moved over N GPUs.
"""

from __future__ import annotations

from transformers.configuration_utils import PretrainedConfig

from wm_ds.model.work import pass_counts
from wm_ds.plan.way import Way


def traffic(way: Way) -> dict[str, float]:
    """Bytes that each GPU sends in a step, by purpose."""
    run, stage = way.run, way.stage
    sent: dict[str, float] = {}
    if run.gpus > 1:
        weights = run.weight_bytes * run.parameters * ((run.gpus - 1) / run.gpus)
        sent["gradients"] = weights * (2 if stage == 0 else 1)
        if stage >= 2 and not run.config.optim.clips_locally:  # which clips, and reduces, once a step
            sent["gradients"] *= way.accumulation
        if stage in (1, 2):
            sent["updated weights"] = weights
        if stage == 3:
            sent["gathered weights"] = weights * gathers(way) * way.accumulation
            if run.muon_parameters:
                sent["Muon's matrices"] = 2 * 4 * run.muon_parameters / run.gpus  # all, there and back
    if run.config.sequence_parallel > 1:
        wide = 4 if run.config.precision == "fp32" else 2
        rows = way.micro_batch * way.accumulation
        sent["shared rows"] = sequence_bytes(
            run.hf, rows, run.length, wide, run.config.sequence_parallel, way.recompute
        )
    return sent


def gathers(way: Way) -> int:
    """How often stage 3 gathers the weights for a micro-batch."""
    if way.gather != "traversal":
        return 1
    if not way.run.multi_pass:
        return 2
    counts = pass_counts(way.run.hf.training_schedule(), way.run.length)
    return counts.steps + counts.steps_with_gradient * (2 + (way.recompute == "group+layer"))


def sequence_bytes(
    hf: PretrainedConfig, rows: int, length: int, wide: int, ranks: int, recompute: str
) -> float:
    """Bytes that one of `ranks` ranks sends in the all-to-alls of a step over shared rows of `length` tokens.

    `wide`: bytes of a number that travels, in the dtype of products. A layer sends its queries and outputs at
    every traversal and in backward; new pool entries go once for every token and pass, and their gradients
    back; in a layerwise start's sweep each layer's channel goes, too.
    """
    counts = pass_counts(hf.training_schedule(), length, recompute=recompute, shared=True)
    parts = (counts.forward, counts.backward, counts.repeated)
    traversals = sum(part.layers(hf.num_hidden_layers) for part in parts)
    writes = counts.forward.pools + counts.backward.pools
    queries = 2 * hf.num_attention_heads * hf.head_dim
    channel = 2 * hf.num_key_value_heads * hf.head_dim
    sweeps = counts.forward.sweeps + counts.backward.sweeps * (2 if "group" in recompute else 1)
    entries = channel * (hf.num_kv_channels * writes + (hf.num_hidden_layers - 1) * sweeps)
    numbers = queries * traversals + entries
    return rows * length / ranks * (ranks - 1) / ranks * wide * numbers
