"""The cluster as the tests see it: submit, look, wait with a deadline.

`make test-slurm` starts it (tests/slurm/cluster.sh) and runs pytest inside; elsewhere the tests are skipped.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 240  # of one test, whatever it waits for; a module may have its own
# Every deadline times this: what must happen is the same on a machine with other work, only later.
PATIENCE = float(os.environ.get("SLURM_DEV_PATIENCE", "1"))


class Cluster:
    """Jobs on the test cluster; `run_dir` and every setting of slurm/env.sh belong to one test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir, self.jobs = folder, folder / "run", []
        self.env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/tests/slurm",
            "WM_TRAIN_MODULE": "rank_program",
            "WM_PYTHON": sys.executable,
            "WM_MIN_RUN_GIB": "0.1",
            "WM_MIN_TMP_GIB": "0.1",
            "WM_LEASE_SECONDS": "6",
            "WM_NODES": "2",
            "WM_GPUS_PER_NODE": "2",
            "WM_CPUS_PER_GPU": "1",
            "WM_CPU_CPUS": "1",
            "WM_CPU_MEMORY": "1G",
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def call(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(command, env=self.env, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert not check or done.returncode == 0, f"{command} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    def sbatch(self, *arguments: str) -> str:
        """Submit; the job's id."""
        job = self.call("sbatch", "--parsable", *arguments).strip()
        self.jobs.append(job)
        return job

    def train(self, *settings: str, options: tuple[str, ...] = (), check_nodes: bool = False) -> str:
        """Submit a training of two nodes with two ranks each, as slurm/submit.sh does; the job's id."""
        if not check_nodes:
            # Importing torch four times is most of a short test; test_launch has the check itself.
            self.env["WM_CHECK_MODULE"] = "rank_program"
        self.run_dir.mkdir(exist_ok=True)
        size = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--time=10")
        return self.sbatch(
            *size,
            f"--output={self.main_log}",
            *options,
            "slurm/pretrain.sbatch",
            "unused.yaml",
            str(self.run_dir),
            *settings,
        )

    @property
    def main_log(self) -> Path:
        return self.folder / "main.log"

    def log(self) -> str:
        return self.main_log.read_text() if self.main_log.exists() else ""

    def job(self, job: str) -> dict[str, str]:
        """What SLURM knows of the job."""
        shown = self.call("scontrol", "show", "job", "-o", job)
        return dict(re.findall(r"(\w+)=(\S*)", shown.splitlines()[0]))

    def state(self, job: str) -> str:
        return self.job(job)["JobState"]

    def wait(self, what: str, condition: Callable[[], object], seconds: float = 60) -> None:
        """Until `condition()` is true; fails with the logs after `seconds`."""
        deadline = time.monotonic() + seconds * PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"{what}: not within {seconds * PATIENCE:g} s\n{self.everything()}")
            time.sleep(0.2)

    def wait_end(self, job: str, seconds: float = 90) -> dict[str, str]:
        """Until the job is over; what SLURM knows of it then."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "DEADLINE"}
        self.wait(f"end of job {job}", lambda: self.state(job) in over, seconds)
        return self.job(job)

    def wait_step(self, step: int, seconds: float = 60) -> None:
        """Until the run has reached the step."""
        self.wait(f"step {step}", lambda: any(row["step"] >= step for row in self.metrics()), seconds)

    def metrics(self) -> list[dict]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def losses(self) -> list[float]:
        """Loss by step; of a step that was repeated, the last."""
        last = {row["step"]: row["loss"] for row in self.metrics() if "loss" in row}
        assert sorted(last) == list(range(1, len(last) + 1)), sorted(last)
        return [last[step] for step in sorted(last)]

    def attempts(self) -> list[dict]:
        """How each attempt ended; {} for one that did not say."""
        claims = sorted((self.run_dir / "attempts").glob("????.json"))
        ends = [path.with_suffix(".end") for path in claims]
        return [json.loads(end.read_text()) if end.exists() else {} for end in ends]

    def rank_logs(self, attempt: int) -> dict[int, str]:
        """The log of each rank of an attempt."""
        found = (self.run_dir / "logs").glob(f"*.{attempt:04d}.rank*.log")
        return {int(path.name[-7:-4]): path.read_text() for path in found}

    def pid_of_rank(self, rank: int) -> int:
        """The python process of a rank of this test's run."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                variables = (folder / "environ").read_bytes().split(b"\0")
                program = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            mine = {f"RANK={rank}".encode(), f"WM_RUN_DIR={self.run_dir}".encode()} <= set(variables)
            if mine and b"python" in program.split(b"\0")[0]:
                return int(folder.name)
        raise LookupError(f"no process of rank {rank}")

    def node(self, action: str, name: str, *arguments: str) -> None:
        """`startnode` or `stopnode` of the cluster script."""
        subprocess.run(
            ["bash", os.environ["SLURM_DEV_SCRIPT"], os.environ["SLURM_DEV_ROOT"], action, name, *arguments],
            check=True,
        )

    def everything(self) -> str:
        """All logs, for the report of a failure."""
        parts = [self.call("squeue", check=False), f"--- {self.main_log}", self.log()]
        for path in sorted((self.run_dir / "logs").glob("*.log")):
            parts += [f"--- {path.name}", path.read_text()[-3000:]]
        return "\n".join(parts)

    def clear(self) -> None:
        """Cancel what is left and wait for idle nodes."""
        for job in self.jobs:
            self.call("scancel", job, check=False)
        for name in re.findall(r"wm\d", self.call("sinfo", "-h", "-N", "-t", "down,drain", "-o", "%N")):
            self.node("startnode", name)
        self.wait("an idle cluster", lambda: not self.call("squeue", "-h"), 60)
        self.wait(
            "idle nodes",
            lambda: len(self.call("sinfo", "-h", "-N", "-p", "train", "-t", "idle").split("\n")) == 5,
            60,
        )


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Cluster]:
    if "SLURM_DEV_ROOT" not in os.environ:
        pytest.skip("needs the test cluster: run `make test-slurm` (root, Debian's SLURM packages)")

    def too_late(*_: object) -> None:
        pytest.fail(f"not over after {deadline} s\n{made.everything()}")

    deadline = round(getattr(request.module, "DEADLINE_S", DEADLINE_S) * PATIENCE)
    made = Cluster(tmp_path)
    signal.signal(signal.SIGALRM, too_late)
    signal.alarm(deadline)
    yield made
    signal.alarm(0)
    made.clear()
