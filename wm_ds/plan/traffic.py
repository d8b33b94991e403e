"""What each GPU sends over the network in a step, in bytes: arithmetic.

Rings send (N-1)/N of what is moved over N GPUs.
"""

from __future__ import annotations

from transformers.configuration_utils import PretrainedConfig

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
        tokens = way.micro_batch * way.accumulation * run.length
        sent["shared rows"] = sequence_bytes(
            run.hf, tokens, wide, run.config.sequence_parallel, way.recompute
        )
    return sent


def gathers(way: Way) -> int:
    """How often stage 3 gathers the weights for a micro-batch."""
    if way.gather != "traversal":
        return 1
    if not way.run.multi_pass:
        return 2
    hf = way.run.hf
    passes, groups = hf.no_grad_passes + hf.grad_passes, hf.num_groups
    forward, again = passes * groups, hf.grad_passes * groups
    return forward + again * (2 + (way.recompute == "group+layer"))


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
