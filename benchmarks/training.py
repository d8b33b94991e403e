#!/usr/bin/env python3
"""Speed of a training step as ratios, all inside one process on the same data and the same head and loss.

    python benchmarks/training.py                                the paper's shape (slow on a CPU)
    python benchmarks/training.py --layers 4 --width 128 --length 256 --repeats 3
    python benchmarks/training.py --engine               also DeepSpeed against a bare loop, 1 and 2 ranks

Candidates run in turn (interleaved), `--repeats` times after one warm-up each; medians are compared, so that
a machine that slows down slows down all. `x lean` divides the ratio to Qwen3 by the ratio of FLOPs that the
model's own schedule needs: 1.0 is as fast per FLOP as Qwen3. Only ratios mean something elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import machine_line
from benchmarks.naive import naive_hidden
from benchmarks.turns import take_turns
from wm_ds.config import load as configuration
from wm_ds.distributed import process_group  # before anything that imports DeepSpeed
from wm_ds.engine.loss import TokenLoss, cross_entropy_sum
from wm_ds.families import build_model, model_config
from wm_ds.plan.flops import training

Step = Callable[[], None]


@dataclass(frozen=True)
class Options:
    """What to compare: the command line's options, see main."""

    layers: int
    width: int
    length: int
    rows: int
    repeats: int
    vocabulary: int
    channels: list[int]
    policies: list[str]
    precision: str
    device: str
    stage: int
    naive: bool
    lckv: bool
    engine: bool
    cpu_time: bool
    profile: bool
    json: Path | None
    engine_rank: bool


def settings(options: Options, family: str, k: int | None, recompute: str) -> dict[str, Any]:
    """A run's configuration for one candidate."""
    width, layers = options.width, options.layers
    model: dict[str, Any] = {
        "family": family,
        "vocab_size": options.vocabulary,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": width * 3 // 16,
    }
    if family == "whitematter":
        model |= {
            "num_kv_channels": min(k or 1, layers),
            "num_groups": 8,
            "no_grad_passes": 1,
            "grad_passes": 2,
        }
    if family == "lckv":
        model |= {"warmup_layers": 4, "num_groups": 1, "no_grad_passes": 7, "grad_passes": 2}
    return {
        "run": {"dir": "unused"},
        "model": model,
        "data": {"train": "unused"},
        "batch": {"global_batch": options.rows, "micro_batch": options.rows},
        "optim": {"lr": 1e-3, "ns_dtype": "float32"},
        "precision": options.precision,
        "recompute": recompute,
        "steps": 1000,
    }


def candidates(options: Options) -> dict[str, tuple[Step, float | None]]:
    """Name -> (one forward and backward, FLOPs per token)."""
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.length)
    ids = torch.randint(0, options.vocabulary, shape, generator=generator)
    labels = torch.randint(0, options.vocabulary, shape, generator=generator)
    documents = torch.zeros(shape, dtype=torch.int32)
    wanted = [("vanilla", None, "none")]
    for k in options.channels:
        wanted += [("whitematter", k, policy) for policy in options.policies]
    if options.lckv:
        wanted.append(("lckv", None, "none"))
    found: dict[str, tuple[Step, float | None]] = {}
    for family, k, policy in wanted:
        config = configuration.parse(settings(options, family, k, policy))
        hf = model_config(config.model, vocab_size=options.vocabulary, seq_len=options.length, eos_id=None)
        lm = build_model(hf, seed=0, recompute=policy).to(options.device).train()
        module = TokenLoss(lm)

        def step(module: TokenLoss = module, naive: bool = False) -> None:
            with torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "autocast"):
                arguments = [x.to(options.device) for x in (ids, labels, documents)]
                if naive:
                    hidden = naive_hidden(module.lm, arguments[0], arguments[2])
                    weight = module.lm.get_output_embeddings().weight
                    loss = cross_entropy_sum(hidden.flatten(0, 1), weight, arguments[1].flatten())
                else:
                    loss = module(*arguments)
            loss.backward()
            module.zero_grad(set_to_none=True)

        cost = training(hf, options.length, policy)
        name = f"{family}{'' if k is None else f' k={k}'}{'' if policy == 'none' else f', {policy}'}"
        found[name] = (step, None if cost is None else cost.hardware)
        if family == "whitematter" and policy == "none" and options.naive:
            found[f"naive k={k}"] = (lambda step=step: step(naive=True), None)
    return found


