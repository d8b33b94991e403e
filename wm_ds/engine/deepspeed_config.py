"""What a run means for DeepSpeed and for the optimizer: the complete JSON, and the parameter table.

Nothing here builds anything, so the planner and `--dry-run` ask here, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from wm_ds.config.schema import Config
from wm_ds.distributed import deepspeed_internals
from wm_ds.engine import zero3
from wm_ds.optim.param_rules import Row, parameter_table
from wm_ds.optim.partition import parameter_names

BUCKET = 50_000_000  # numbers in a bucket at most, where the JSON does not say


def bucket_sizes(zero: dict[str, Any], parameters: int) -> tuple[int, int]:
    """Numbers in DeepSpeed's buckets of reduction and of gathering: those of the JSON (`zero`), or else such
    as suit a model of so many `parameters`. DeepSpeed's own choice is 500 million, all allocated."""
    chosen = min(BUCKET, parameters + parameters % 2)  # stages 1 and 2 refuse an odd bucket of gathering
    return zero.get("reduce_bucket_size", chosen), zero.get("allgather_bucket_size", chosen)


def sums_own_gradients(config: Config, stage: int, accumulation: int) -> bool:
    """Whether the engine itself sums the gradients of a step's micro-batches in fp32: weights are bf16, there
    are several micro-batches, and DeepSpeed would add them in bf16."""
    return config.precision == "bf16" and accumulation > 1 and (config.optim.clips_locally or stage < 2)


def deepspeed_config(
    config: Config,
    json: dict[str, Any],
    accumulation: int,
    shapes: Sequence[tuple[str, tuple[int, ...]]],
    ranks: int = 1,
) -> dict[str, Any]:
    """The complete configuration for deepspeed.initialize: the JSON plus everything that the run decides.

    `shapes`: (name, shape) of the model's parameters; sizes of buckets that the JSON lacks and stage 3's
    `"auto"` limits are derived from them and from the number of `ranks`, and are left alone without them.
    """
    zero = dict(json.get("zero_optimization", {"stage": 0}))
    stage = zero.get("stage", 0)
    sums_own = sums_own_gradients(config, stage, accumulation)
    full = {
        "steps_per_print": 1 << 60,
        **json,
        "train_micro_batch_size_per_gpu": config.batch.micro_batch,
        # Where all micro-batches are one reduction, DeepSpeed sees one micro-batch.
        "gradient_accumulation_steps": 1 if config.optim.clips_locally or sums_own else accumulation,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if stage and shapes:
        reduce, gather_size = bucket_sizes(zero, sum(math.prod(shape) for _, shape in shapes))
        zero |= {"reduce_bucket_size": reduce, "allgather_bucket_size": gather_size}
    if stage == 3 and shapes:
        gather = config.zero3.gather or zero3.default_gather(config.model.family)
        derived = zero3.limits(gather, shapes)
        derived["zero_hpz_partition_size"] = zero3.node_partition(gather, ranks)
        # Never DeepSpeed's defaults: its 1e9 parameters suit neither small models nor large ones.
        zero |= {key: value for key, value in derived.items() if zero.get(key, "auto") == "auto"}
    full["zero_optimization"] = zero
    if config.precision == "autocast":
        # The empty list: otherwise gradients of Linear layers are reduced in bf16.
        full["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    elif config.precision == "bf16":
        full["bf16"] = {"enabled": True}
        if accumulation > 1 and not sums_own:
            full["data_types"] = {**json.get("data_types", {}), "grad_accum_dtype": "fp32"}
    return full


def table_for(config: Config, lm: nn.Module) -> list[Row]:
    """The optimizer's parameter table for a model."""
    names = parameter_names(lm)
    shapes = [(names[id(p)], deepspeed_internals.shape_of(p)) for p in lm.parameters() if p.requires_grad]
    o = config.optim
    return parameter_table(
        shapes,
        optimizer=o.name,
        weight_decay=o.weight_decay,
        update_scale=o.update_scale,
        embedding_rule=o.embedding_rule,
        head_rule=o.head_rule,
    )
