"""The planner against two real ranks: bytes alive in a step, storage by storage, at every ZeRO stage."""

from __future__ import annotations

import pytest
import torch

from tests.dist import numerics
from wm_ds import config as configuration
from wm_ds.build import model_class, model_config
from wm_ds.engine import table_for
from wm_ds.memory import MIB
from wm_ds.plan import body, plan

LENGTH, VOCABULARY, BUCKET = 128, 2000, 100_000
CASES = [(0, "fp32"), (1, "autocast"), (2, "bf16"), (3, "fp32")]


def settings(precision: str) -> dict:
    return {
        "run": {"dir": "unused"},
        "model": {
            "hidden_size": 192,
            "intermediate_size": 576,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "num_kv_channels": 4,
            "num_groups": 8,
        },
        "data": {"train": "unused"},
        "batch": {"global_batch": 4, "micro_batch": 2},
        "optim": {"lr": 1e-3},
        "precision": precision,
        "recompute": "group",
        "steps": 10,
    }


def zero(stage: int) -> dict:
    buckets = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET} if stage else {}
    return {"zero_optimization": {"stage": stage} | buckets}


@pytest.mark.slow
def test_predicted_peaks_are_within_a_tenth_of_measured_ones() -> None:
    plans = [
        {"config": settings(p), "deepspeed": zero(s), "length": LENGTH, "vocabulary": VOCABULARY}
        for s, p in CASES
    ]
    answers = numerics.run(2, plans, timeout_s=1800, worker="tests.dist.memory_worker")
    wrong = []
    for (stage, precision), ranks in zip(CASES, answers):
        config = configuration.parse(settings(precision))
        hf = model_config(config.model, vocab_size=VOCABULARY, seq_len=LENGTH, eos_id=0)
        with torch.device("meta"):
            lm = model_class(hf)(hf)
        found = plan(
            config, hf, table_for(config, lm), LENGTH, 2, body(hf, LENGTH, precision, "group"),
            stage=stage, gather="step" if stage == 3 else None, recompute="group", micro_batch=2,
            buckets=(BUCKET, BUCKET),
        )  # fmt: skip
        measured = max(rank["peak"] for rank in ranks)
        print(stage, precision, {k: round(v / MIB, 2) for k, v in found.parts.items()}, measured / MIB)
        if abs(found.peak / measured - 1) > 0.1:
            wrong.append(
                f"stage {stage} {precision}: {found.peak / MIB:.1f} against {measured / MIB:.1f} MiB"
            )
    assert not wrong, wrong
