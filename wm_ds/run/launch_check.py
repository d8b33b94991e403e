"""Before training: are these nodes fit for it? Ends within a minute, naming the node that is not.

Every rank runs this file once, as one job step before the training step. Each looks at its own GPU; one rank
per node looks at its disks, versions and clock; all meet at the master, where rank 0 collects what was found;
then one small all-reduce goes through the backend that training will use. Rank 0 prints every problem once,
and all ranks exit with 72; or it prints one line on what it found, and all exit with 0.
"""

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

ASKED_FOR_CPU = os.environ.get("DS_ACCELERATOR") == "cpu"  # wm_ds.distributed sets it where it finds no GPU

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a node that does not come is our message, not torch's

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from wm_ds.distributed import environment, process_group  # noqa: E402
from wm_ds.errors import run_cli  # noqa: E402
from wm_ds.run.exit_codes import EXIT_CHECK_FAILED  # noqa: E402
from wm_ds.run.rendezvous import RendezvousError, host_names, nodes_of_ranks  # noqa: E402

GIB = 2**30
PACKAGES = ("torch", "deepspeed", "transformers", "numpy", "safetensors")
BUSY_GPU = 0.05  # fraction of a GPU's memory that may be taken before we start: a CUDA context, not a job


def versions() -> dict[str, str]:
    """What must be equal on all nodes. Our own sources by checksum: that finds a stale copy on one node."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    found["wm_ds sources"] = digest.hexdigest()[:12]
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cuda"] = str(torch.version.cuda)
    return found


def disk_problems(places: dict[Path, float]) -> list[str]:
    """Folders that cannot be written or have less free space than asked (GiB), in words."""
    problems = []
    for place, least in places.items():
        probe = place / f".launch_check.{socket.gethostname()}.{os.getpid()}"
        try:
            place.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"x" * 4096)
            probe.unlink()
            free = shutil.disk_usage(place).free / GIB
        except OSError as error:
            problems.append(f"{place} cannot be written: {error.strerror}")
            continue
        if free < least:
            problems.append(f"{place} has {free:.1f} GiB free, {least:g} are required")
    return problems


def gpu_problems(local_rank: int, local_world: int, least_gib: float) -> list[str]:
    """What is wrong with this rank's GPU, or with the number of GPUs, in words."""
    if ASKED_FOR_CPU:
        return []
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    if count == 0:
        return [
            f"torch sees no GPU (CUDA_VISIBLE_DEVICES={visible}); "
            "for a run on CPUs set DS_ACCELERATOR=cpu in slurm/env.sh"
        ]
    if count != local_world:
        return [
            f"{count} GPUs for {local_world} ranks (CUDA_VISIBLE_DEVICES={visible}): "
            "ask for --gpus-per-node and --ntasks-per-node alike, and not for --gpus-per-task"
        ]
    free, total = torch.cuda.mem_get_info(local_rank)
    if free < total * (1 - BUSY_GPU):
        return [
            f"GPU {local_rank}: {(total - free) / GIB:.1f} of {total / GIB:.1f} GiB in use before we start"
        ]
    if total < least_gib * GIB:
        return [f"GPU {local_rank} has {total / GIB:.1f} GiB, {least_gib:g} are required"]
    return []


def difference_problems(reports: list[dict]) -> list[str]:
    """Nodes whose versions differ from rank 0's, in words."""
    problems, first, seen = [], reports[0], set()
    for report in reports[1:]:
        if report["node"] in seen or not report["versions"]:
            continue
        seen.add(report["node"])
        for name in sorted(set(first["versions"]) | set(report["versions"])):
            here, there = first["versions"].get(name), report["versions"].get(name)
            if here != there:
                problems.append(f"{report['node']}: {name} is {there}, on {first['node']} it is {here}")
    return problems


def clock_problems(times: dict[str, float], reference: str, limit_s: float) -> list[str]:
    """Nodes whose clock differs by more than `limit_s` seconds from the node `reference`, in words."""
    return [
        f"{node}: its clock is {t - times[reference]:+.1f} s off {reference}'s, the limit is {limit_s:g} s"
        for node, t in times.items()
        if abs(t - times[reference]) > limit_s
    ]


