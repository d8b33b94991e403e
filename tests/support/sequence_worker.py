"""One rank of tests/engine/test_sequence_parallel.py, forked by checkpoint_launch.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from wm_ds.distributed import (
    process_group,  # first: it prepares the environment that DeepSpeed reads at import
)

import torch  # isort: skip
import deepspeed.comm
from torch import Tensor
from torch.nn.attention import flex_attention

from tests.support import numerics, tiny
from tests.support.checkpoint_worker import prepare
from tests.support.numerics_worker import record_first_gradient
from wm_ds.config import load as configuration
from wm_ds.engine.engine import build
from wm_ds.engine.sequence_parallel import SequenceShard
from wm_ds.families import build_model, model_config
from wm_ds.model import Schedule, WhiteMatterForCausalLM
from wm_ds.optim.partition import fragments

LAYERS, CHANNELS, HEADS, KV_HEADS, HEAD_DIM, GROUPS, LENGTH, ROWS = 4, 3, 8, 4, 4, 3, 24, 2

# Documents that begin and end inside ranks' slices, a document over several slices, filler between and after.
DOCUMENTS = torch.tensor(
    [
        [0] * 5 + [1] * 13 + [-1] * 2 + [2] * 1 + [-1] * 3,
        [0] * 24,
        [0] * 6 + [1] * 6 + [2] * 12,
        [0] + [1] * 23,
    ],
    dtype=torch.int32,
)

SENT: list[tuple[int, ...]] = []
"""Shapes of all all-to-alls of this rank."""


def main(folder: Path, env: dict[str, str], log: str) -> None:
    prepare(env, log)
    world = process_group.init(timeout_minutes=5)
    real = deepspeed.comm.all_to_all_single

    def counted(output: torch.Tensor, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        SENT.append(tuple(tensor.shape))
        return real(output, tensor, *args, **kwargs)

    deepspeed.comm.all_to_all_single = counted
    # flex_attention differentiates on CPU, too, but refuses to before it tries.
    flex_attention._validate_device = lambda *tensors: None
    answers = []
    shards: dict[int, SequenceShard] = {}
    for plan in json.loads((folder / "plan.json").read_text()):
        if plan["kind"] == "engine":
            answers.append(train(plan, world))
            continue
        size = plan["ranks"]
        shards[size] = shards.get(size) or SequenceShard(world, size, 5.0)
        answers.append(bare(plan, shards[size], world))
    torch.save(answers, folder / f"answer_{world.rank}.pt")
    process_group.shutdown()


def bare_model(plan: dict[str, Any]) -> WhiteMatterForCausalLM:
    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    fields = {"num_groups": GROUPS, "k": CHANNELS} | plan["fields"]
    k = fields.pop("num_kv_channels", fields.pop("k"))
    lm = tiny.build(k, 2, LAYERS, **(sizes | {n: v for n, v in fields.items() if n != "k"}))
    lm.model.recompute = plan["recompute"]
    return lm.train()


def bare_batch(plan: dict[str, Any], group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and documents [B, T] of a sequence group's rows, and the loss's weights [B, T, D]."""
    ids = tiny.tokens(ROWS, LENGTH, seed=group)
    weight = torch.randn(
        ROWS, LENGTH, 24, generator=torch.Generator().manual_seed(group), dtype=torch.float64
    )
    return ids, DOCUMENTS[ROWS * (group % 2) :][:ROWS], weight


def bare(plan: dict[str, Any], shard: SequenceShard, world: process_group.World) -> dict[str, Any]:
    """The model alone in float64: its own positions' states, gradients summed over the group, residuals."""
    lm = bare_model(plan)
    lm.model.shard = shard
    lm.model.measure_residuals = True
    ids, documents, weight = bare_batch(plan, world.rank // shard.ranks)
    SENT.clear()
    hidden = lm.model(input_ids=ids, document_ids=documents).last_hidden_state
    forward = list(SENT)
    residuals = lm.model.residuals
    SENT.clear()
    (hidden * shard.share(weight, 1)).sum().backward()
    backward = list(SENT)
    gradients = {}
    for name, p in lm.named_parameters():
        if p.grad is not None:
            gradients[name] = shard.total(p.grad)
    lm.eval()
    with torch.no_grad():
        schedule = Schedule.cyclic(plan["groups"], 5, start=lm.config.prefill_schedule().start)
        evaluated = lm.model(
            input_ids=ids, document_ids=documents, schedule=schedule, use_cache=False
        ).last_hidden_state
    return {
        "hidden": hidden.detach(),
        "evaluated": evaluated,
        "residuals": residuals,
        "gradients": gradients,
        "forward": forward,
        "backward": backward,
    }


def case(plan: dict[str, Any]) -> numerics.Case:
    return numerics.Case(
        family="whitematter",
        recompute=plan["recompute"],
        clip=0.5,
        clip_rule=plan["clip_rule"],
        precision=plan["precision"],
    )


def engine_settings(plan: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The run's configuration, for 8 rows a step in two micro-batches."""
    settings = numerics.settings(case(plan), 1)
    settings["model"] |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    settings["batch"] = {"global_batch": 8, "micro_batch": 4 * plan["ranks"] // ranks}
    settings["sequence_parallel"] = plan["ranks"]
    return settings


def engine_model(plan: dict[str, Any]) -> WhiteMatterForCausalLM:
    """The fresh model, the same everywhere; no parameter keeps a neutral start."""
    config = configuration.parse(engine_settings(plan, 4))
    hf = model_config(config.model, vocab_size=numerics.VOCABULARY, seq_len=LENGTH, eos_id=0)
    lm = build_model(hf, seed=0, recompute=plan["recompute"])
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return lm


def engine_batch(plan: dict[str, Any], step: int, rank: int, ranks: int) -> list[dict[str, Tensor]]:
    """Two micro-batches of a global batch of 8 rows, some without labels."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, numerics.VOCABULARY, (8, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[3], labels[5, 2:] = -100, -100
    documents = DOCUMENTS[torch.arange(8) % 4]
    labels[documents < 0] = -100
    whole = {"input_ids": ids[:, :-1], "labels": labels, "document_ids": documents}
    whole["sample_ids"] = torch.arange(8)
    rows = torch.arange(8).view(2, ranks, -1)[:, rank]
    return [{key: value[part] for key, value in whole.items()} for part in rows]


def train(plan: dict[str, Any], world: process_group.World) -> dict[str, Any]:
    config = configuration.parse(engine_settings(plan, world.size))
    engine = build(config, {"zero_optimization": plan["zero"]}, engine_model(plan), world, LENGTH)
    answer: dict[str, Any] = {"losses": [], "norms": [], "tokens": []}
    record_first_gradient(engine, answer)
    for step in range(plan["steps"]):
        result = engine.step(engine_batch(plan, step, *engine.data_rank))
        answer["losses"].append(result.loss)
        answer["norms"].append(result.grad_norm)
        answer["tokens"].append(result.tokens)
    answer["evaluation"] = engine.evaluate(engine_batch(plan, 99, *engine.data_rank))
    answer["samples"] = engine._samples(engine_batch(plan, 0, *engine.data_rank))
    answer["weights"] = [
        (f.name, f.shape, f.start, f.stop, f.of(f.master.detach()).float().clone())
        for f in fragments(engine.ds)
    ]
    engine.ds.destroy()
    return answer
