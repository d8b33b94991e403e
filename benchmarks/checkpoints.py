#!/usr/bin/env python
"""What checkpoints cost: stall of a save in the background against a blocking one, disk, loading.

python benchmarks/checkpoints.py [--folder DIR] [--size 100M|10M] [--json FILE]

Trains a WhiteMatter model with Muon at ZeRO 2 on two ranks (CPU: small batches, the numbers of interest are
times of saves, not of steps) and measures
  stall       seconds that training waits for one save, the slower rank, median over the saves of each kind
  steps       seconds of a training step, with and without a save being written beside it
  disk        bytes of a checkpoint against the minimum: fp32 weights and optimizer state, each once
  load        seconds until the state is back, at the same size, and on one rank at ZeRO 3 (elastic)
Each phase runs in fresh processes. The page cache is warm: what was just written is read from memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from wm_ds.config import load as configuration
from wm_ds.distributed import process_group

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, dict[str, int]] = {
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 16384},
    "10M": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "vocab_size": 8192},
}
SEQ_LEN, SAVES = 32, 3


def engine_of(size: str, stage: int, run_dir: str, world: process_group.World) -> Any:
    """The trainer's own engine around a model of that size."""
    from wm_ds.config.deepspeed_json import load_deepspeed
    from wm_ds.engine.engine import build
    from wm_ds.families import build_model, model_config

    shape = SIZES[size]
    raw: dict[str, Any] = {
        "run": {"dir": run_dir},
        "model": {
            **shape,
            "num_attention_heads": shape["hidden_size"] // 64,
            "num_key_value_heads": shape["hidden_size"] // 128,
            "head_dim": 64,
            "num_kv_channels": 4,
            "num_groups": 2,
            "no_grad_passes": 0,
            "grad_passes": 1,
        },
        "data": {"train": "unused"},
        "batch": {"global_batch": 2, "micro_batch": 2 // world.size},
        "optim": {"lr": 1e-3, "ns_steps": 1},
        "precision": "fp32",
        "deepspeed": str(ROOT / f"ds_configs/zero{stage}.json"),
        "steps": 1000,
    }
    config = configuration.parse(raw)
    hf = model_config(config.model, vocab_size=shape["vocab_size"], seq_len=SEQ_LEN, eos_id=None)
    lm = build_model(hf, seed=0)
    return build(config, load_deepspeed(config.deepspeed), lm, world, SEQ_LEN)


def one_step(engine: Any, step: int, world: process_group.World) -> float:
    """Seconds of one training step on random tokens."""
    generator = torch.Generator().manual_seed(step)
    rows = 2 // world.size
    ids = torch.randint(0, 8192, (rows, SEQ_LEN), generator=generator)
    batch = {
        "input_ids": ids,
        "labels": ids.roll(-1, 1),
        "document_ids": torch.zeros(rows, SEQ_LEN, dtype=torch.int32),
        "sample_ids": torch.arange(rows),
    }
    started = time.perf_counter()
    engine.step([batch])
    return time.perf_counter() - started


def save_phase(world: process_group.World, size: str, folder: str) -> dict[str, Any]:
    from wm_ds.checkpoint.manager import Checkpoints
    from wm_ds.checkpoint.writer import SavePolicy
    from wm_ds.distributed.host_group import Agreement

    engine = engine_of(size, 2, folder, world)
    alone = [one_step(engine, i, world) for i in range(3)][1:]
    stalls: dict[str, list[float]] = {"blocking": [], "background": []}
    writes: list[float] = []
    beside: list[float] = []
    step, share = 3, 0
    for kind in ("blocking", "background"):
        store = Checkpoints(engine.ds, folder, policy=SavePolicy(1, background=kind == "background"))
        for _ in range(SAVES + (kind == "background")):
            step += 1
            one_step(engine, step, world)
            process_group.barrier()
            started = time.perf_counter()
            saved = store.save(step, {"step": step})
            stalls[kind].append(time.perf_counter() - started)
            assert saved is not None
            while kind == "background" and saved.path is None and not store.failed:
                step += 1  # trains on until the write has ended, on both ranks alike
                seconds = one_step(engine, step, world)
                ended = saved.path is not None
                beside.append(seconds)
                if process_group.all_reduce_max([float(ended)], world.device)[0]:
                    break
            store.wait()
            share = saved.bytes
            if kind == "background":
                writes.append(saved.write_s)
    agreement, asked = Agreement(), []
    for _ in range(200):
        started = time.perf_counter()
        agreement.maximum(0)
        asked.append(time.perf_counter() - started)
    # The first background save makes the snapshot's memory; it is reported apart.
    return {
        "blocking_stall_s": statistics.median(stalls["blocking"]),
        "background_stall_s": statistics.median(stalls["background"][1:]),
        "first_background_stall_s": stalls["background"][0],
        "background_write_s": statistics.median(writes[1:]),
        "step_s": statistics.median(alone),
        "step_beside_write_s": statistics.median(beside) if beside else float("nan"),
        "agreement_s": statistics.median(asked),
        "snapshot_bytes": share,
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.ds.module.parameters()),
    }