@dataclass(frozen=True)
class Limits:
    """What nodes must have, and how long they may take: see the command line's help."""

    run_dir: Path
    min_run_gib: float
    min_tmp_gib: float
    min_gpu_gib: float
    max_skew: float
    timeout: float


class Check:
    """One rank's part in the check; `deadline` in seconds of time.monotonic()."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.rank, self.local_rank, self.size = process_group.launch_size()
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                raise process_group.SetupError(
                    f"{name} is not set: slurm/pretrain.sbatch starts this check on every node, with it"
                )
        self.local_world = environment.whole("LOCAL_WORLD_SIZE", self.size, least=1)
        self.node = socket.gethostname().split(".")[0]
        self.deadline = time.monotonic() + limits.timeout
        self.store: dist.TCPStore | None = None

    def left(self) -> timedelta:
        """Time until the deadline."""
        return timedelta(seconds=max(0.1, self.deadline - time.monotonic()))

    def nodes(self) -> list[str]:
        """The node of each rank, as SLURM planned it: to name those that never came."""
        try:
            names = host_names(os.environ["SLURM_JOB_NODELIST"])
            return nodes_of_ranks(names, os.environ["SLURM_STEP_TASKS_PER_NODE"])
        except (KeyError, RendezvousError):
            return ["an unknown node"] * self.size

    def report(self) -> dict:
        """What this rank found."""
        problems = gpu_problems(self.local_rank, self.local_world, self.limits.min_gpu_gib)
        first = self.local_rank == 0
        if first:
            problems += disk_problems(
                {
                    self.limits.run_dir: self.limits.min_run_gib,
                    Path(tempfile.gettempdir()): self.limits.min_tmp_gib,
                }
            )
        return {"node": self.node, "problems": problems, "versions": versions() if first else {}}

    def meet(self) -> None:
        """Connect to rank 0's store. Raises DistStoreError or DistNetworkError when it is not there."""
        address, port = os.environ["MASTER_ADDR"], environment.whole("MASTER_PORT", 0, least=1)
        main = self.rank == 0
        self.store = dist.TCPStore(address, port, None, main, timeout=self.left(), wait_for_workers=False)

    def collect(self, stage: str) -> tuple[list[dict], list[str]]:
        """Rank 0: every rank's word at `stage`, and which nodes are missing, in words."""
        reports, missing, nodes = [], [], self.nodes()
        for rank in range(self.size):
            key = f"{stage}/{rank}"
            try:
                assert self.store is not None
                self.store.wait([key], self.left())
                reports.append(json.loads(self.store.get(key)))
            except (dist.DistStoreError, dist.DistNetworkError):
                missing.append(
                    f"{nodes[rank]}: rank {rank} was not heard of at the {stage} within "
                    f"{self.limits.timeout:g} s"
                )
        return reports, missing

    def agree(self, stage: str, word: dict) -> tuple[list[dict], list[str]]:
        """All ranks hand in `word`; the problems found come back to every rank, the words to rank 0 only."""
        assert self.store is not None
        self.store.set(f"{stage}/{self.rank}", json.dumps(word))
        if self.rank:
            self.store.wait([f"{stage}/verdict"], self.left() + timedelta(seconds=5))
            return [], json.loads(self.store.get(f"{stage}/verdict"))
        reports, problems = self.collect(stage)
        problems += [f"{r['node']}: {text}" for r in reports for text in r["problems"]]
        if stage == "report" and not problems:
            problems = difference_problems(reports)
        if stage == "clock" and not problems:
            times = {r["node"]: r["time"] for r in reversed(reports)}
            problems = clock_problems(times, self.node, self.limits.max_skew)
        if problems:  # before the others hear of it: the step ends with the last of them
            print("\n".join(f"launch check: {text}" for text in dict.fromkeys(problems)), flush=True)
        self.store.set(f"{stage}/verdict", json.dumps(problems))
        return reports, problems

    def all_reduce(self) -> list[str]:
        """One all-reduce of 4 MB through training's backend, in a thread: a broken network may not return."""
        problems: list[str] = []

        def work() -> None:
            try:
                device, backend = process_group.pick_device(self.local_rank)
                if device.type == "cuda":
                    torch.cuda.set_device(device)
                store = dist.PrefixStore("reduce", self.store)
                dist.init_process_group(
                    backend, store=store, rank=self.rank, world_size=self.size, timeout=self.left()
                )
                values = torch.full((2**20,), float(self.rank + 1), device=device)
                dist.all_reduce(values)
                expected = self.size * (self.size + 1) / 2
                if not bool((values == expected).all()):
                    problems.append(f"the all-reduce returned {values[0].item()}, not {expected}")
            except Exception as error:
                problems.append(f"the all-reduce failed: {str(error).splitlines()[0]}")

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(self.left().total_seconds())
        if thread.is_alive():
            problems.append(f"the all-reduce did not end within {self.limits.timeout:g} s")
        return problems

    def run(self) -> int:
        """Exit code: 0, or EXIT_CHECK_FAILED after rank 0 has printed why."""
        started = time.monotonic()
        try:
            self.meet()
            reports, problems = self.agree("report", self.report())
            if not problems:
                clocks, problems = self.agree(
                    "clock", {"node": self.node, "problems": [], "time": time.time()}
                )
            if not problems:
                begun = time.monotonic()
                word = {"node": self.node, "problems": self.all_reduce()}
                took = time.monotonic() - begun
                _, problems = self.agree("all-reduce", word)
        except (dist.DistStoreError, dist.DistNetworkError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            print(
                f"launch check: {self.node}: rank {self.rank} and {where} lost each other: "
                f"{str(error).splitlines()[0]}"
            )
            return EXIT_CHECK_FAILED
        if self.rank == 0 and not problems:
            times = [c["time"] for c in clocks]
            what = "CPU" if ASKED_FOR_CPU else torch.cuda.get_device_name(0)
            print(
                f"launch check: {len({r['node'] for r in reports})} nodes, {self.size} ranks ({what}), torch "
                f"{torch.__version__}, clocks within {max(times) - min(times):.2f} s, "
                f"first all-reduce {took:.1f} s: fit ({time.monotonic() - started:.1f} s)"
            )
        self.leave(1 if problems else 5)  # with problems there may be ranks that never came
        return EXIT_CHECK_FAILED if problems else 0

    def leave(self, seconds: float) -> None:
        """Rank 0 holds the store, so it goes last: after all others, or `seconds`."""
        assert self.store is not None
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
            self.store.set(f"bye/{self.rank}", "")
            if self.rank == 0:
                self.store.wait([f"bye/{rank}" for rank in range(self.size)], timedelta(seconds=seconds))


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, arguments, refused=EXIT_CHECK_FAILED)


def run(arguments: list[str] | None = None) -> int:
    """The command, its errors as exceptions."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # rank.sh ignores it until a trainer handles it; we do not
    parser = argparse.ArgumentParser(
        prog="python -m wm_ds.run.launch_check", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--min-run-gib", type=float, default=1.0, help="free space in the run directory")
    parser.add_argument(
        "--min-tmp-gib",
        type=float,
        default=1.0,
        help="free space where temporary files go (TMPDIR, else /tmp) on every node",
    )
    parser.add_argument("--min-gpu-gib", type=float, default=0.0, help="memory of every GPU")
    parser.add_argument("--max-skew", type=float, default=5.0, help="seconds between two nodes' clocks")
    parser.add_argument("--timeout", type=float, default=45.0, help="seconds for everything")
    options = parser.parse_args(arguments)
    try:
        return Check(Limits(**vars(options))).run()
    except process_group.SetupError as error:
        raise process_group.SetupError(f"{socket.gethostname()}: {error}") from None


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process group that a broken network left behind may wait for ever in its clean-up
