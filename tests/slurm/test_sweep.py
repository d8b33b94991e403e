"""A sweep as arrays of jobs on the real cluster: trained, measured, collected."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import toy_corpus
from tests.sweep.conftest import write_sweep

pytestmark = pytest.mark.slurm
DEADLINE_S = 420  # two runs that import torch and DeepSpeed, and their measuring, on two busy cores
ROOT = Path(__file__).resolve().parents[2]


def sweep(cluster, path: Path, *options: str) -> str:
    done = subprocess.run(
        [sys.executable, "tools/sweep.py", str(path), *options],
        cwd=ROOT,
        env=cluster.env,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_sweep_as_two_arrays(cluster, tmp_path):
    cluster.env.pop("WM_TRAIN_MODULE")
    cluster.env.update(
        WM_SBATCH_EXTRA="--open-mode=append",
        WM_CHECK_MODULE="rank_program",
        WM_NODES="1",
        WM_GPUS_PER_NODE="1",
        WM_TRAIN_TIME="10",
        WM_CPU_TIME="10",
    )
    data = toy_corpus.packed(tmp_path, 120, "--seq-len", 24, "--holdout", 8)
    path = write_sweep(tmp_path, data)
    said = sweep(cluster, path, "--slurm")
    jobs = dict(re.findall(r"^(\w+) +job (\d+)", said, re.MULTILINE))
    assert list(jobs) == ["train", "evaluate"]
    cluster.jobs += jobs.values()
    cluster.wait("both arrays", lambda: not cluster.call("squeue", "-h"), 300)
    logs = "\n".join(log.read_text() for log in tmp_path.glob("runs/sweep.jobs/logs/*.log"))
    sweep(cluster, path)
    arms = json.loads((tmp_path / "results" / "toy.json").read_text())["arms"]
    assert [len(arm["runs"]) for arm in arms.values()] == [1, 1], logs
    # Trained and measured by the jobs: there was nothing left for the command that collected.
    assert all(arm["runs"][0]["attempts"] == 0 for arm in arms.values()), logs
    assert logs.count("the run is complete at step 4") == 2
