"""One rank of tests/plan/test_measured.py: bytes of a real training step, storage by storage;
forked by checkpoint_launch.py."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

from wm_ds.distributed import (
    process_group,  # first: it prepares the environment that DeepSpeed reads at import
)

import torch  # isort: skip

from tests.support.checkpoint_worker import prepare
from wm_ds.config import load as configuration
from wm_ds.engine.engine import build
from wm_ds.families import build_model, model_config
from wm_ds.plan.storage_tracker import StorageTracker


def main(folder: Path, env: dict[str, str], log: str) -> None:
    prepare(env, log)
    world = process_group.init(timeout_minutes=5)
    answers = [play(plan, world) for plan in json.loads((folder / "plan.json").read_text())]
    torch.save(answers, folder / f"answer_{world.rank}.pt")
    process_group.shutdown()


def play(plan: dict[str, Any], world: process_group.World) -> dict[str, int]:
    """Bytes alive before the second step, and at the worst moment of it."""
    config = configuration.parse(plan["config"])
    length, vocabulary = plan["length"], plan["vocabulary"]
    with StorageTracker() as tracker:
        hf = model_config(config.model, vocab_size=vocabulary, seq_len=length, eos_id=0)
        lm = build_model(hf, seed=0, recompute=config.recompute)
        engine = build(config, plan["deepspeed"], lm, world, length)
        rows = config.batch.micro_batch
        batches = []
        for _ in range(engine.accumulation):
            ids = torch.randint(1, vocabulary, (rows, length + 1))
            documents = torch.zeros(rows, length, dtype=torch.int32)
            samples = torch.arange(rows)
            batches.append(
                {
                    "input_ids": ids[:, :-1],
                    "labels": ids[:, 1:],
                    "document_ids": documents,
                    "sample_ids": samples,
                }
            )
        engine.step(batches)
        gc.collect()
        tracker.reset_peak()
        before = tracker.total
        engine.step(batches)
    answer = {"before": before, "peak": tracker.peak}
    engine.ds.destroy()
    return answer
