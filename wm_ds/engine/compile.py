"""`compile: true`: the parts of a model that torch.compile serves well.

What every step does alike is compiled; attention and the passes around it stay eager.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from wm_ds.model.blocks import WhiteMatterDecoderLayer


def compile_blocks(lm: PreTrainedModel, backend: str = "inductor") -> None:
    """Compile what every step does alike, at its first use: a layer before and after attention, and the pool.

    Attention's sizes change from group to group, and the passes are custom backward functions: both stay as
    they are, and so do the single channels of a layerwise start's sweep, each of other states. Qwen3's layers
    are compiled whole.
    """
    for layer in lm.model.layers:
        if isinstance(layer, WhiteMatterDecoderLayer):
            for part in ("before", "after"):
                compiled = torch.compile(getattr(layer, part), dynamic=True, backend=backend)
                setattr(layer, part, compiled)
        else:
            layer.compile(dynamic=True, backend=backend)
    pool = getattr(lm.model, "pool", None)
    if pool is not None and lm.model.recompute != "group+layer":  # which takes the pool in pieces
        pool.compile(dynamic=True, backend=backend)


def compile_seconds() -> float:
    """What compilation has taken so far in this process."""
    from torch._dynamo.utils import compilation_time_metrics  # takes seconds to import

    return sum(compilation_time_metrics.get("_compile.compile_inner", ()))
