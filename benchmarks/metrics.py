"""What the run's metrics take of a step: `python benchmarks/metrics.py`.

In one process on one CPU core, with the demo's model (configs/demo.yaml) at 256 tokens a row: the median
step; the row that rank 0 writes after each (metrics.jsonl, TensorBoard, the progress line); and the extra
forward over one row that measures residuals and routers every `log.details_every` steps. The ratio of both to
the step is the overhead. One row a step is the worst case: with more, the extra forward still takes one.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from wm_ds.distributed import (
    process_group,  # first: it prepares the environment that DeepSpeed reads at import
)

import torch  # isort: skip
from wm_ds.config import load as configuration
from wm_ds.config.stages import plan
from wm_ds.engine.diagnostics import observe
from wm_ds.engine.engine import StepResult, build
from wm_ds.engine.init_weights import Shell
from wm_ds.families import model_config
from wm_ds.metrics import Metrics

ROWS_WRITTEN, STEPS, LENGTH, VOCABULARY = 300, 15, 256, 4096
ROOT = Path(__file__).parent.parent


def median(act: Callable[[], object], times: int) -> float:
    spent = []
    for _ in range(times + 2):
        start = time.perf_counter()
        act()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[2:])


def main() -> None:
    torch.set_num_threads(1)
    world = process_group.init()
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"run.dir={folder}", "batch.global_batch=1", "batch.micro_batch=1", "steps=1000"]
        config = configuration.load(ROOT / "configs" / "demo.yaml", changes)
        hf = model_config(config.model, vocab_size=VOCABULARY, seq_len=LENGTH, eos_id=0)
        shell = Shell(hf, recompute=config.recompute)
        engine = build(config, {"zero_optimization": {"stage": 2}}, shell.lm, world, LENGTH, shell.values(0))
        ids = torch.randint(0, VOCABULARY, (1, LENGTH))
        documents = torch.zeros(1, LENGTH, dtype=torch.int32)
        batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "document_ids": documents}
        step = median(lambda: engine.step([dict(batch)]), STEPS)
        details = median(lambda: observe(engine, dict(batch)), STEPS)
        metrics = Metrics(plan(config, LENGTH), attempt=1, world=world)
        seconds = {"forward": 0.1, "backward": 0.2, "optimizer": 0.1, "communication": 0.01}
        metrics.start()
        start = time.process_time()  # also of the thread that writes TensorBoard's file
        with contextlib.redirect_stdout(io.StringIO()):
            for number in range(1, ROWS_WRITTEN + 1):
                result = StepResult(number, 3.0, 1.0, 1e-3, 2000, seconds=seconds)
                metrics.step(result, total_tokens=2000 * number, data_s=0.01, extra={})
        row = (time.process_time() - start) / ROWS_WRITTEN
        metrics.close()
        every = config.log.details_every
    print(
        f"step {step * 1e3:.0f} ms; a row {row * 1e3:.2f} ms; residuals and routers {details * 1e3:.0f} ms "
        f"every {every} steps: {100 * (row + details / every) / step:.2f}% of the step"
    )
    process_group.shutdown()


if __name__ == "__main__":
    main()
