"""The planner against two real ranks: bytes alive in a step, storage by storage, at every ZeRO stage."""

from __future__ import annotations

import pytest
import torch

from tests.support import numerics
from wm_ds.config import load as configuration
from wm_ds.engine.deepspeed_config import table_for
from wm_ds.families import model_class, model_config
from wm_ds.plan.activations import body
from wm_ds.plan.memory import plan
from wm_ds.plan.storage_tracker import MIB
from wm_ds.plan.way import Run, configured_way

pytestmark = pytest.mark.alone

LENGTH, VOCABULARY, BUCKET = 128, 2000, 100_000
NONE: dict = {}  # sizes are chosen from the model
SMALL = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
OWN = {"reduce_bucket_size": 20_000_000, "allgather_bucket_size": 20_000_000}  # far more than the model's
OVERLAP = {"overlap_comm": True}
# Stage, precision, micro-batch, layers, and the JSON's buckets. With micro-batches of one row a step has two,
# whose gradients are summed in fp32.
CASES = [
    (0, "fp32", 2, 4, NONE),
    (1, "autocast", 2, 4, SMALL),
    (2, "bf16", 2, 4, SMALL),
    (3, "fp32", 2, 4, SMALL),
    (0, "bf16", 1, 6, NONE),
    (1, "bf16", 1, 3, SMALL),
    (2, "bf16", 1, 6, SMALL),
    (3, "bf16", 1, 3, SMALL),
    (1, "autocast", 2, 4, NONE),
    (2, "bf16", 2, 4, OVERLAP),
    (3, "fp32", 2, 4, NONE),
    (1, "bf16", 1, 3, OWN),
    (2, "bf16", 2, 4, OWN | OVERLAP),
    (3, "fp32", 2, 4, OWN),
]


def settings(precision: str, micro_batch: int, layers: int) -> dict:
    return {
        "run": {"dir": "unused"},
        "model": {
            "hidden_size": 192,
            "intermediate_size": 576,
            "num_hidden_layers": layers,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "num_kv_channels": 3,
            "num_groups": 8,
        },
        "data": {"train": "unused"},
        "batch": {"global_batch": 4, "micro_batch": micro_batch},
        "optim": {"lr": 1e-3},
        "precision": precision,
        "recompute": "group",
        "steps": 10,
    }


def zero(stage: int, buckets: dict) -> dict:
    return {"zero_optimization": {"stage": stage} | buckets}


@pytest.mark.slow
def test_predicted_peaks_are_within_a_tenth_of_measured_ones() -> None:
    plans = [
        {"config": settings(*c), "deepspeed": zero(stage, b), "length": LENGTH, "vocabulary": VOCABULARY}
        for stage, *c, b in CASES
    ]
    answers = numerics.run(2, plans, timeout_s=1800, worker="tests.support.memory_worker")
    wrong = []
    for (stage, precision, micro_batch, layers, buckets), ranks in zip(CASES, answers):
        config = configuration.parse(settings(precision, micro_batch, layers))
        hf = model_config(config.model, vocab_size=VOCABULARY, seq_len=LENGTH, eos_id=0)
        with torch.device("meta"):
            lm = model_class(hf)(hf)
        run = Run(config, hf, table_for(config, lm), LENGTH, 2)
        way = configured_way(run, zero(stage, buckets))
        found = plan(way, body(hf, LENGTH, precision, "group"))
        measured = max(rank["peak"] for rank in ranks)
        what = f"stage {stage} {precision} {micro_batch} {layers} {buckets}"
        parts = {k: round(v / MIB, 2) for k, v in found.parts.items()}
        print(what, parts, round(found.peak / MIB, 1), "measured", round(measured / MIB, 1))
        if abs(found.peak / measured - 1) > 0.1:
            wrong.append(f"{what}: {found.peak / MIB:.1f} against {measured / MIB:.1f} MiB")
    assert not wrong, wrong
