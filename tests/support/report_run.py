"""A run's directory with everything that the report shows, made up; any length, in a moment."""

from __future__ import annotations

import json
import math
from pathlib import Path

import yaml


def make_run(folder: Path, *, steps: int = 400, lr: float = 3e-3, pool: bool = True) -> Path:
    """A run of two stages and two attempts. It skipped a step, had a spike, and was asked for samples."""
    (folder / "attempts").mkdir(parents=True)
    settings = {
        "run": {"dir": str(folder), "seed": 0},
        "model": {"family": "whitematter"},
        "optim": {"lr": lr},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    (folder / "history.json").write_text(json.dumps({"stages": [{"last": steps}]}))
    for number, end in (
        (1, {"result": "crash", "step": steps // 2, "exit_code": 1}),
        (2, {"result": "done"}),
    ):
        claim = {"time": "2026-01-01T00:00:00Z", "host": "node<1>", "job": f"{number}77"}
        (folder / f"attempts/{number:04d}.json").write_text(json.dumps(claim))
        (folder / f"attempts/{number:04d}.end").write_text(json.dumps(end))
    note = {"kind": "error", "error": "the disk is full", "step": steps // 2}
    (folder / "attempts/0001.failure").write_text(json.dumps(note))
    (folder / "done").write_text(json.dumps({"step": steps}))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(_row(step, steps, lr, pool)) + "\n")
            if step % max(1, steps // 10) == 0:
                held = {"holdout_loss": _loss(step, steps) + 0.1, "holdout_loss_double_passes": 0.1}
                file.write(json.dumps({"attempt": 1, "step": step, **held}) + "\n")
        file.write('{"step": 12, "lo')
    rows = [
        {"step": s, "tasks": {"hellaswag": {"acc": 0.25 + 0.2 * s / steps, "acc_stderr": 0.01}}}
        for s in range(steps // 4, steps + 1, steps // 4)
    ]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [
        {"step": s, "samples": [{"prompt": "To be, or", "text": f" <script>alert({s})</script> & not to be"}]}
        for s in range(steps // 4, steps + 1, steps // 4)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _loss(step: int, steps: int) -> float:
    return 3 + 6 * math.exp(-8 * step / steps) + 0.05 * math.sin(step * 12.9898)


def _row(step: int, steps: int, lr: float, pool: bool) -> dict:
    half = step > steps // 2
    row = {"attempt": 1 + half, "step": step, "loss": _loss(step, steps), "stage": int(half)}
    row |= {"grad_norm": 1 + 0.3 * math.sin(step), "lr": lr * (1 - 0.9 * step / steps), "tokens": 4096 * step}
    row |= {"tokens_per_s": 5000 + 300 * math.cos(step / 9), "step_s": 0.8, "mfu": 0.41}
    row["time"] = {"data": 0.01, "communication": 0.05, "forward": 0.3, "backward": 0.5, "optimizer": 0.04}
    if step == steps // 3:
        row |= {"spike": 9.1, "loss": 60.0, "samples": [1, 2]}
    if step == steps // 3 + 1:
        row |= {"skipped": "loss is nan", "loss": "nan"}
    if step % max(1, steps // 20) == 0:
        row["peak_memory_gib"] = [10.0, 11.5]
        if pool:
            row |= {"residuals": [0.5, 0.05, 0.004], "gain": [0.6, 0.9]}
            share = [[(1 + (j == s) * step / steps * 8) / 12 for s in range(8)] for j in range(4)]
            row["router_share"] = {"key": share, "value": share[::-1]}
    return row
