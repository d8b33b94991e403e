#!/usr/bin/env python3
"""What a run needs per GPU, before there is one.

    python tools/plan_memory.py configs/7b.yaml --gpus 64 --nodes 8 --gpu-memory 80
    python tools/plan_memory.py configs/7b.yaml --gpus 64 --nodes 8 --gpu-memory 80 --json

For every ZeRO stage, recomputation and micro-batch that is sensible: the peak per GPU in GiB by what it is
spent on, whether it fits, and what a step sends over the network; then a recommendation with the options that
make it. States are arithmetic; activations come from running the model on meta tensors (memory.py
and activations.py in wm_ds/plan say how and what is left out). Runs on any machine, without a GPU.

A node's host memory holds what is offloaded, for all its GPUs; with --host-memory, what needs more does not
fit. Building needs no whole model there: weights are drawn and placed one by one
(wm_ds/engine/init_weights.py). Writing a checkpoint in the background takes the optimizer's share again,
where there is room (docs/checkpoints.md).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.initialization import no_init_weights

from wm_ds.config.load import load
from wm_ds.config.schema import Config, ConfigError
from wm_ds.engine.deepspeed_config import table_for
from wm_ds.errors import run_cli
from wm_ds.families import model_class, model_config
from wm_ds.optim.param_rules import Row
from wm_ds.plan.memory import GIB, RESERVE, Plan, plans

VOCABULARY = 151_936  # Qwen3's, where neither the run nor --vocabulary says
SHORT = {
    "parameters": "params",
    "gathered parameters": "gathered",
    "gradients": "grads",
    "activations": "activ",
}


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 where nothing fits, 2 where the question was refused."""
    return run_cli(run, argv, refused=2)