def medians(steps: dict[str, Step], repeats: int, cpu_time: bool = False) -> dict[str, float]:
    """Median seconds of each, run in turn after one warm-up."""
    seconds = take_turns(steps, repeats, cpu_time=cpu_time)
    return {name: median(values) for name, values in seconds.items()}


def compare(options: Options) -> dict[str, dict[str, float]]:
    """Ratios to Qwen3 of every candidate."""
    found = candidates(options)
    steps = {name: step for name, (step, _) in found.items()}
    seconds = medians(steps, options.repeats, options.cpu_time)
    base, base_flops = seconds["vanilla"], found["vanilla"][1]
    result: dict[str, dict[str, float]] = {}
    for name, (_, flops) in found.items():
        row = {"seconds": seconds[name], "to qwen3": seconds[name] / base}
        if flops and base_flops:
            row |= {"flops": flops / base_flops, "x lean": seconds[name] / base * base_flops / flops}
        result[name] = row
    return result


# DeepSpeed's engine against a bare loop: separate processes, since an engine changes torch for good


def engine_rank(options: Options) -> None:
    """One rank of the engine comparison: prints seconds of a step, and at world 1 of the bare loop."""
    from wm_ds.engine.engine import build

    world = process_group.init(timeout_minutes=10)
    raw = settings(options, "whitematter", options.channels[0], "group")
    raw["batch"] = {"global_batch": options.rows * world.size, "micro_batch": options.rows}
    config = configuration.parse(raw)
    hf = model_config(config.model, vocab_size=options.vocabulary, seq_len=options.length, eos_id=None)
    generator = torch.Generator().manual_seed(world.rank)
    shape = (options.rows, options.length)
    batch = {
        "input_ids": torch.randint(0, options.vocabulary, shape, generator=generator),
        "labels": torch.randint(0, options.vocabulary, shape, generator=generator),
        "document_ids": torch.zeros(shape, dtype=torch.int32),
        "sample_ids": torch.arange(options.rows),
    }
    lm = build_model(hf, seed=0, recompute="group")
    steps: dict[str, Step] = {}
    if world.size == 1:
        from wm_ds.engine.deepspeed_config import table_for
        from wm_ds.optim.muon import MuonAdamW, Settings
        from wm_ds.optim.partition import Fragment, Master

        bare = TokenLoss(build_model(hf, seed=0, recompute="group").to(world.device)).train()
        parameters = dict(bare.lm.named_parameters())
        optimizer = MuonAdamW(
            table_for(config, bare.lm), parameters, Settings(lr=1e-3, ns_dtype=torch.float32)
        )
        found = [(i, n, p) for i, g in enumerate(optimizer.param_groups) for p in g["params"]
                 for n, q in parameters.items() if q is p]  # fmt: skip
        optimizer.attach(
            [Master(p, i, (n,)) for i, n, p in found],
            [Fragment(n, tuple(p.shape), 0, p.numel(), p, 0, i) for i, n, p in found],
            world.device,
        )

        def loop() -> None:
            with torch.autocast(world.device.type, torch.bfloat16, enabled=options.precision == "autocast"):
                arguments = {k: v.to(world.device) for k, v in batch.items() if k != "sample_ids"}
                loss = bare(**arguments) / batch["labels"].numel()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(bare.parameters(), 1.0)
            optimizer.step()
            optimizer.count_update()
            optimizer.zero_grad(set_to_none=True)

        steps["bare"] = loop
    zero = {"stage": options.stage}
    engine = build(config, {"zero_optimization": zero}, lm, world, options.length)
    steps["engine"] = lambda: engine.step([batch])
    seconds = medians(steps, options.repeats)
    if world.is_main:
        print(json.dumps(seconds), flush=True)
    process_group.shutdown()


