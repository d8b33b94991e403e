"""The one place that chooses device and communication backend, joins the ranks, and brings numbers together.

Importing it prepares DeepSpeed's environment (deepspeed_env.py), so import it before `deepspeed`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from wm_ds.distributed import environment, noise
from wm_ds.distributed.deepspeed_env import SetupError, build_cpu_helper


@dataclass(frozen=True)
class World:
    """This process among the ranks of the run."""

    rank: int
    local_rank: int
    size: int
    device: torch.device
    backend: str

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0


def planned_size() -> int:
    """How many ranks a dry run is for: WORLD_SIZE, also where no rank is started, 1 without it.

    Raises SetupError where it is no number of ranks.
    """
    given = os.environ.get("WORLD_SIZE")
    if given is None or {"RANK", "LOCAL_RANK"} & os.environ.keys():
        return launch_size()[2]
    if not given.isdecimal() or int(given) < 1:
        raise SetupError(f"WORLD_SIZE = {given!r} is no number of ranks")
    return int(given)


def launch_size() -> tuple[int, int, int]:
    """(rank, local rank, world size) from the environment of torchrun, srun's wrapper or a plain start (0, 0,
    1).

    Raises SetupError where the variables are incomplete, not numbers, or contradict each other.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    given = {n: os.environ[n] for n in names if n in os.environ}
    if not given:
        return 0, 0, 1
    missing = [n for n in names if n not in given]
    if missing:
        raise SetupError(
            f"{', '.join(given)} set but {', '.join(missing)} missing: start with torchrun, "
            "slurm/pretrain.sbatch, or with none of them for a single rank"
        )
    try:
        rank, local, size = (int(given[n]) for n in names)
    except ValueError:
        raise SetupError(f"RANK, LOCAL_RANK and WORLD_SIZE must be integers, got {given}") from None
    if not 0 <= rank < size or not 0 <= local < size:
        raise SetupError(f"RANK {rank} and LOCAL_RANK {local} must lie in 0..WORLD_SIZE-1 = {size - 1}")
    return rank, local, size


def pick_device(local_rank: int) -> tuple[torch.device, str]:
    """(device, backend) for this process: its own GPU and NCCL, or the CPU and gloo.

    Raises SetupError where there are fewer GPUs than local ranks.
    """
    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise SetupError(
            f"LOCAL_RANK {local_rank} has no GPU: this process sees {count} "
            f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}); "
            "start one rank per visible GPU"
        )
    return torch.device("cuda", local_rank), "nccl"


def init(timeout_minutes: float = 30.0) -> World:
    """Join the run's process group (through DeepSpeed) and return this process's place in it.

    `timeout_minutes` bounds the rendezvous and every later collective. Raises SetupError where the launch
    environment is wrong, no C++ compiler is there for the CPU helper, or the master cannot be reached.
    """
    rank, local, size = launch_size()
    device, backend = pick_device(local)
    if "RANK" not in os.environ:  # a plain start meets nobody, whatever an earlier program left in the shell
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    elif size == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise SetupError(
                f"{name} is not set for WORLD_SIZE {size}: start with torchrun or slurm/pretrain.sbatch"
            )
    environment.whole("MASTER_PORT", 0, least=1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(size))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif size > 1 and "OMP_NUM_THREADS" not in os.environ:
        # Ranks of one machine that each take every core slow each other down by far more than the cores they
        # win.
        local_size = environment.whole("LOCAL_WORLD_SIZE", size, least=1)
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    noise.silence()
    if device.type == "cpu":
        build_cpu_helper()
    import deepspeed

    try:
        with noise.without_known_lines():
            deepspeed.init_distributed(
                dist_backend=backend,
                auto_mpi_discovery=False,
                verbose=False,
                timeout=datetime.timedelta(minutes=timeout_minutes),
                rank=rank,
                world_size=size,
            )
    except (torch.distributed.DistNetworkError, torch.distributed.DistStoreError) as error:
        raise SetupError(
            f"rank {rank} of {size} could not meet the others at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} within {timeout_minutes:g} minutes: {str(error).splitlines()[0]}"
        ) from None
    return World(rank, local, size, device, backend)


def free_port() -> int:
    """A TCP port that is free on this machine now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def barrier() -> None:
    """Wait for every rank."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def shutdown() -> None:
    """Leave the process group, if any."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def broadcast(value: Any) -> Any:
    """Rank 0's `value` (anything that pickles) on every rank."""
    if not torch.distributed.is_initialized():
        return value
    cell = [value]
    torch.distributed.broadcast_object_list(cell, src=0)
    return cell[0]


def make_deterministic() -> None:
    """Deterministic kernels only, for the rest of the process; an operation that has none raises."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Which also writes NaN into every new tensor, DeepSpeed's buckets of gigabytes among them, at every step.
    # That helps to find reads of memory that nobody wrote; results do not depend on it.
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False


def all_reduce_sum(values: list[float], device: torch.device) -> list[float]:
    """Elementwise sum over the ranks, in float64 (one collective)."""
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(packed)
    return packed.tolist()


def all_reduce_max(values: list[float], device: torch.device) -> list[float]:
    """Elementwise maximum over the ranks, in float64 (one collective)."""
    packed = torch.tensor(values, dtype=torch.float64, device=device)
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(packed, op=torch.distributed.ReduceOp.MAX)
    return packed.tolist()


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: allocated on its GPU, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Clock:
    """Seconds of this rank by part of the step. On CUDA by events, so that measuring does not wait."""

    def __init__(
        self, device: torch.device, name: Callable[[str], AbstractContextManager] = contextlib.nullcontext
    ) -> None:
        """`name`: what a part runs in, besides; for a profiler."""
        self._cuda, self._name = device.type == "cuda", name
        self._marks: list[tuple[str, Any, Any]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Time what runs inside as `part`."""
        start = self._now()
        with self._name(part):
            yield
        self._marks.append((part, start, self._now()))

    def seconds(self) -> dict[str, float]:
        """Total per part; waits for the device once."""
        if self._cuda:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for part, start, end in self._marks:
            spent = start.elapsed_time(end) / 1e3 if self._cuda else end - start
            total[part] = total.get(part, 0.0) + spent
        return total


# Dense bf16 tensor peak of one device in FLOP/s, from the vendors' data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "V100": 125e12}


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s, None where it is not known (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_FLOPS.items() if key in name), None)
