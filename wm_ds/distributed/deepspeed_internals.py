"""What this project touches of DeepSpeed beyond its public interface: here and nowhere else.

ZeRO hides where it keeps masters, gradients and pieces of parameters. Checkpoints, the optimizer and the
clip rules need them, so this file says how they are found in the pinned version. NAMES lists what is relied
on, and a test looks each up in DeepSpeed's sources: after an upgrade it fails by the name that is gone. What
is there and means something else is found by the tests of several ranks and by checkpoint/layout_proof.py.

`engine` is always the DeepSpeed engine, `parameter` one of its module's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# file of DeepSpeed: names in it that are relied on here
NAMES: dict[str, tuple[str, ...]] = {
    "runtime/engine.py": (
        "basic_optimizer",
        "zero_optimization_stage",
        "allreduce_gradients",
        "no_sync",
        "dp_world_size",
        "set_train_micro_batch_size",
        "set_train_batch_size",
        "micro_steps",
    ),
    "runtime/fp16/unfused_optimizer.py": ("fp16_groups", "fp32_groups"),
    "runtime/zero/stage_1_and_2.py": (
        "bit16_groups",
        "single_partition_of_fp32_groups",
        "averaged_gradients",
        "cpu_offload",
        "update_lp_params",
        "gradient_accumulation_steps",
    ),
    "utils/tensor_fragment.py": ("_hp_mapping", "lp_fragment_address", "hp_fragment_address"),
    "runtime/zero/stage3.py": (
        "sub_group_to_group_id",
        "fp16_groups",
        "fp32_partitioned_groups_flat",
        "averaged_gradients",
        "offload_optimizer",
        "swap_optimizer",
        "params_in_nvme_and_cpu",
        "parameter_offload",
        "checkpoint_event_prologue",
        "_reassign_or_swap_out_partitioned_parameters",
        "invalidate_secondary_tensor",
    ),
    "runtime/zero/partition_parameters.py": (
        "_convert_to_zero_parameters",
        "ds_tensor",
        "ds_shape",
        "ds_numel",
        "ds_status",
        "ds_zero_partition_rank",
        "partition_numel",
    ),
    "runtime/zero/parameter_offload.py": ("get_param_coordinator",),
    "runtime/zero/partitioned_param_coordinator.py": (
        "__trace_mode",
        "__submodule_order",
        "__param_order",
        "reset_step",
        "_clean_inflight_param_registry",
    ),
    "utils/groups.py": ("_get_zero_param_intra_parallel_group",),
    "sequence/layer.py": ("register_all_to_all_group", "_dim_zero_all_to_all"),
}


# -- the batch


def set_batch(engine: Any, micro_batch: int, accumulation: int) -> None:
    """Sequences of a micro-batch, and micro-batches of a step, from the next step on."""
    ranks = engine.dp_world_size
    engine.set_train_micro_batch_size(micro_batch)
    engine.set_train_batch_size(micro_batch * accumulation * ranks)
    engine.micro_steps = 0  # of which a step's end is told by division
    if hasattr(engine.optimizer, "gradient_accumulation_steps"):
        engine.optimizer.gradient_accumulation_steps = accumulation


# -- the optimizer and its masters


def base_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The optimizer that we handed to DeepSpeed, whatever it was wrapped in."""
    return engine.basic_optimizer


def master_groups(engine: Any) -> list[tuple[Tensor, int, list[nn.Parameter]]]:
    """(fp32 master, index of its parameter group, parameters of which some rank holds a piece in it).

    In the order in which a step updates them, the same on every rank; nothing is communicated.
    """
    wrapper, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        groups = wrapper.sub_group_to_group_id
        pairs = zip(wrapper.fp16_groups, wrapper.fp32_partitioned_groups_flat)
        return [(master, groups[i], list(parameters)) for i, (parameters, master) in enumerate(pairs)]
    if stage in (1, 2):
        pairs = zip(wrapper.bit16_groups, wrapper.single_partition_of_fp32_groups)
        return [(master, i, list(parameters)) for i, (parameters, master) in enumerate(pairs)]
    if hasattr(wrapper, "fp32_groups"):  # stage 0 in bf16: an fp32 copy of each parameter
        copies = list(zip(wrapper.fp16_groups, wrapper.fp32_groups))
    else:
        copies = [(group["params"], group["params"]) for group in wrapper.param_groups]
    return [
        (master, i, [parameter])
        for i, (parameters, masters) in enumerate(copies)
        for parameter, master in zip(parameters, masters)
    ]


def linked_range(parameter: nn.Parameter) -> tuple[int, int, int] | None:
    """Stages 1 and 2: (start, length, offset in the master) of this rank's part; None where it has none."""
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None:
        return None
    held = mapping.lp_fragment_address
    return held.start, held.numel, mapping.hp_fragment_address.start


