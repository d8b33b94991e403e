"""One rank of tests/engine/test_zero3.py, forked by checkpoint_launch.py."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from wm_ds.distributed import (
    process_group,  # first: it prepares the environment that DeepSpeed reads at import
)

import torch  # isort: skip
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from tests.support import numerics
from tests.support.checkpoint_worker import prepare
from wm_ds.config import load as configuration
from wm_ds.engine.engine import build
from wm_ds.families import build_model, model_config

COUNTS: Counter[str] = Counter()


def counted(owner: Any, name: str, label: str) -> None:
    """Count the calls of a function."""
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        COUNTS[label] += 1
        return real(*args, **kwargs)

    setattr(owner, name, call)


def main(folder: Path, env: dict[str, str], log: str) -> None:
    prepare(env, log)
    # The collectives themselves; DeepSpeed picks them up when it joins the process group.
    for name in ("all_gather_into_tensor", "all_gather"):
        counted(torch.distributed, name, "gathers")
    world = process_group.init(timeout_minutes=5)
    counted(PartitionedParameterCoordinator, "_invalidate_trace", "invalidations")
    answers = [play(plan, world) for plan in json.loads((folder / "plan.json").read_text())]
    torch.save(answers, folder / f"answer_{world.rank}.pt")
    process_group.shutdown()


def play(plan: dict[str, Any], world: process_group.World) -> dict[str, Any]:
    settings = numerics.settings(numerics.Case(family="whitematter", recompute=plan["recompute"]), world.size)
    settings["model"] |= plan["model"]
    settings["zero3"] = {"gather": plan["gather"]}
    settings["batch"] = {"global_batch": 2 * world.size, "micro_batch": 2}
    config = configuration.parse(settings)
    length = plan["length"]
    lm = build_model(
        model_config(config.model, vocab_size=numerics.VOCABULARY, seq_len=length, eos_id=0),
        seed=0,
        recompute=plan["recompute"],
    )
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine = build(config, {"zero_optimization": zero | plan.get("zero", {})}, lm, world, length)
    hooks: Counter[str] = Counter()
    for name, p in engine.ds.module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: hooks.update([name]))
    answer: dict[str, Any] = {"gathers": [], "invalidations": [], "hooks": [], "losses": []}
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(plan["steps"]):
        hooks.clear()
        before = Counter(COUNTS)
        answer["losses"].append(engine.step([batch(length, generator)]).loss)
        answer["gathers"].append(COUNTS["gathers"] - before["gathers"])
        answer["invalidations"].append(COUNTS["invalidations"] - before["invalidations"])
        answer["hooks"].append(dict(hooks))
        if plan["evaluate"]:
            rows = [batch(length, torch.Generator().manual_seed(99))]
            engine.evaluate(rows)
            engine.evaluate(rows, schedule=engine.passes_schedule(2))
    answer["evaluation_invalidations"] = COUNTS["invalidations"]
    answer["parameters"] = [name for name, _ in engine.ds.module.named_parameters()]
    engine.ds.destroy()
    return answer


def batch(length: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, numerics.VOCABULARY, (2, length + 1), generator=generator)
    documents = torch.zeros(2, length, dtype=torch.int32)
    documents[:, length // 2 :] = 1
    return {
        "input_ids": ids[:, :-1],
        "labels": ids[:, 1:],
        "document_ids": documents,
        "sample_ids": torch.arange(2),
    }
