"""Evaluation jobs that the training job submits, with an `sbatch` that shows what it is given: no cluster."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ". slurm/env.sh; . slurm/common.sh; wm_submit_tasks; wm_submit_tasks"


@pytest.fixture
def submit(tmp_path):
    """Looks twice at what a run's trainer wants; the queue holds what SQUEUE says."""
    (tmp_path / "bin").mkdir()
    for name, text in {
        "squeue": 'printf %s "$SQUEUE"',
        "sbatch": 'printf "%s\\n" "$@" >>"$SHOWN"; echo "${REFUSAL:-17}"; [ -z "$REFUSAL" ]',
    }.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "run" / "evaluations").mkdir(parents=True)

    def run(**environment):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "WM_"))}
        env |= {"PATH": f"{tmp_path / 'bin'}:{env['PATH']}", "WM_RUN_DIR": str(tmp_path / "run")}
        env |= {"SHOWN": str(tmp_path / "shown"), "SQUEUE": "", "REFUSAL": ""} | environment
        done = subprocess.run(["bash", "-uc", SCRIPT], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert not done.stderr
        shown = tmp_path / "shown"
        return done.stdout.splitlines(), shown.read_text().splitlines() if shown.exists() else []

    return run, tmp_path / "run"


def test_nothing_is_submitted_without_a_wish_or_while_one_is_in_the_queue(submit):
    run, folder = submit
    assert run() == ([], [])
    (folder / "evaluations" / "wanted.json").write_text("{}")
    assert run(SQUEUE="12") == ([], [])


def test_the_job_evaluates_what_the_run_wants(submit):
    run, folder = submit
    (folder / "evaluations" / "wanted.json").write_text("{}")
    said, words = run(WM_PARTITION="gpus", WM_CPU_PARTITION="cpus", WM_ACCOUNT="me")
    assert said[0].endswith("evaluate.tasks: job 17")
    first = words[: len(words) // 2]
    assert first[-3:] == ["slurm/evaluate.sbatch", "on-the-way", str(folder)]
    assert {"--gpus-per-node=1", "--partition=gpus", "--account=me", "--dependency=singleton"} <= set(first)
    _, words = run(WM_TASKS_GPUS="0", WM_PARTITION="gpus", WM_CPU_PARTITION="cpus")
    assert "--partition=cpus" in words[-12:]
    assert not any(word.startswith("--gpus") for word in words[len(first) * 2 :])


def test_a_refusal_is_said_once(submit):
    run, folder = submit
    (folder / "evaluations" / "wanted.json").write_text("{}")
    (line,) = run(REFUSAL="sbatch: error: no such partition")[0]
    assert "SLURM takes no job for it (sbatch: error: no such partition); training goes on" in line