def reduced_gradients(engine: Any) -> list[Tensor]:
    """This rank's parts of the reduced gradient, after backward; at stage 0 all of it."""
    wrapper = engine.optimizer
    if engine.zero_optimization_stage() == 0:
        return [p.grad for p in engine.module.parameters() if p.grad is not None]
    if getattr(wrapper, "cpu_offload", False) or getattr(wrapper, "offload_optimizer", False):
        return [master.grad for master, _, _ in master_groups(engine) if master.grad is not None]
    return [g for part in wrapper.averaged_gradients.values() if part is not None for g in part]


def keeps_state_on_nvme(engine: Any) -> bool:
    """Whether masters or optimizer state lie in files of their own."""
    return any(getattr(engine.optimizer, key, False) for key in ("swap_optimizer", "params_in_nvme_and_cpu"))


def refresh_weights(engine: Any) -> None:
    """Bring the weights that the model computes with in line with the masters. A collective."""
    wrapper, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        for i in range(len(wrapper.fp16_groups)):
            wrapper._reassign_or_swap_out_partitioned_parameters(i)
        # Nothing is gathered, persistent parameters neither: as in a fresh engine, the first step must
        # find them missing, because that is how DeepSpeed learns which module uses which parameter.
        wrapper.invalidate_secondary_tensor()
    elif stage in (1, 2):
        wrapper.update_lp_params()
    elif wrapper is not base_optimizer(engine):  # bf16 at stage 0: masters are copies
        for low, masters in zip(wrapper.fp16_groups, wrapper.fp32_groups):
            for parameter, fp32 in zip(low, masters):
                parameter.data.copy_(fp32.data)


# -- stage 3's cut parameters


def shape_of(parameter: nn.Parameter) -> tuple[int, ...]:
    """The whole parameter's shape, also where it is cut."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_cut(parameter: nn.Parameter) -> bool:
    """Whether this rank keeps a piece of it only."""
    return hasattr(parameter, "ds_tensor")


def piece(parameter: nn.Parameter) -> Tensor:
    """This rank's piece of a cut parameter, flat; the last one is padded."""
    return parameter.ds_tensor.detach().view(-1)  # type: ignore[attr-defined]


def cut_range(parameter: nn.Parameter) -> tuple[int, int, int]:
    """(start, stop, length of a piece, padding included) of this rank's piece of a cut parameter."""
    length = parameter.partition_numel()  # type: ignore[attr-defined]
    start = min(length * parameter.ds_zero_partition_rank, parameter.ds_numel)  # type: ignore[attr-defined]
    return start, min(start + length, parameter.ds_numel), length  # type: ignore[attr-defined]


@contextlib.contextmanager
def whole(parameter: nn.Parameter) -> Iterator[None]:
    """Inside, the parameter is whole: a cut one is gathered, which is a collective."""
    if not is_cut(parameter) or parameter.ds_status.name == "AVAILABLE":  # type: ignore[attr-defined]
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        yield


def release_gathered(engine: Any) -> None:
    """Cut parameters that stage 3 holds whole are released."""
    if engine.zero_optimization_stage() == 3:
        engine.optimizer.checkpoint_event_prologue()


def cutter(full: dict[str, Any], dtype: torch.dtype) -> Any:
    """What cuts fresh parameters over the ranks, see `cut`. `full`: DeepSpeed's complete configuration."""
    import deepspeed
    from deepspeed.utils import groups

    # Given a module, Init also puts DeepSpeed's own linear in torch's place, as for whole models.
    return deepspeed.zero.Init(
        nn.Module(),
        config_dict_or_path=full,
        dtype=dtype,
        zero_param_parallel_group=groups._get_zero_param_intra_parallel_group(),  # hpZ's, if there is one
    )


def cut(init: Any, parameter: nn.Parameter) -> None:
    """Cut a parameter; this rank keeps its piece. A collective."""
    init._convert_to_zero_parameters([parameter])


# -- stage 3's traces of modules

TRACE = ("trace_mode", "submodule_order", "param_order")
_COORDINATOR = "_PartitionedParameterCoordinator__"


def coordinator(engine: Any) -> Any:
    """What gathers parameters along a recorded trace of modules."""
    return engine.optimizer.parameter_offload.get_param_coordinator()


def trace(of: Any) -> tuple[Any, ...]:
    """The coordinator's trace: mode, modules, parameters."""
    return tuple(getattr(of, _COORDINATOR + name) for name in TRACE)


def set_trace(of: Any, kept: tuple[Any, ...]) -> None:
    """Give the coordinator another trace."""
    of._clean_inflight_param_registry()
    for name, value in zip(TRACE, kept):
        setattr(of, _COORDINATOR + name, value)


# -- the all-to-all of sequence parallelism


def register_all_to_all(group: Any) -> None:
    """Make the group known to `all_to_all`."""
    from deepspeed.sequence.layer import register_all_to_all_group

    register_all_to_all_group(group)


def all_to_all(group: Any, x: Tensor) -> Tensor:
    """Exchange of x's slices along its first dimension, with gradient."""
    from deepspeed.sequence.layer import _dim_zero_all_to_all

    return _dim_zero_all_to_all(group, x)
