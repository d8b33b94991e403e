"""Compute the goldens: `python -m tests.goldens.probe OUT.json [--all]`. Without --all the quick ones.

Floating point differs between processors where a library picks its kernels by what the processor can do. The
probe asks every library for its most common kernels and one thread, so that x86-64 machines agree as far as
these settings go; a machine that is still different is named in the answer (`machine`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Read by the libraries when they are loaded.
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONHASHSEED": "0",
}
LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WM_ATTEMPT")


def run(tree: Path = ROOT, *, everything: bool = False) -> dict:
    """The goldens of a tree's code, by a process of its own: {"machine": …, "goldens": {name: entry}}."""
    with tempfile.TemporaryDirectory(prefix="goldens-") as name:
        answer = Path(name) / "answer.json"
        command = [sys.executable, "-m", "tests.goldens.probe", str(answer), *["--all"] * everything]
        done = subprocess.run(command, cwd=tree, env=_environment(tree), capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the probe failed in {tree}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return json.loads(answer.read_text())


def _environment(tree: Path) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if key not in LAUNCH}
    return env | ENVIRONMENT | {"PYTHONPATH": str(tree)}


def machine() -> dict[str, str]:
    """What may explain other bits: processor and libraries."""
    from importlib.metadata import version

    cpu = platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    libraries = {
        name: version(name) for name in ("torch", "numpy", "transformers", "deepspeed", "tokenizers")
    }
    return {"cpu": cpu, "libc": " ".join(platform.libc_ver())} | libraries


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.goldens.probe", description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--all", action="store_true", help="the whole matrix of training runs; minutes")
    options = parser.parse_args()
    if any(os.environ.get(key) != value for key, value in ENVIRONMENT.items()):
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.goldens.probe", *sys.argv[1:]], _environment(ROOT)
        )
    output = options.output.resolve()
    from . import files, models, training
    from .subject import SOURCE, torch

    # An installed package must not stand in for the tree that is asked about.
    assert SOURCE.is_relative_to(ROOT), f"the code under test lies in {SOURCE}, not in {ROOT}"
    torch.backends.mkldnn.set_flags(False)
    torch.set_num_threads(1)
    cases = {1: training.ALL, 2: training.ALL} if options.all else {2: training.FEW}
    with tempfile.TemporaryDirectory(prefix="goldens-") as name:
        folder = Path(name)
        waiting = {ranks: _start(folder / f"{ranks} ranks", ranks, cases[ranks]) for ranks in cases}
        goldens = models.probe(options.all)
        (folder / "files").mkdir()
        goldens |= files.probe(folder / "files", options.all)
        for ranks, processes in waiting.items():
            at = folder / f"{ranks} ranks"
            codes = [process.wait(1800) for process in processes]
            logs = "\n".join(path.read_text()[-3000:] for path in at.glob("log_*"))
            assert not any(codes), f"{ranks} ranks ended with {codes}:\n{logs}"
            goldens |= training.collect(at, ranks, cases[ranks])
    write(output, {"machine": machine(), "goldens": goldens})


def write(path: Path, answer: dict) -> None:
    """The answer as JSON, one golden a line."""
    goldens = sorted(answer["goldens"].items())
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in goldens)
    path.write_text(f'{{\n "machine": {json.dumps(answer["machine"])},\n "goldens": {{\n{lines}\n }}\n}}\n')


def _start(folder: Path, ranks: int, cases: list) -> list[subprocess.Popen]:
    """Start the ranks of training.py."""
    from .subject import process_group

    folder.mkdir()
    (folder / "cases.json").write_text(json.dumps(cases))
    port = str(process_group.free_port())
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with open(folder / f"log_{rank}", "w") as log:
            command = [sys.executable, "-m", "tests.goldens.training", str(folder)]
            started.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=_environment(ROOT) | own, stdout=log, stderr=subprocess.STDOUT
                )
            )
    return started


if __name__ == "__main__":
    main()
