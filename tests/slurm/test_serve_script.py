"""slurm/serve.sbatch, with an `srun` that shows what it is asked to run: no cluster is needed."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def serve(tmp_path):
    """Runs the script; its environment for vLLM is complete unless a test says otherwise."""
    for name in ("bin/srun", "venv/bin/vllm"):
        program = tmp_path / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text('#!/bin/sh\nfor word in "$@"; do echo "word $word"; done\n')
        program.chmod(0o755)
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "config.json").write_text("{}")

    def run(*arguments, **environment):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "WM_"))}
        env |= {"PATH": f"{tmp_path / 'bin'}:{env['PATH']}", "WM_SERVE_VENV": str(tmp_path / "venv")}
        script = ["bash", "slurm/serve.sbatch", *arguments]
        done = subprocess.run(script, cwd=ROOT, env=env | environment, capture_output=True, text=True)
        words = [line[5:] for line in done.stdout.splitlines() if line.startswith("word ")]
        return done, words

    return run, folder


def test_one_process_for_each_gpu_and_options_pass(serve):
    run, folder = serve
    done, words = run(str(folder), "--dtype", "float32", SLURM_GPUS_ON_NODE="2", WM_SERVE_PORT="8123")
    assert done.returncode == 0, done.stderr
    at = words.index("serve")
    assert words[at - 1].endswith("venv/bin/vllm")
    assert words[at + 1 :] == [
        str(folder), "--host", "0.0.0.0", "--port", "8123", "--tensor-parallel-size", "2",
        "--dtype", "float32",
    ]  # fmt: skip
    assert ":8123/v1 with 2 GPU(s)" in done.stdout


def test_a_given_number_of_processes_stays(serve):
    run, folder = serve
    _, words = run(str(folder), "--tensor-parallel-size", "4", SLURM_GPUS_ON_NODE="8")
    assert words.count("--tensor-parallel-size") == 1


def test_what_is_missing_is_said_in_one_line(serve, tmp_path):
    run, folder = serve
    for arguments, environment, said in (
        ((), {}, "usage: slurm/serve.sbatch DIR"),
        ((str(tmp_path),), {}, "is no exported folder"),
        ((str(folder),), {"WM_SERVE_VENV": "/nowhere"}, "no /nowhere/bin/vllm: install vLLM and the plugin"),
    ):
        done, words = run(*arguments, **environment)
        assert (done.returncode, words) == (2, [])
        lines = done.stderr.splitlines()
        assert len(lines) == 1
        assert said in lines[0]
