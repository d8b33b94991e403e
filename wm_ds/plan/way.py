"""One way to run a configuration: what the planner's figures depend on.

P parameters, N GPUs; w: bytes of a stored weight (bf16: 2, autocast and fp32: 4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers.configuration_utils import PretrainedConfig

from wm_ds.config.schema import Config
from wm_ds.engine.deepspeed_config import bucket_sizes
from wm_ds.engine.zero3 import default_gather
from wm_ds.families import family_of
from wm_ds.optim.muon import STATE
from wm_ds.optim.param_rules import Row
from wm_ds.plan.activations import storage_dtype

VOCABULARY = 151_936  # Qwen3's, where neither the run nor its data nor a question says


@dataclass(frozen=True)
class Run:
    """What all ways to run a configuration have in common.

    Attributes:
        hf: the model's configuration.
        rows: the optimizer's table (engine.deepspeed_config.table_for).
        length: tokens of a row.
        gpus: of the whole run.
    """

    config: Config
    hf: PretrainedConfig
    rows: list[Row]
    length: int
    gpus: int

    @property
    def weight_bytes(self) -> int:
        """Of one stored weight (w)."""
        return storage_dtype(self.config.precision).itemsize

    @property
    def parameters(self) -> int:
        """Of the whole model (P)."""
        return sum(math.prod(row.shape) for row in self.rows)

    @property
    def muon_parameters(self) -> int:
        """Of the matrices that Muon updates."""
        return sum(math.prod(row.shape) for row in self.rows if row.rule == "muon")

    @property
    def optimizer_bytes(self) -> int:
        """Of the optimizer's state without master weights: the fp32 numbers that each rule keeps."""
        return sum(4 * len(STATE[row.rule]) * math.prod(row.shape) for row in self.rows)

    @property
    def own_length(self) -> int:
        """Tokens of a row that one GPU holds."""
        return self.length // self.config.sequence_parallel

    @property
    def multi_pass(self) -> bool:
        """Whether the layers run several times a step."""
        return family_of(self.hf).has_passes


@dataclass(frozen=True)
class Way:
    """One way to run.

    Attributes:
        stage: of ZeRO.
        gather: of stage 3 (`zero3.gather`); None at the others.
        offload: masters and optimizer state lie in the host's memory.
        offload_weights: the cut weights of stage 3, too.
        zero: the `zero_optimization` of DeepSpeed's JSON, for its buckets.
    """

    run: Run
    stage: int
    gather: str | None
    recompute: str
    micro_batch: int
    offload: bool = False
    offload_weights: bool = False
    zero: dict[str, Any] = field(default_factory=dict)

    @property
    def reduce_buffers(self) -> int:
        """Numbers in the buffers that gradients are reduced in: DeepSpeed allocates whole buckets, whatever
        the model's size, and a second one where stages 1 and 2 overlap the reduction with backward."""
        if not self.zero.get("contiguous_gradients", True):
            return 0
        bucket, _ = bucket_sizes(self.zero, self.run.parameters)
        return bucket * (2 if self.stage < 3 and self.zero.get("overlap_comm") else 1)

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        config = self.run.config
        return config.batch.global_batch // (config.data_ranks(self.run.gpus) * self.micro_batch)

    @property
    def share(self) -> float:
        """What one GPU holds of a tensor that is cut over all."""
        return 1 / self.run.gpus


def recompute_policies(hf: PretrainedConfig) -> tuple[str, ...]:
    """What a model's backward can recompute, cheapest first."""
    return ("none", "layer", "group", "group+layer") if family_of(hf).has_passes else ("none", "layer")


def ways(run: Run, recompute: str) -> Iterator[Way]:
    """Every sensible way to run under a recompute policy, with the buckets of our DeepSpeed files."""
    per_gpu = run.config.batch.global_batch // run.config.data_ranks(run.gpus)
    micro_batches = [2**i for i in range(12) if per_gpu % 2**i == 0 and 2**i <= per_gpu]
    for stage in (0, 1, 2, 3):
        zero = {"stage": stage, "overlap_comm": stage >= 2}
        gathers: tuple[str | None, ...] = (None,)
        if stage == 3 and run.multi_pass:
            gathers = ("step", "traversal") if "layer" in recompute else ("step",)
        elif stage == 3:
            gathers = (default_gather("vanilla"),)
        for gather in gathers:
            for offload in (False, True) if stage >= 2 else (False,):
                for micro in micro_batches:
                    weights = offload and stage == 3
                    yield Way(run, stage, gather, recompute, micro, offload, weights, zero)


def configured_way(run: Run, json: dict[str, Any]) -> Way:
    """The way that the configuration and its DeepSpeed file (`json`) say."""
    config, zero = run.config, json.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    gather = (config.zero3.gather or default_gather(config.model.family)) if stage == 3 else None
    return Way(
        run,
        stage,
        gather,
        config.recompute,
        config.batch.micro_batch,
        offload=zero.get("offload_optimizer", {}).get("device") == "cpu",
        offload_weights=zero.get("offload_param", {}).get("device") == "cpu",
        zero=zero,
    )