def load_phase(world: process_group.World, size: str, folder: str, stage: int) -> dict[str, Any]:
    from wm_ds.checkpoint.manager import Checkpoints

    engine = engine_of(size, stage, folder, world)
    store = Checkpoints(engine.ds, folder)
    path = store.choose()
    assert path is not None
    process_group.barrier()
    started = time.perf_counter()
    store.load(path)
    process_group.barrier()
    return {"load_s": time.perf_counter() - started}


def rank_main(phase: str, rank: int, world_size: int, port: int, size: str, folder: str, queue: Any) -> None:
    """One rank of a phase; the slowest rank's numbers count."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    world = process_group.init(timeout_minutes=10)
    torch.set_num_threads(1)
    if phase == "save":
        numbers = save_phase(world, size, folder)
    else:
        numbers = load_phase(world, size, folder, stage=2 if phase == "load" else 3)
    names = sorted(numbers)
    slowest = process_group.all_reduce_max([float(numbers[n]) for n in names], world.device)
    if rank == 0:
        queue.put(dict(zip(names, slowest)))
    process_group.barrier()
    process_group.shutdown()


def run_phase(phase: str, world_size: int, size: str, folder: str) -> dict[str, float]:
    spawn = multiprocessing.get_context("spawn")
    queue, port = spawn.Queue(), process_group.free_port()
    ranks = [
        spawn.Process(target=rank_main, args=(phase, rank, world_size, port, size, folder, queue))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        sys.exit(f"error: phase {phase} failed, exit codes {[p.exitcode for p in ranks]}")
    return queue.get(timeout=10)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="where checkpoints are written (default: temporary)")
    parser.add_argument("--size", choices=SIZES, default="100M")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args()
    from wm_ds.checkpoint.format import read_manifest
    from wm_ds.checkpoint.manager import find_latest

    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=options.folder))
    try:
        result = run_phase("save", 2, options.size, str(folder))
        latest = find_latest(folder)
        assert latest is not None
        manifest = read_manifest(latest)
        minimum = sum(
            entry.numel * getattr(torch, state.dtype).itemsize
            for entry in manifest.tensors.values()
            for state in entry.states.values()
        )
        result["disk_bytes"] = sum(f.stat().st_size for f in latest.iterdir())
        result["minimum_bytes"] = minimum
        result["load_s"] = run_phase("load", 2, options.size, str(folder))["load_s"]
        result["elastic_load_s"] = run_phase("elastic", 1, options.size, str(folder))["load_s"]
    finally:
        shutil.rmtree(folder)
    r = result
    mib = 2**20
    print(f"{int(r['parameters']):,} parameters, ZeRO 2, two ranks, Muon, fp32 ({os.cpu_count()} CPU cores)")
    print(f"stall of a blocking save     {r['blocking_stall_s']:8.2f} s")
    print(
        f"stall of a background save   {r['background_stall_s']:8.2f} s   "
        f"{r['background_stall_s'] / r['blocking_stall_s']:.3f} of the blocking one; "
        f"the first {r['first_background_stall_s']:.2f} s"
    )
    print(f"written behind training in   {r['background_write_s']:8.2f} s")
    print(
        f"step without a save          {r['step_s']:8.2f} s   "
        f"while one is written x{r['step_beside_write_s'] / r['step_s']:.2f}"
    )
    print(f"agreement to go on           {1e3 * r['agreement_s']:8.2f} ms  per step")
    print(f"snapshot in host memory      {r['snapshot_bytes'] / mib:8.0f} MiB per rank")
    print(
        f"on disk                      {r['disk_bytes'] / mib:8.0f} MiB "
        f"{r['disk_bytes'] / r['minimum_bytes']:.5f} of the minimum"
    )
    print(f"load, two ranks, ZeRO 2      {r['load_s']:8.2f} s")
    print(f"load, one rank, ZeRO 3       {r['elastic_load_s']:8.2f} s")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
