"""Starts the ranks of a test as processes and collects their answers.

Ranks are forked from a server that has imported torch and DeepSpeed once: dozens of short runs, some of which
are killed on purpose, would otherwise spend their time importing.
"""

import itertools
import json
import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml

from wm_ds.run.rendezvous import FIRST_PORT, LAST_PORT, is_free

ROOT = str(Path(__file__).parents[2])
# Inherited by the server and by all ranks. The server ignores preloads that it cannot import, hence the path.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # importing DeepSpeed's optimizers loads inductor
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(
    [
        "tests.support.checkpoint_worker",
        "tests.support.numerics_worker",
        "deepspeed",
        "deepspeed.runtime.zero.muon.muon_optimizer",
        "torch._dynamo",
        "wm_ds.checkpoint.manager",
        "wm_ds.run.stopping",
        "wm_ds.train",
    ]
)


def ports() -> Iterator[int]:
    """Free ports, each once: below those that Linux hands out to whoever asks for any, which the rendezvous
    of another test could be given before our rank 0 listens; processes begin at different ones."""
    span = LAST_PORT - FIRST_PORT + 1
    for number in itertools.count(os.getpid() * 1009):
        if is_free(port := FIRST_PORT + number % span):
            yield port


_PORTS = ports()


def start(world: int, plan: list[dict], folder: Path) -> list[BaseProcess]:
    """Start `world` ranks on the plan; rank N writes FOLDER/rank_N.log and FOLDER/answer_N.json."""
    from tests.support import checkpoint_worker

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan))
    files = [(str(folder / "plan.json"), str(folder / f"answer_{rank}.json")) for rank in range(world)]
    return fork(checkpoint_worker.main, files, folder)


def start_trainer(world: int, arguments: list[str], folder: Path) -> list[BaseProcess]:
    """Start the real trainer on `world` ranks; rank N writes FOLDER/rank_N.log."""
    from tests.support import checkpoint_worker

    folder.mkdir(parents=True, exist_ok=True)
    return fork(checkpoint_worker.trainer, [(arguments, None)] * world, folder)


def train_alone(folder: Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """The real trainer on one rank to its end: exit code, what it wrote to stdout and to stderr."""
    from tests.support import checkpoint_worker

    folder.mkdir(parents=True, exist_ok=True)
    errors = folder / "errors"
    codes = finish(fork(checkpoint_worker.trainer, [(arguments, str(errors))], folder), 300)
    output = (folder / "rank_0.log").read_text()
    return subprocess.CompletedProcess(arguments, codes[0], output, errors.read_text())


def launch_run(
    folder: Path, config: dict, name: str, world: int, *overrides: str
) -> tuple[list[BaseProcess], Path]:
    """Start the trainer on `config` with RUN_DIR = FOLDER/NAME; (ranks, folder of their logs)."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config | {"run": config["run"] | {"dir": str(folder / name)}}))
    ranks_folder = folder / f"{name}-ranks-{time.monotonic_ns()}"
    return start_trainer(world, [str(path), *overrides], ranks_folder), ranks_folder


def train_run(
    folder: Path, config: dict, name: str, world: int, *overrides: str, timeout_s: float = 120
) -> None:
    """The same to its end. Fails with the ranks' logs."""
    ranks, ranks_folder = launch_run(folder, config, name, world, *overrides)
    codes = finish(ranks, timeout_s)
    assert codes == [0] * world, f"{codes}\n{logs(ranks_folder)}"


def fork(target: Callable, arguments: list[tuple], folder: Path) -> list[BaseProcess]:
    """Start target(*arguments[rank], environment, log file) for each rank."""
    port, ranks = str(next(_PORTS)), []
    for rank, own in enumerate(arguments):
        env = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(arguments)),
            "LOCAL_WORLD_SIZE": str(len(arguments)),  # as torchrun sets it
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        process = _SERVER.Process(
            target=target, args=(*own, env, str(folder / f"rank_{rank}.log")), daemon=True
        )
        process.start()
        ranks.append(process)
    return ranks


def step(run_dir: Path, number: int) -> Path:
    """The folder of a run's checkpoint."""
    return run_dir / "checkpoints" / f"step_{number:08d}"


def metric_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def finish(ranks: list[BaseProcess], timeout_s: float) -> list[int | None]:
    """Wait for all ranks; exit codes, None for one that did not end in time (it is then killed)."""
    deadline = time.monotonic() + timeout_s
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    return codes


def logs(folder: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(folder.glob("rank_*.log")))


def answers(folder: Path, world: int) -> list[list[dict]]:
    """answers[rank][case]"""
    return [json.loads((folder / f"answer_{rank}.json").read_text()) for rank in range(world)]


def run(world: int, plan: list[dict], timeout_s: float = 240) -> list[list[dict]]:
    """Run the plan to its end on `world` ranks; returns answers[rank][case]. Fails with the ranks' logs."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-ranks-") as name:
        folder = Path(name)
        codes = finish(start(world, plan, folder), timeout_s)
        assert codes == [0] * world, f"exit codes {codes}\n{logs(folder)}"
        return answers(folder, world)
