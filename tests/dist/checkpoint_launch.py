"""Starts the ranks of a checkpoint test as processes and collects their answers."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from wm_ds.distributed import free_port

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("checkpoint_worker.py")


def start(world: int, plan: list[dict], folder: Path, script: Path = WORKER) -> list[subprocess.Popen]:
    """Start `world` ranks on the plan; their output goes to FOLDER/rank_N.log."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    port, ranks = str(free_port()), []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, str(script), str(folder / "plan.json"), str(folder / "answer")]
        with open(folder / f"rank_{rank}.log", "w") as log:
            ranks.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=ROOT))
    return ranks


def logs(folder: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(folder.glob("rank_*.log")))


def run(world: int, plan: list[dict], timeout_s: float = 240) -> list[list[dict]]:
    """Run the plan to its end on `world` ranks; returns answers[rank][case]. Fails with the ranks' logs."""
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-ranks-"))
    ranks = start(world, plan, folder)
    try:
        codes = [rank.wait(timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0] * world, f"exit codes {codes}\n{logs(folder)}"
    return [json.loads((folder / f"answer.{rank}.json").read_text()) for rank in range(world)]
