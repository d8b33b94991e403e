"""slurm/pretrain.sbatch from a clone and into a run directory with hard names; `srun` is a stand-in."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.slurm.test_submit import HARD

ROOT = Path(__file__).resolve().parents[2]


def test_hard_paths_reach_the_ranks_whole(tmp_path):
    clone, run, config = tmp_path / "my clone $HOME", tmp_path / HARD, "con figs/a *.yaml"
    shutil.copytree(ROOT / "slurm", clone / "slurm")
    words = tmp_path / "words"
    for name, body in {
        "srun": f'echo call >>{words}; for word in "$@"; do printf \'%s\\n\' "$word" >>{words}; done; exit 0',
        "scontrol": "echo 'JobId=7 JobState=RUNNING Reason=None Restarts=0 End'",
    }.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "WM_"))}
    env |= {"PATH": f"{tmp_path / 'bin'}:{env['PATH']}", "PYTHONPATH": str(ROOT), "WM_REPO": str(clone)}
    env |= {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "localhost"}
    env |= {"WM_PYTHON": sys.executable, "WM_MASTER_ADDR": "localhost", "WM_MASTER_PORT": "29871"}
    command = ["bash", str(clone / "slurm/pretrain.sbatch"), config, str(run), "data.train=a b/[c]"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    check, train = (call.splitlines() for call in words.read_text().split("call\n")[1:])
    assert check[check.index("--run-dir") + 1] == str(run), done.stdout + done.stderr
    assert train[-3:] == [config, f"run.dir={run}", "data.train=a b/[c]"]
    log = next(word for word in train if word.startswith("--output="))
    assert log.startswith(f"--output={str(run).replace('%', '%%')}/logs/7.0001.rank")
    assert [path.name for path in (run / "attempts").glob("????.json")] == ["0001.json"]
    assert sorted(os.listdir(tmp_path)) == sorted([HARD, "bin", "my clone $HOME", "words"]), "a path was cut"
