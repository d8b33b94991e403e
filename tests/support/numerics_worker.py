"""One rank of tests/support/numerics.py, forked by checkpoint_launch.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wm_ds.distributed import (
    process_group,  # first: it prepares the environment that DeepSpeed reads at import
)

import torch  # isort: skip
from tests.support import numerics
from tests.support.checkpoint_worker import prepare
from tests.support.numerics import Case
from wm_ds.checkpoint.engine_state import EngineState
from wm_ds.checkpoint.layout_proof import LayoutError, prove
from wm_ds.config import load as configuration
from wm_ds.distributed.host_group import Agreement
from wm_ds.engine.engine import Engine, TrainingFailed, build
from wm_ds.engine.init_weights import Shell
from wm_ds.optim.partition import fragments


def main(folder: Path, env: dict[str, str], log: str) -> None:
    prepare(env, log)
    world = process_group.init(timeout_minutes=5)
    answers = []
    for plan in json.loads((folder / "plan.json").read_text()):
        answers.append(play(Case(**plan), world))
    torch.save(answers, folder / f"answer_{world.rank}.pt")
    process_group.shutdown()


def play(case: Case, world: process_group.World) -> dict[str, Any]:
    config = configuration.parse(numerics.settings(case, world.size))
    lm, values = numerics.model(case), None
    if case.streamed:
        values = ((name, p.detach().clone()) for name, p in lm.named_parameters())
        lm = Shell(numerics.hf_config(case), recompute=case.recompute).lm
    json = case.json | {"zero_optimization": case.zero}
    engine = build(config, json, lm, world, numerics.LENGTH, values)
    answer: dict[str, Any] = {
        "losses": [],
        "norms": [],
        "skipped": [],
        "lr": [],
        "samples": [],
        "failed": None,
        "layout": layout(engine, "the first step"),
    }
    if answer["layout"] is not None:
        engine.ds.destroy()
        return answer
    record_first_gradient(engine, answer)
    for step in range(case.steps):
        try:
            result = engine.step(micro_batches(case, step, world))
        except TrainingFailed as error:
            answer["failed"] = str(error)
            break
        answer["losses"].append(result.loss)
        answer["norms"].append(result.grad_norm)
        answer["skipped"].append(result.skipped)
        answer["samples"].append(result.samples)
        answer["lr"].append([g["lr"] for g in engine.optimizer.param_groups])
        if case.evaluate:
            answer.setdefault("evaluations", []).append(engine.evaluate(micro_batches(case, 99, world)))
    answer["layout"] = layout(engine, "the first save")
    answer["weights"] = snapshot(engine, lambda f: f.of(f.master.detach()))
    answer["updates"] = engine.optimizer.param_groups[0]["step"]
    answer["clipping"] = engine.ds.gradient_clipping()
    engine.ds.destroy()
    return answer


def layout(engine: Engine, before: str) -> str | None:
    """What the proof of layout says that a run makes at this point; None where all is well."""
    state = EngineState(engine.ds, rank=engine.world.rank, world=engine.world.size)
    try:
        prove(state, Agreement(60.0), before=before)
    except LayoutError as error:
        return f"before {before}: {error}"
    return None


def micro_batches(case: Case, step: int, world: process_group.World) -> list[dict[str, torch.Tensor]]:
    whole = numerics.batch(0 if case.fixed else step, case.lopsided)
    rows = torch.arange(numerics.ROWS).view(case.accumulation, world.size, -1)[:, world.rank]
    parts = [{k: v[part] for k, v in whole.items()} for part in rows]
    if case.poison and step in (1, 3, 4, 5) and world.rank == world.size - 1:
        parts[0]["input_ids"][:, 0] = 0
    return parts


def record_first_gradient(engine: Engine, answer: dict[str, Any]) -> None:
    """Note the reduced gradient that the optimizer is given in the first step, per partition."""
    seen: dict[int, torch.Tensor] = {}
    real = engine.optimizer.step

    def step() -> None:
        if engine.steps == 0:
            for group in engine.optimizer.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        seen[id(p)] = p.grad.detach().float() * engine.optimizer.grad_scale
        real()
        if engine.steps == 0:
            mine = [f for f in fragments(engine.ds) if id(f.master) in seen]
            answer["gradients"] = [
                (f.name, f.shape, f.start, f.stop, f.of(seen[id(f.master)]).clone()) for f in mine
            ]

    engine.optimizer.step = step


def snapshot(engine: Engine, pick: Any) -> list:
    return [(f.name, f.shape, f.start, f.stop, pick(f).float().clone()) for f in fragments(engine.ds)]
