"""Processor time that metrics.jsonl, TensorBoard and the progress line take of a step: `python
benchmarks/metrics.py`.

Without a model: the part of a step that `wm_ds/metrics.py` adds on rank 0, per step.
"""

from __future__ import annotations

import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from wm_ds import config as configuration
from wm_ds.distributed import World
from wm_ds.engine import StepResult
from wm_ds.metrics import Metrics

STEPS = 300


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        demo = Path(__file__).parent.parent / "configs" / "demo.yaml"
        config = configuration.load(demo, [f"run.dir={folder}"])
        world = World(0, 0, 1, torch.device("cpu"), "gloo")
        metrics = Metrics(config, total_steps=STEPS, attempt=1, world=world, positions=2048)
        seconds = {"forward": 0.1, "backward": 0.2, "optimizer": 0.1, "communication": 0.01}
        metrics.start()
        start = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            for step in range(1, STEPS + 1):
                result = StepResult(step, 3.0, 1.0, 1e-3, 2000, seconds=seconds)
                metrics.step(result, total_tokens=2000 * step, data_s=0.01, extra={})
        each = (time.process_time() - start) / STEPS
        metrics.close()
    print(f"{each * 1e3:.2f} ms of processor time a step: 1% of a step of {each * 100:.3f} s")


if __name__ == "__main__":
    main()