def engine_comparison(options: Options) -> dict[str, float]:
    """Ratios: engine to bare loop at one rank, and two ranks' step (twice the data) to one rank's."""
    answers = []
    for size in (1, 2):
        port, ranks = str(process_group.free_port()), []
        for rank in range(size):
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "OMP_NUM_THREADS": "1",
                "TORCHDYNAMO_DISABLE": "1",
            }
            command = [sys.executable, __file__, "--engine-rank", *sys.argv[1:]]
            ranks.append(
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
            )
        outputs = [r.communicate()[0] for r in ranks]
        if any(r.returncode for r in ranks):
            raise RuntimeError(
                f"the engine comparison on {size} ranks failed; run with --engine-rank to see why"
            )
        answers.append(json.loads(outputs[0].strip().splitlines()[-1]))
    one, two = answers
    return {
        "engine / bare loop, 1 rank": one["engine"] / one["bare"],
        "2 ranks / 1 rank, twice the data": two["engine"] / one["engine"],
    }


def profile(options: Options) -> str:
    """Where a step's time goes, by operator, for the first WhiteMatter candidate."""
    steps = candidates(options)
    name = next(n for n in steps if n.startswith("whitematter"))
    steps[name][0]()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        steps[name][0]()
    return profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=18)


def main() -> int:
    parser = argparse.ArgumentParser(description="Training speed as ratios.")
    for name, value in (("layers", 16), ("width", 512), ("length", 2048), ("rows", 1), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=value, help="default %(default)s")
    parser.add_argument("--vocabulary", type=int, default=8192, help="default %(default)s")
    parser.add_argument("--channels", type=int, nargs="+", default=[8, 16], help="k (default 8 16)")
    parser.add_argument(
        "--policies", nargs="+", default=["none", "group"], help="recompute (default none group)"
    )
    parser.add_argument("--precision", choices=["fp32", "autocast"], default="fp32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--stage", type=int, default=0, help="ZeRO stage of --engine (default %(default)s)")
    parser.add_argument("--naive", action="store_true", help="also the naive passes (benchmarks/naive.py)")
    parser.add_argument("--lckv", action="store_true", help="also LCKV, 7 + 2 passes")
    parser.add_argument(
        "--engine", action="store_true", help="also DeepSpeed against a bare loop, 2 ranks against 1"
    )
    parser.add_argument(
        "--cpu-time", action="store_true", help="count this process's CPU time: for machines with other work"
    )
    parser.add_argument("--profile", action="store_true", help="only show where a step's time goes")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--engine-rank", action="store_true", help=argparse.SUPPRESS)
    options = Options(**vars(parser.parse_args()))
    if options.engine_rank:
        engine_rank(options)
        return 0
    if options.profile:
        print(profile(options))
        return 0
    result: dict[str, Any] = {"steps": compare(options)}
    print(f"{'':28}{'seconds':>9}{'to qwen3':>10}{'flops':>8}{'x lean':>8}")
    for name, row in result["steps"].items():
        cells = f"{row['seconds']:>9.3f}{row['to qwen3']:>10.2f}"
        if "flops" in row:
            cells += f"{row['flops']:>8.2f}{row['x lean']:>8.2f}"
        print(f"{name:28}{cells}")
    if options.engine:
        result["engine"] = engine_comparison(options)
        for name, ratio in result["engine"].items():
            print(f"{name:36}{ratio:.3f}")
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(f"at the end: {machine_line()}")
    if options.json:
        options.json.write_text(json.dumps(result | {"load": load, "machine": machine_line()}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
