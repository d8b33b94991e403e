"""One rank of a checkpoint test: builds small engines and trains, saves or resumes them as the plan says.

Run by `tests/support/checkpoint_launch.py`; plan and answer are JSON files.
The model is a toy with every kind of tensor: an odd square matrix whose rows straddle partitions, a stack of
matrices, norms, a tied or free head, a frozen parameter and a persistent buffer.
"""

import dataclasses
import hashlib
import json
import logging
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from wm_ds.distributed import log as terminal
from wm_ds.distributed import process_group
from wm_ds.optim import muon, param_rules, partition

VOCAB, WIDTH, ROWS, LENGTH = 50, 63, 12, 8  # 12 rows divide over 1, 2, 3 and 4 ranks


class Toy(nn.Module):
    """A language model in name only: embedding, matrices, a stack of matrices, norm, head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        layer = nn.Module()
        layer.self_attn = nn.Module()
        layer.self_attn.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)  # 63 x 63: odd, never evenly cut
        layer.mlp = nn.Module()
        layer.mlp.up_proj = nn.Linear(WIDTH, 41, bias=False)
        layer.mlp.down_proj = nn.Linear(41, WIDTH, bias=False)
        self.layers = nn.ModuleList([layer])
        self.pool = nn.Module()
        self.pool.key = nn.Module()
        self.pool.key.proj = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / WIDTH**0.5)
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(WIDTH))
        self.q_norm = nn.Module()
        self.q_norm.weight = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=False)
        self.register_buffer("channel_map", torch.arange(3))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


class Loss(nn.Module):
    """What the engine trains: the toy as `lm` and the summed squared errors of its logits, with noise."""

    def __init__(self, tied: bool, noise: float) -> None:
        super().__init__()
        self.lm, self.noise = Toy(tied), noise

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        lm, layer = self.lm, self.lm.layers[0]
        h = lm.embed_tokens(ids)
        if self.noise:
            # The loss depends on all generators, and a run that does not restore them goes its own way.
            h = h + self.noise * (random.random() + np.random.random()) * torch.randn_like(h)
        h = h + layer.self_attn.q_proj(h * lm.norm.weight * lm.q_norm.weight)
        h = h + layer.mlp.down_proj(torch.tanh(layer.mlp.up_proj(h)))
        h = h + torch.einsum("bti,kji->btj", h, lm.pool.key.proj.to(h.dtype)) / 3
        logits = lm.lm_head(h).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


def rows(step: int, rank: int, world: int) -> torch.Tensor:
    """This rank's rows of the global batch of `step`, which depends on the step alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    batch = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)
    return batch[rank * ROWS // world : (rank + 1) * ROWS // world]


def build(case: dict, world: process_group.World) -> tuple:
    """(engine, optimizer) of a case: stage, precision, optimizer, offload, tied, noise, seed."""
    import deepspeed

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(case.get("seed", 0))
    module = Loss(case.get("tied", False), case.get("noise", 0.0))
    named = {n.removeprefix("lm."): p for n, p in module.named_parameters() if p.requires_grad}
    shapes = [(n, tuple(p.shape)) for n, p in named.items()]
    table = param_rules.parameter_table(shapes, optimizer=case.get("optimizer", "muon"), weight_decay=0.1)
    optimizer = muon.MuonAdamW(table, named, muon.Settings(lr=2e-3, ns_dtype=torch.float32))
    precision, zero = case.get("precision", "fp32"), {"stage": case["stage"]}
    if case["stage"] == 3:
        zero |= {"stage3_param_persistence_threshold": 100}  # norms stay whole, matrices are cut
    if case.get("offload"):
        zero |= {"offload_optimizer": {"device": "cpu"}}
    settings = {
        "train_micro_batch_size_per_gpu": ROWS // world.size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": precision == "bf16"},
    }
    if precision == "autocast":
        settings["torch_autocast"] = {
            "enabled": True,
            "dtype": "bfloat16",
            "lower_precision_safe_modules": [],
        }
    optimizer.skip = True  # DeepSpeed's bf16 wrapper of stage 0 makes a step while it is built
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    optimizer.skip = False
    optimizer.attach(partition.masters(engine), partition.fragments(engine), world.device)
    return engine, optimizer


def train_step(engine, optimizer, step: int, world: process_group.World) -> float:
    """One optimizer step; returns the mean loss over all ranks."""
    loss = engine(rows(step, world.rank, world.size))
    engine.backward(loss)
    engine.step()
    optimizer.count_update()
    return process_group.all_reduce_sum([float(loss.detach())], world.device)[0] / world.size


def full_weights(engine) -> dict[str, str]:
    """A digest of the model's own weights (not the masters), whole and in fp32, by name."""
    import deepspeed

    found = {}
    for name, p in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([p], enabled=hasattr(p, "ds_id")):
            found[name.removeprefix("lm.")] = digest(p)
    return found


def digest(tensor: torch.Tensor) -> str:
    """sha256 of a tensor's values in fp32."""
    return hashlib.sha256(tensor.detach().float().contiguous().numpy().tobytes()).hexdigest()


class Kept(logging.Handler):
    """What is logged, in a list. The terminal has it, too: what a killed rank had said is read from there."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run_case(case: dict, world: process_group.World) -> dict:
    """Train to step `steps`, from a checkpoint if `resume` is given; an error is part of the answer."""
    from wm_ds.checkpoint import writer
    from wm_ds.checkpoint.format import Reader
    from wm_ds.checkpoint.layout_proof import LayoutError
    from wm_ds.checkpoint.manager import CheckpointError, Checkpoints
    from wm_ds.checkpoint.writer import SavePolicy
    from wm_ds.distributed.host_group import Agreement
    from wm_ds.run.claim import Attempt
    from wm_ds.run.stopping import Stopping

    engine, optimizer = build(case, world)
    lines: list[str] = []
    answer: dict = {"losses": {}, "lines": lines, "rows": {}, "stalls": []}

    logger, kept = logging.getLogger("wm_ds"), Kept(lines)
    if world.rank == 0:
        logger.addHandler(kept)
    store = Checkpoints(
        engine,
        case["dir"],
        policy=SavePolicy(
            case.get("keep_last", 100), case.get("keep_every", 0), case.get("background", True)
        ),
        timeout_s=case.get("timeout_s", 60.0),
        attempt=Attempt(Path(case["dir"]), case["attempt"]) if "attempt" in case else None,
    )
    reads: list[int] = []
    original = Reader._slice
    Reader._slice = lambda *a: reads.append(a[4] - a[3]) or original(*a)
    stopping = Stopping(case["dir"], Agreement(case.get("timeout_s", 60.0)), time_limit_s=case.get("limit_s"))
    stopping.install()
    if world.rank == case.get("die_rank"):
        die_at_event(case["dir"], case["die_event"])
    if "free_bytes" in case:
        writer.psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=case["free_bytes"]))
    if world.rank == case.get("hang_rank"):  # a file system that does not answer
        writer.write_fragments = lambda *_: time.sleep(90)
    if world.rank == case.get("limit_rank"):  # no file larger than this, as a full disk would have it
        resource.setrlimit(resource.RLIMIT_FSIZE, (case["limit_bytes"], resource.RLIM_INFINITY))
    try:
        first = 0
        if "resume" in case:  # None: whatever the folder holds
            path = store.choose(case["resume"])
            if path is not None:
                client = store.load(path)
                first = client["step"]
                answer["client"] = client
        store.prove("the first step")
        if "swap" in case:
            swap(*case["swap"])
        if case.get("save_first"):
            store.save(first, {"step": first})
        for step in range(first + 1, case["steps"] + 1):
            answer["losses"][step] = train_step(engine, optimizer, step, world)
            answer["rows"][step] = rows(step, world.rank, world.size).flatten().tolist()
            reason = stopping.check(save_failed=store.failed)
            if reason is not None or step in case.get("save_at", []):
                saved = store.save(step, {"step": step, "note": "é"}, wait=reason is not None)
                answer["stalls"].append(None if saved is None else saved.stall_s)
            if reason is not None:
                answer["stopped"] = [step, reason]
                break
            print(f"step {step}", flush=True)
            time.sleep(case.get("pause_s", 0.0))
        store.wait()
        answer["reads"] = [len(reads), max(reads, default=0)]
        if case.get("weights"):
            answer["weights"] = full_weights(engine)
    except (CheckpointError, LayoutError) as error:
        answer["error"] = str(error)
        print(f"failed: {error}", flush=True)
    Reader._slice = original
    logger.removeHandler(kept)
    engine.destroy()
    return answer


def swap(one: str, other: str) -> None:
    """From now on checkpoints look for each of two parameters where the other is."""
    from wm_ds.checkpoint import engine_state

    renamed = {one: other, other: one}

    def wrong(engine) -> list:
        found = partition.fragments(engine)
        return [dataclasses.replace(f, name=renamed.get(f.name, f.name)) for f in found]

    engine_state.fragments = wrong


def die_at_event(folder: str, number: int) -> None:
    """SIGKILL this rank at its `number`-th file operation below `folder` (open, rename, remove, ...)."""
    count = 0

    def watch(event: str, arguments: tuple) -> None:
        nonlocal count
        changes = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")
        if event in changes and str(arguments[0]).startswith(folder):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def prepare(env: dict[str, str], log: str, errors: str | None = None) -> None:
    """Make this forked process a rank: its environment, its log (that of `errors` too), one thread."""
    for descriptor, name in ((1, log), (2, errors or log)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(env)
    torch.set_num_threads(1)


def trainer(arguments: list[str], errors: str | None, env: dict[str, str], log: str) -> None:
    """One rank of the real trainer, as `python -m wm_ds.train ARGUMENTS` would be."""
    from wm_ds import train

    prepare(env, log, errors)
    code = train.main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(plan: str, answer: str, env: dict[str, str], log: str) -> None:
    """One rank: run the plan's cases in order; the answer is rewritten after each."""
    prepare(env, log)
    terminal.start()
    world = process_group.init(timeout_minutes=2)
    answers = []
    for case in json.loads(Path(plan).read_text()):
        answers.append(run_case(case, world))
        part = Path(f"{answer}.part")
        part.write_text(json.dumps(answers))
        part.rename(answer)
    process_group.barrier()
    process_group.shutdown()
