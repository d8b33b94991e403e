"""DeepSpeed's JSON: which keys a run may set, their types and ranges, and why each other one is refused.

DeepSpeed has some two hundred keys. Optimizer, clipping and checkpoints here rely on how it lays out masters
and gradients, which some of these keys change without a word. So the file is a list of what is allowed, not
of what is forbidden: every key in ALLOWED is tested to leave a run of several ranks exactly as it is without
it (tests/engine/test_deepspeed_json.py), and everything else is refused by name.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wm_ds.config.schema import ConfigError
from wm_ds.config.text import nearest, read_text

REPOSITORY = Path(__file__).resolve().parents[2]
LARGEST = 1 << 62  # of any number; DeepSpeed's own "no limit" is 2^63 - 1


@dataclass(frozen=True)
class Whole:
    """A whole number of at least `least`; `auto`: wm_ds fills in "auto", from the model."""

    least: int = 1
    auto: bool = False

    @property
    def meaning(self) -> str:
        """What a value must be, in words."""
        return f"a whole number from {self.least} on" + (' or "auto"' if self.auto else "")

    def read(self, value: Any) -> Any:
        """`value` as DeepSpeed should get it: 5e8 is 500000000. Raises ValueError."""
        if self.auto and value == "auto":
            return value
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
            raise ValueError
        if not self.least <= value <= LARGEST:
            raise ValueError
        return int(value)


@dataclass(frozen=True)
class Bool:
    """true or false."""

    meaning = "true or false"

    def read(self, value: Any) -> Any:
        """`value` itself. Raises ValueError where it is another kind."""
        if not isinstance(value, bool):
            raise ValueError
        return value


@dataclass(frozen=True)
class OneOf:
    """One of a few values."""

    values: tuple[Any, ...]

    @property
    def meaning(self) -> str:
        """What a value must be, in words."""
        *first, last = (json.dumps(v) for v in self.values)
        return f"{', '.join(first)} or {last}"

    def read(self, value: Any) -> Any:
        """`value` itself. Raises ValueError where it is none of them."""
        # 2.0 and true equal 2 and 1 in Python.
        if not any(type(v) is type(value) and v == value for v in self.values):
            raise ValueError
        return value


@dataclass(frozen=True)
class Names:
    """A list of names."""

    meaning = 'a list of names such as ["all_reduce"]'

    def read(self, value: Any) -> Any:
        """`value` itself. Raises ValueError where it is another kind."""
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ValueError
        return value


Kind = Whole | Bool | OneOf | Names

_OFFLOAD: dict[str, Any] = {"device": OneOf(("cpu", "none")), "pin_memory": Bool()}

ALLOWED: dict[str, Any] = {
    "zero_optimization": {
        "stage": OneOf((0, 1, 2, 3)),
        "contiguous_gradients": Bool(),
        "overlap_comm": Bool(),
        "reduce_scatter": Bool(),
        "reduce_bucket_size": Whole(),
        "allgather_bucket_size": Whole(),
        "use_multi_rank_bucket_allreduce": Bool(),
        "sub_group_size": Whole(),
        "offload_optimizer": _OFFLOAD,
        "offload_param": _OFFLOAD,
        "stage3_prefetch_bucket_size": Whole(0, auto=True),
        "stage3_max_live_parameters": Whole(0, auto=True),
        "stage3_max_reuse_distance": Whole(0, auto=True),
        "stage3_param_persistence_threshold": Whole(0),
        "stage3_model_persistence_threshold": Whole(0),
        "zero_hpz_partition_size": Whole(1, auto=True),
    },
    # What follows only prints.
    "steps_per_print": Whole(),
    "wall_clock_breakdown": Bool(),
    "memory_breakdown": Bool(),
    "dump_state": Bool(),
    "comms_logger": {
        "enabled": Bool(),
        "verbose": Bool(),
        "prof_all": Bool(),
        "prof_ops": Names(),
        "debug": Bool(),
    },
}

# At which stages DeepSpeed reads a key of zero_optimization (stage 0 partitions nothing and has no buckets of
# its own). Elsewhere it would accept the key and do nothing with it.
STAGES: dict[str, tuple[int, ...]] = {
    "stage": (0, 1, 2, 3),
    "contiguous_gradients": (1, 2, 3),
    "overlap_comm": (1, 2, 3),
    "reduce_scatter": (1, 2, 3),
    "reduce_bucket_size": (1, 2, 3),
    "allgather_bucket_size": (1, 2),
    "use_multi_rank_bucket_allreduce": (1, 2),
    "sub_group_size": (3,),
    "offload_optimizer": (1, 2, 3),
    "offload_param": (3,),
    "stage3_prefetch_bucket_size": (3,),
    "stage3_max_live_parameters": (3,),
    "stage3_max_reuse_distance": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_model_persistence_threshold": (3,),
    "zero_hpz_partition_size": (3,),
}

# What the run decides, and where it says so.
RUN_DECIDES = {
    "train_batch_size": "batch.global_batch",
    "train_micro_batch_size_per_gpu": "batch.micro_batch",
    "gradient_accumulation_steps": "batch (derived)",
    "optimizer": "optim",
    "scheduler": "optim.schedule",
    "gradient_clipping": "optim.clip and optim.clip_rule",
    "fp16": "precision",
    "bf16": "precision",
    "torch_autocast": "precision",
    "amp": "precision",
    "data_types": "precision",
    "communication_data_type": "precision",
    "activation_checkpointing": "recompute",
    "compile": "compile",
    "tensorboard": "log.tensorboard",
    "wandb": "log.wandb",
    "csv_monitor": "log",
}

_LAYOUT = "it moves parts of the weights to where optimizer and checkpoints here do not look for them"
_ARITHMETIC = "it changes the arithmetic of gradients or weights"
_NVME = "it belongs to offload to NVMe, which checkpoints here cannot read"
_CHECKPOINTS = "it belongs to DeepSpeed's own checkpoints; wm_ds writes its own"
_OLD = "it is an old spelling"

# Keys of DeepSpeed 0.19.8 that are refused, with the reason where there is one beside "not tested".
REFUSED: dict[str, str | None] = {
    "prescale_gradients": _ARITHMETIC,
    "gradient_predivide_factor": _ARITHMETIC,
    "gradient_allreduce_op": _ARITHMETIC,
    "sparse_gradients": _ARITHMETIC,
    "managed_gradient_accumulation": _ARITHMETIC,
    "compression_training": _ARITHMETIC,
    "disable_allgather": None,
    "flops_profiler": "tools/count_flops.py counts the operations",
    "aio": _NVME,
    "disable_python_gc": None,
    "graph_harvesting": None,
    "use_data_before_expert_parallelism": None,
    "log_level": "set DS_LOG_LEVEL in the environment instead",
    "zero_allow_untested_optimizer": "wm_ds sets it",
    "zero_force_ds_cpu_optimizer": "wm_ds sets it",
    "checkpoint": _CHECKPOINTS,
    "dataloader_drop_last": "wm_ds reads the data",
    "data_efficiency": "wm_ds reads the data",
    "curriculum_learning": "wm_ds reads the data",
    "pipeline": None,
    "hybrid_engine": None,
    "tensor_parallel": None,
    "expert_parallel": None,
    "elasticity": "a run of wm_ds resumes on any number of ranks without it",
    "autotuning": "tools/plan_memory.py plans a run",
    "timers": None,
    "vocabulary_size": None,
    "sequence_parallel_size": "set sequence_parallel in the run",
    "zero_optimization.round_robin_gradients": _LAYOUT,
    "zero_optimization.parameter_alignment": _LAYOUT,
    "zero_optimization.legacy_stage1": _LAYOUT,
    "zero_optimization.allgather_partitions": "DeepSpeed reads it and does nothing with it",
    "zero_optimization.leaf_module": None,
    "zero_optimization.zenflow": _ARITHMETIC,
    "zero_optimization.compute_grad_norm": None,
    "zero_optimization.load_from_fp32_weights": _CHECKPOINTS,
    "zero_optimization.elastic_checkpoint": _CHECKPOINTS,
    "zero_optimization.pipeline_loading_checkpoint": _CHECKPOINTS,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": _CHECKPOINTS,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": _CHECKPOINTS,
    "zero_optimization.cpu_offload": f"{_OLD} of offload_optimizer",
    "zero_optimization.cpu_offload_param": f"{_OLD} of offload_param",
    "zero_optimization.cpu_offload_use_pin_memory": f"{_OLD} of pin_memory",
    "zero_optimization.stage3_module_granularity_threshold": None,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": None,
    "zero_optimization.stage3_allgather_sequential": None,
    "zero_optimization.ignore_unused_parameters": None,
    "zero_optimization.zero_quantized_weights": _ARITHMETIC,
    "zero_optimization.zero_quantized_nontrainable_weights": _ARITHMETIC,
    "zero_optimization.zero_quantized_gradients": _ARITHMETIC,
    "zero_optimization.memory_efficient_linear": None,
    "zero_optimization.override_module_apply": None,
    "zero_optimization.log_trace_cache_warnings": None,
    "zero_optimization.enable_sanity_checks": None,
    "zero_optimization.save_muon_momentum_buffer_in_memory": _NVME,
    "zero_optimization.offload_optimizer.nvme_path": _NVME,
    "zero_optimization.offload_optimizer.buffer_count": _NVME,
    "zero_optimization.offload_optimizer.pipeline_read": _NVME,
    "zero_optimization.offload_optimizer.pipeline_write": _NVME,
    "zero_optimization.offload_optimizer.fast_init": _NVME,
    "zero_optimization.offload_optimizer.ratio": _LAYOUT,
    "zero_optimization.offload_optimizer.super_offload": _LAYOUT,
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": None,
    "zero_optimization.offload_param.nvme_path": _NVME,
    "zero_optimization.offload_param.buffer_count": _NVME,
    "zero_optimization.offload_param.buffer_size": _NVME,
    "zero_optimization.offload_param.max_in_cpu": _NVME,
}


def load_deepspeed(path: str | Path) -> dict[str, Any]:
    """DeepSpeed's JSON, checked, whole numbers as integers. Raises ConfigError naming file and key."""
    try:
        text = read_text(find(path))
    except ConfigError as error:
        raise ConfigError(f"deepspeed = {error}") from None
    try:
        raw = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON at line {error.lineno}: {error.msg}") from None
    except (_Twice, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: must hold a JSON object, holds {_kind_of(raw)}")
    try:
        checked = _checked(raw, ALLOWED, "")
        _check_stage(checked.get("zero_optimization", {}))
        _check_switches(checked)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return checked


def find(path: str | Path) -> Path:
    """The file of that name: of a relative one the file in the working directory, else the repository's own.

    So the default, and what configs/ name, are found from wherever a run is started.
    """
    path = Path(path)
    own = REPOSITORY / path
    return path if path.exists() or not own.exists() else own


class _Twice(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(f"key {key!r} appears twice in one object")
        found[key] = value
    return found


def _checked(given: dict[str, Any], allowed: dict[str, Any], prefix: str) -> dict[str, Any]:
    found = {}
    for key, value in given.items():
        where = f"{prefix}{key}"
        kind = allowed.get(key)
        if kind is None:
            raise ConfigError(_refusal(key, where, allowed, prefix))
        if isinstance(kind, dict):
            if not isinstance(value, dict):
                raise ConfigError(f'{where} must be an object ({{"key": value}}), got {_kind_of(value)}')
            found[key] = _checked(value, kind, f"{where}.")
            continue
        try:
            found[key] = kind.read(value)
        except (ValueError, TypeError, OverflowError):
            raise ConfigError(f"{where} = {_short(value)} must be {kind.meaning}") from None
    return found


def _refusal(key: str, where: str, allowed: dict[str, Any], prefix: str) -> str:
    if where in RUN_DECIDES:
        return f"{where} is decided by the run: remove it and set {RUN_DECIDES[where]}"
    if where in REFUSED:
        reason = REFUSED[where]
        return f"{where} is not tested to keep a run exact{f' ({reason})' if reason else ''}; remove it"
    refused = [k.removeprefix(prefix) for k in (*RUN_DECIDES, *REFUSED) if k.startswith(prefix)]
    names = [*allowed, *(k for k in refused if "." not in k)]
    return f"unknown {'' if prefix else 'top-level '}key {where!r}{nearest(key, names, prefix, allowed)}"


def _check_stage(zero: dict[str, Any]) -> None:
    """Raise ConfigError for a key that the stage does not read. Offload to "none" is allowed at any."""
    stage = zero.get("stage", 0)
    for key, value in zero.items():
        off = isinstance(value, dict) and value.get("device", "none") == "none"
        if stage not in STAGES[key] and not off:
            shown = f"{key} to cpu" if isinstance(value, dict) else f"zero_optimization.{key}"
            stages = " or ".join(", ".join(map(str, STAGES[key])).rsplit(", ", 1))
            raise ConfigError(
                f"{shown} needs stage {stages} and would do nothing at stage {stage}: remove it, or choose "
                "such a stage"
            )
    if zero.get("reduce_scatter") is False and "use_multi_rank_bucket_allreduce" in zero:
        raise ConfigError(
            "zero_optimization.use_multi_rank_bucket_allreduce would do nothing with reduce_scatter = false: "
            "remove it"
        )
    bucket = zero.get("allgather_bucket_size", 2)
    if bucket % 2:
        raise ConfigError(f"zero_optimization.allgather_bucket_size = {bucket} must be even at stage {stage}")


def _check_switches(checked: dict[str, Any]) -> None:
    """Raise ConfigError for a section that does nothing because its switch was left out."""
    zero = checked.get("zero_optimization", {})
    sections = {f"zero_optimization.{key}": value for key, value in zero.items() if isinstance(value, dict)}
    switches = dict.fromkeys(sections, ("device", '"cpu"'))
    if "comms_logger" in checked:
        sections["comms_logger"], switches["comms_logger"] = checked["comms_logger"], ("enabled", "true")
    for name, section in sections.items():
        key, on = switches[name]
        if key not in section:
            raise ConfigError(f'{name} does nothing without "{key}": add "{key}": {on}, or remove {name}')


def _kind_of(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return f"{kinds.get(type(value), 'a number')}: {_short(value)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
