"""The one place that chooses device, communication backend and DeepSpeed's build folder.

Import this module before anything that imports `deepspeed`: DeepSpeed reads its environment at import.

On a machine without CUDA, DeepSpeed compiles one small C++ helper (`deepspeed_shm_comm`, about a minute) when
the first process group starts. We build it ourselves beforehand, in one fixed folder per installation of
DeepSpeed and under a file lock that the kernel releases when its owner dies, so that a killed build can
neither be waited for forever (DeepSpeed's own `lock` file stays behind) nor be entered by two ranks at once.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def cache_folder() -> Path:
    """XDG_CACHE_HOME, else ~/.cache; where no home can be written, this user's own folder in TMPDIR.

    A job may run under a user id without a passwd entry, without HOME, or with a home that its node cannot
    write: containers and some sites do all three.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given)
    try:
        cache = Path.home() / ".cache"
    except RuntimeError:  # no HOME and no passwd entry
        return own_temporary_folder()
    nearest = next(folder for folder in (cache, *cache.parents) if folder.exists())
    usable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return cache if usable else own_temporary_folder()


def own_temporary_folder() -> Path:
    """A folder of this user id alone under TMPDIR or /tmp; not made here."""
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"wm_ds-{os.getuid()}"


def extensions_folder() -> Path:
    """Where DeepSpeed's C++ helpers are built for this Python, this torch and this installation of DeepSpeed.

    The build names source files by their paths, so installations that shared a folder would rebuild each
    other's helpers in turns, under the feet of running jobs.
    """
    found = importlib.util.find_spec("deepspeed")
    where = hashlib.sha256(str(found and found.origin).encode()).hexdigest()[:8]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return cache_folder() / "wm_ds" / f"extensions-torch{torch.__version__}-{python}-{where}"


if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_folder()))
os.environ.setdefault("DS_LOG_LEVEL", "warning")


class SetupError(RuntimeError):
    """The machine or the launch cannot run this; the message says what to change."""


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
        return self.rank == 0


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
    if size == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise SetupError(
                f"{name} is not set for WORLD_SIZE {size}: start with torchrun or slurm/pretrain.sbatch"
            )
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(local), WORLD_SIZE=str(size))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif size > 1 and "OMP_NUM_THREADS" not in os.environ:
        # Ranks of one machine that each take every core slow each other down by far more than the cores they
        # win.
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    quiet_deepspeed()
    if device.type == "cpu":
        build_cpu_helper()
    import deepspeed

    try:
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


def quiet_deepspeed() -> None:
    """Keep DeepSpeed's own log at warnings and above."""
    import logging

    from deepspeed.utils import logger

    logger.setLevel(getattr(logging, os.environ["DS_LOG_LEVEL"].upper(), logging.WARNING))


def build_cpu_helper() -> None:
    """Compile and load DeepSpeed's CPU communication helper, once per machine; later calls load it.

    A helper is loaded only when it is, byte for byte, one that was compiled to the end and loaded then: a
    truncated library (a disk that filled up, a copy that was cut off) would end the process by a bus error
    and without a word. Any other is compiled again.

    Raises SetupError where it has to be compiled and there is no C++ compiler, no room or no folder to write.
    """
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"])
    # Ninja comes with the environment that runs this process, which need not be activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    try:
        _claim_folder(folder)
        with _exclusive(folder), _quiet_stdout():
            for leftover in folder.rglob("lock"):
                leftover.unlink(missing_ok=True)  # nobody else builds in here now: it is of a killed build
            if not _sound(folder / HELPER):
                _prepare_build(folder / HELPER)
            ShareMemCommBuilder().load(verbose=False)
            _stamp(folder / HELPER)
    except (OSError, RuntimeError, ImportError) as error:
        if isinstance(error, SetupError):
            raise
        raise SetupError(
            f"DeepSpeed's CPU helper could not be compiled and loaded in {folder}: {_build_problem(error)}; "
            "make room there (10 MB), or set TORCH_EXTENSIONS_DIR to a folder that you can write"
        ) from None


HELPER = "deepspeed_shm_comm"  # DeepSpeed's name of the helper, of its folder and of its library
STAMP = "wm_ds.sha256"  # checksum of the library, written when it has been loaded


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _sound(built: Path) -> bool:
    library, stamp = built / f"{HELPER}.so", built / STAMP
    return library.is_file() and stamp.is_file() and stamp.read_text().strip() == _checksum(library)


def _stamp(built: Path) -> None:
    library = built / f"{HELPER}.so"
    if library.is_file() and not _sound(built):
        part = built / f".{STAMP}"
        part.write_text(_checksum(library) + "\n")
        part.replace(built / STAMP)


def _prepare_build(built: Path) -> None:
    """Look for the compiler, and empty the folder: object files of half a build may be cut off, too."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise SetupError(
            f"no C++ compiler: DeepSpeed on CPU compiles a small helper and {compiler!r} is not on PATH; "
            "install one (Debian/Ubuntu: apt install g++) or set CXX"
        )
    if built.exists():
        shutil.rmtree(built)
    if sys.stderr.isatty() or built.is_relative_to(own_temporary_folder()):
        where = f" in {built.parent}" if built.is_relative_to(own_temporary_folder()) else ""
        print(f"compiling DeepSpeed's CPU helper{where} (about a minute, once)", file=sys.stderr, flush=True)


def _build_problem(error: Exception) -> str:
    """What went wrong in one line; of a compiler's pages the line that says it."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"(error|failed): ", line)]
    return (telling or lines or [type(error).__name__])[0]


def _claim_folder(folder: Path) -> None:
    """Make the folder; what is loaded from a temporary folder that all can write must be this user's own."""
    own = own_temporary_folder()
    if folder.is_relative_to(own):
        own.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = own.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o022:
            raise SetupError(
                f"{own} is not a folder of this user alone, so nothing is loaded from it: remove it, or set "
                "TORCH_EXTENSIONS_DIR to a folder that you can write"
            )
    folder.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    with open(folder / ".wm_ds_build", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released by the kernel, also when the holder is killed
        yield


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    with contextlib.redirect_stdout(
        sys.stderr if os.environ.get("DS_LOG_LEVEL") == "debug" else open(os.devnull, "w")
    ):
        yield


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

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        start = self._now()
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
