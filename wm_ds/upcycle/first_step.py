"""The checkpoint of step 0 with given weights: fp32 masters, and optimizer state as at a fresh start.

Tensors are written as they come, one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wm_ds.checkpoint import format as files
from wm_ds.checkpoint import rng
from wm_ds.checkpoint.directory import checkpoints_dir, publish, step_name
from wm_ds.config import load as configuration
from wm_ds.data.shards import load_manifest
from wm_ds.engine.deepspeed_config import table_for
from wm_ds.families import model_config, on_meta
from wm_ds.files import write_atomically
from wm_ds.optim.muon import STATE as STATE_OF_RULE

NOT_TRAINED = {"steps": 0, "tokens": 0, "skipped": 0, "skipped_in_a_row": 0}
NO_LOSS_YET = {"loss_mean": 0.0, "loss_var": 0.0, "loss_count": 0, "updates": 0}
_FILE = "rank_00000.safetensors"


def model_of(config: configuration.Config) -> Any:
    """The run's model on the meta device."""
    data = load_manifest(config.data.sources()[0].path)
    found = model_config(
        config.model, vocab_size=data["vocab_size"], seq_len=data["seq_len"], eos_id=data["eos_id"]
    )
    return on_meta(found)


def begin(config: configuration.Config, model: Any, values: Iterable[Tensor]) -> Path:
    """Make the run's directory with a checkpoint of step 0; returns the checkpoint.

    `values`: of `model.named_parameters()` in that order. A kill leaves no checkpoint.
    """
    run = Path(config.run.dir)
    run.mkdir(parents=True, exist_ok=True)
    write_atomically(run / "config.yaml", configuration.dump(config))
    partial = checkpoints_dir(run) / f"{step_name(0)}.partial-import"
    partial.mkdir(parents=True)
    manifest = _write(partial, values, model, config)
    return publish(run, partial, 0, manifest, fence=lambda: None)


def _write(
    folder: Path, values: Iterable[Tensor], model: Any, config: configuration.Config
) -> files.Manifest:
    """All files of the checkpoint but the manifest, which is returned."""
    rules = {row.name: row.rule for row in table_for(config, model)}
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    specs: list[tuple[str, torch.dtype, int]] = []
    entries: dict[str, files.Entry] = {}
    for name, shape in shapes.items():
        size, states = torch.Size(shape).numel(), {}
        for kind in (files.WEIGHT, *STATE_OF_RULE[rules[name]]):
            specs.append((f"{name}:{kind}:0", torch.float32, size))
            states[kind] = files.State("float32", [(_FILE, 0, size)])
        entries[name] = files.Entry(shape, "trainable", updates=0, states=states)

    def tensors() -> Iterator[Tensor]:
        for name, value in zip(shapes, values, strict=True):
            yield value.float().flatten()
            for _ in STATE_OF_RULE[rules[name]]:
                yield torch.zeros(value.numel())

    held = {
        _FILE: files.write_fragments(folder / _FILE, specs, tensors()),
        "rank_00000.json": files.write_json(folder / "rank_00000.json", {"random": rng.capture()}),
        files.CLIENT: files.write_json(folder / files.CLIENT, {"engine": NOT_TRAINED | NO_LOSS_YET}),
    }
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if model.config.tie_word_embeddings else {}
    counters = {"global_steps": 0, "global_samples": 0, "skipped_steps": 0}
    facts = {"step": 0, "sequence": 1, "attempt": 0, "world_size": 1, "zero_stage": 0, "engine": counters}
    manifest = files.Manifest(facts, entries, tied, held)
    manifest.check_coverage()
    return manifest