def run(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Predicted peak memory per GPU for every way to run a configuration."
    )
    parser.add_argument("config", help="the run's YAML")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of the run")
    parser.add_argument(
        "--nodes", type=int, default=1, help="nodes they are spread over (default %(default)s)"
    )
    parser.add_argument("--gpu-memory", type=float, required=True, help="GB of one GPU")
    parser.add_argument("--host-memory", type=float, help="GB of one node's host memory for offload")
    parser.add_argument(
        "--length", type=int, help="tokens of a sequence (default: the packed data's, or 2048)"
    )
    parser.add_argument(
        "--vocabulary", type=int, help="tokens (default: model.vocab_size, the data's, or Qwen3's)"
    )
    parser.add_argument("--all", action="store_true", help="also list what does not fit")
    parser.add_argument("--json", action="store_true", help="everything as JSON, in bytes")
    options = parser.parse_intermixed_args(argv)
    for name in ("gpus", "nodes", "gpu_memory", "host_memory"):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be positive")
    if options.gpus % options.nodes:
        raise ConfigError(f"--gpus {options.gpus} do not divide over --nodes {options.nodes}")
    config = load(options.config, options.overrides)
    if config.batch.global_batch % config.data_ranks(options.gpus):
        config.batch.model_copy(update={"micro_batch": 1}).accumulation(config.data_ranks(options.gpus))
    length, vocabulary = sizes(config, options.length, options.vocabulary)
    hf = model_config(config.model, vocab_size=vocabulary, seq_len=length, eos_id=None)
    with torch.device("meta"), no_init_weights():
        lm = model_class(hf)(hf)
        lm.tie_weights()
    rows = table_for(config, lm)
    found = list(plans(config, hf, rows, length, options.gpus))
    host = math.inf if options.host_memory is None else options.host_memory * 1e9
    room = Room(options.gpu_memory * 1e9 * (1 - RESERVE), host, options.gpus // options.nodes)
    best = recommend(found, room, length // config.sequence_parallel, options.nodes)
    if options.json:
        report = {
            "config": options.config,
            "gpus": options.gpus,
            "nodes": options.nodes,
            "length": length,
            "parameters": sum(torch.Size(r.shape).numel() for r in rows),
            "room": room.gpu,
            "host_room": None if math.isinf(room.host) else room.host,
            "plans": [asdict(p) | {"peak": p.peak, "fits": room.holds(p)} for p in found],
            "recommended": None if best is None else found.index(best),
        }
        print(json.dumps(report, indent=2))
    else:
        print(text(options, config, rows, length, found, best, room))
    return 0 if best is not None else 1


@dataclass(frozen=True)
class Room:
    """Bytes to use: of one GPU, and of the host memory of a node with so many GPUs."""

    gpu: float
    host: float
    gpus_per_node: int

    def holds(self, plan: Plan) -> bool:
        return plan.peak <= self.gpu and plan.host * self.gpus_per_node <= self.host


def sizes(config: Config, length: int | None, vocabulary: int | None) -> tuple[int, int]:
    """Tokens of a sequence and of the vocabulary: as given, else from packed data that is there."""
    manifest = Path(config.data.sources()[0].path) / "manifest.json"
    known: dict[str, Any] = json.loads(manifest.read_text()) if manifest.exists() else {}
    return (
        length or int(known.get("seq_len", 2048)),
        vocabulary or config.model.vocab_size or int(known.get("vocab_size", VOCABULARY)),
    )


# To weigh recomputation against communication: an H100 at 40% of its bf16 peak, and what one GPU gets of the
# network between nodes (400 Gbit/s) or of NVLink inside one.
FLOPS, BETWEEN_NODES, INSIDE_NODE = 4e14, 50e9, 300e9


def recommend(found: list[Plan], room: Room, length: int, nodes: int) -> Plan | None:
    """What fits and should be fastest: computing and sending, one after the other. Offload, and gathering at
    every traversal of a multi-pass model, only where nothing else fits. `length`: a GPU's tokens of a row."""

    def seconds(plan: Plan) -> float:
        tokens = plan.micro_batch * plan.accumulation * length
        sent = sum(plan.traffic.values()) / (BETWEEN_NODES if nodes > 1 else INSIDE_NODE)
        return (plan.hardware_flops or 0.0) * tokens / FLOPS + sent

    return min(
        (p for p in found if room.holds(p)),
        key=lambda p: (
            p.offload,
            p.gather == "traversal" and any(q.gather == "step" for q in found),
            seconds(p),
            -p.micro_batch,
        ),
        default=None,
    )


def command(run: str, plan: Plan, gpus: int, nodes: int) -> str:
    """The start of the run, given as its YAML and overrides, with a plan's settings."""
    name = f"ds_configs/zero{plan.stage}{'_offload' if plan.offload else ''}.json"
    parts = [f"deepspeed={name}", f"recompute={plan.recompute}", f"batch.micro_batch={plan.micro_batch}"]
    if plan.stage == 3:
        parts.append(f"zero3.gather={plan.gather}")
    launch = f"torchrun --nnodes {nodes} --nproc-per-node {gpus // nodes}"
    return f"{launch} -m wm_ds.train {run} {' '.join(parts)}"


def label(plan: Plan) -> str:
    stage = f"{plan.stage}{'+offload' if plan.offload else ''}{' ' + plan.gather if plan.gather else ''}"
    return f"{stage:22}{plan.recompute:12}{plan.micro_batch:>4}{plan.accumulation:>5}"


def text(
    options: argparse.Namespace,
    config: Config,
    rows: list[Row],
    length: int,
    found: list[Plan],
    best: Plan | None,
    room: Room,
) -> str:
    """The table: of each stage and recomputation the largest micro-batch that fits, or all with --all."""
    total = sum(torch.Size(r.shape).numel() for r in rows)
    names = list(found[0].parts)
    lines = [
        f"{options.config}: {total:,} parameters, rows of {length}, precision {config.precision}; "
        f"{options.gpus} GPUs of {options.gpu_memory:g} GB ({room.gpu / GIB:.1f} GiB to use) on "
        f"{options.nodes} node{'s' * (options.nodes > 1)}"
        + (f", each row on {config.sequence_parallel} GPUs" if config.sequence_parallel > 1 else ""),
        "GiB per GPU; states by arithmetic, activations from the model on meta tensors",
        f"{'ZeRO':22}{'recompute':12}{'mb':>4}{'acc':>5}"
        + "".join(f"{SHORT.get(n, n):>10}" for n in names)
        + f"{'peak':>9}{'sent':>9}",
    ]
    shown = found
    if not options.all:
        shown = []
        for key in dict.fromkeys((p.stage, p.offload, p.gather, p.recompute) for p in found):
            same = [p for p in found if (p.stage, p.offload, p.gather, p.recompute) == key]
            shown.append(
                max((p for p in same if room.holds(p)), key=lambda p: p.micro_batch, default=same[0])
            )
    for plan in shown:
        cells = "".join(f"{size / GIB:>10.2f}" for size in plan.parts.values())
        mark = " <-" if plan is best else ""
        if not room.holds(plan):
            mark = "  does not fit" if plan.peak > room.gpu else "  exceeds the host memory"
        sent = sum(plan.traffic.values()) / GIB
        lines.append(f"{label(plan)}{cells}{plan.peak / GIB:>9.2f}{sent:>9.2f}{mark}")
    run = [options.config, *options.overrides]
    if best is None:
        lines.append("nothing fits: more GPUs, a shorter row, or a smaller model")
    else:
        spent = ", ".join(f"{name} {size / GIB:.2f}" for name, size in best.traffic.items()) or "nothing"
        lines += [
            f"recommended: {command(' '.join(run), best, options.gpus, options.nodes)}",
            f"  each GPU sends a step, GiB: {spent}",
            *(f"  {note}" for note in best.notes),
        ]
        if best.offload:
            lines.append(f"  host memory per node: {best.host * room.gpus_per_node / GIB:.2f} GiB")
        if best.hardware_flops:
            lines.append(f"  hardware GFLOP per token with recomputation: {best.hardware_flops / 1e9:.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
