"""Several ranks train tiny models as the cases of a plan say; the parent compares them with one process.

`run(world, cases)` starts the ranks once and has them go through all cases. Everything that both sides must
agree on (models, batches) is made here; what is compared is not: the reference in test_numerics.py is plain
PyTorch.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROWS, LENGTH, VOCABULARY = 48, 10, 40  # 48 rows divide over 1-4 ranks x 1, 2, 4 micro-batches


@dataclass(frozen=True)
class Case:
    """One engine and its steps."""

    zero: dict[str, Any] = field(default_factory=lambda: {"stage": 0})
    family: str = "vanilla"
    tied: bool = False
    accumulation: int = 1
    recompute: str = "none"
    precision: str = "fp32"
    optimizer: str = "muon"
    update_scale: str = "rms"
    clip: float = 0.0
    clip_rule: str = "global"
    steps: int = 5
    poison: bool = False
    """Token 0's embedding is NaN, and the last rank meets it in steps 2, 4, 5 and 6."""
    fixed: bool = False
    """Every step has the first step's batch."""
    evaluate: bool = False
    """Evaluate between the steps, which disturbs stage 3's trace of parameters."""
    streamed: bool = False
    """The engine is given the weights one by one instead of a whole model, as the trainer does it."""
    lopsided: bool = False
    """Rows of 24 tokens; on 4 ranks with 2 micro-batches each, micro-batches have 0, 1, 20 or all labels."""
    ns_dtype: str = "float32"
    lr: float = 1e-2
    seed: int = 0
    start: dict[str, Any] = field(default_factory=dict)
    """Further fields of the model: the start of WhiteMatter's passes, and their numbers."""
    json: dict[str, Any] = field(default_factory=dict)
    """The rest of DeepSpeed's JSON."""


def offload(stage: int, *parts: str) -> dict[str, Any]:
    """A zero_optimization section with `optimizer` and/or `param` on the CPU."""
    return {"stage": stage, **{f"offload_{p}": {"device": "cpu"} for p in parts}}


def batch(step: int, lopsided: bool = False) -> dict[str, Tensor]:
    """The global batch of a step: documents inside rows, and rows with 0, 1, 3 or all labels valid."""
    generator = torch.Generator().manual_seed(100 + step)
    length = 24 if lopsided else LENGTH
    ids = torch.randint(1, VOCABULARY, (ROWS, length), generator=generator)
    labels = torch.randint(1, VOCABULARY, (ROWS, length), generator=generator)
    if lopsided:
        for block, part in enumerate(labels.view(8, -1)):  # a micro-batch of a rank
            part[(0, 1, 20, part.numel())[(block + block // 4 + step) % 4] :] = -100
    else:
        valid = torch.tensor([0, 0, 0, 1, 3, length]).repeat_interleave(ROWS // 6)
        valid = valid[torch.randperm(ROWS, generator=generator)] if step % 2 else valid
        labels[torch.arange(length) >= valid[:, None]] = -100
    documents = torch.zeros(ROWS, length, dtype=torch.int32)
    documents[1::2, 4:] = 1
    documents[::3, 5:] = 2
    return {"input_ids": ids, "labels": labels, "document_ids": documents, "sample_ids": torch.arange(ROWS)}


def settings(case: Case, ranks: int) -> dict[str, Any]:
    """The run's configuration as plain dictionaries."""
    model: dict[str, Any] = {
        "family": case.family,
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": case.tied,
        "initializer_range": 0.2,
    }
    if case.family == "whitematter":
        model |= {
            "num_kv_channels": 2,
            "router_stride": 2,
            "num_groups": 3,
            "no_grad_passes": 1,
            "grad_passes": 2,
        }
    model |= case.start
    if case.family == "lckv":
        model |= {"warmup_layers": 1, "no_grad_passes": 1, "grad_passes": 2}
    if case.family == "fusedkv":
        model |= {"own_kv_layers": 2}
    if case.family == "yoco":
        model |= {"own_kv_layers": 1}
    return {
        "run": {"dir": "unused", "seed": case.seed},
        "model": model,
        "data": {"train": "unused"},
        "batch": {"global_batch": ROWS, "micro_batch": ROWS // ranks // case.accumulation},
        "optim": {
            "name": case.optimizer,
            "lr": case.lr,
            "clip": case.clip,
            "clip_rule": case.clip_rule,
            "update_scale": case.update_scale,
            "ns_dtype": case.ns_dtype,
            "warmup": 2,
        },
        "precision": case.precision,
        "recompute": case.recompute,
        "steps": 8,
        "guard": {"max_skipped": 3},
    }


def hf_config(case: Case) -> Any:
    """The Hugging Face configuration of a case's model."""
    from wm_ds.config import load as configuration
    from wm_ds.families import model_config

    config = configuration.parse(settings(case, 1))
    return model_config(config.model, vocab_size=VOCABULARY, seq_len=LENGTH, eos_id=0)


def model(case: Case) -> torch.nn.Module:
    """The fresh model of a case: the same on every rank and in the parent; no parameter keeps a neutral
    start."""
    from wm_ds.families import build_model

    lm = build_model(hf_config(case), seed=case.seed, recompute=case.recompute)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
        if case.poison:
            lm.get_input_embeddings().weight[0] = float("nan")
    return lm


def run(
    world: int, cases: list, timeout_s: float = 600, worker: str = "tests.support.numerics_worker"
) -> list[list[dict[str, Any]]]:
    """results[case][rank]: losses, norms, this rank's part of the first gradient and of the final weights.

    Another `worker` may take plain dictionaries as cases and answer something else.
    """
    from tests.support import checkpoint_launch

    main = importlib.import_module(worker).main
    with tempfile.TemporaryDirectory(prefix="numerics-") as name:
        folder = Path(name)
        plan = [c if isinstance(c, dict) else asdict(c) for c in cases]
        (folder / "plan.json").write_text(json.dumps(plan))
        ranks = checkpoint_launch.fork(main, [(folder,)] * world, folder)
        codes = checkpoint_launch.finish(ranks, timeout_s)
        assert codes == [0] * world, f"exit codes {codes}\n{checkpoint_launch.logs(folder)}"
        answers = [torch.load(folder / f"answer_{r}.pt", weights_only=False) for r in range(world)]
        return [[answers[r][i] for r in range(world)] for i in range(len(cases))]


def assemble(parts: list[list[tuple[str, tuple[int, ...], int, int, Tensor]]]) -> dict[str, Tensor]:
    """Whole tensors from every rank's fragments; every element must be covered."""
    whole: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    for fragments in parts:
        for name, shape, start, stop, values in fragments:
            flat = whole.setdefault(name, torch.empty(torch.Size(shape).numel()))
            flat[start:stop] = values
            covered.setdefault(name, torch.zeros(flat.numel(), dtype=torch.bool))[start:stop] = True
    shapes = {name: shape for fragments in parts for name, shape, *_ in fragments}
    assert all(c.all() for c in covered.values())
    return {name: flat.view(shapes[name]) for name, flat in whole.items()}
