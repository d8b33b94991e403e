"""Everything of the code under test that the probe calls by name: when a module moves, this file follows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from wm_ds.distributed import (
    process_group,  # first: it prepares the environment that DeepSpeed reads at import
)

import torch  # isort: skip
from tests.support import toy_corpus
from wm_ds import train as trainer
from wm_ds import trained
from wm_ds.config import load as configuration
from wm_ds.distributed.process_group import World
from wm_ds.engine.engine import Engine, build
from wm_ds.export import export as exporting
from wm_ds.families import build_model, model_config
from wm_ds.optim.partition import fragments

__all__ = ["SOURCE", "TRAIN", "Engine", "World", "process_group", "torch"]

SOURCE = Path(trainer.__file__).resolve()
TRAIN = [sys.executable, "-m", trainer.__name__, "run.yaml"]


def start_ranks() -> World:
    """Meet the other ranks."""
    return process_group.init(timeout_minutes=5)


def stop_ranks() -> None:
    """Leave them."""
    process_group.shutdown()


def fresh_model(
    model: dict[str, Any], *, seed: int, vocab_size: int, seq_len: int, recompute: str
) -> torch.nn.Module:
    """The causal language model of a run's `model` section, with the weights that `seed` draws."""
    fields = configuration.Model.model_validate(model)
    hf_config = model_config(fields, vocab_size=vocab_size, seq_len=seq_len, eos_id=0)
    return build_model(hf_config, seed=seed, recompute=recompute)


def engine(run: dict[str, Any], zero: dict[str, Any], lm: torch.nn.Module, world: World) -> Engine:
    """The engine of a run's settings around `lm`."""
    seq_len = lm.config.max_position_embeddings
    return build(configuration.parse(run), {"zero_optimization": zero}, lm, world, seq_len)


def weights(engine: Engine) -> list[tuple[str, tuple[int, ...], int, int, torch.Tensor]]:
    """(name, shape, start, stop, values) of this rank's fragments of the fp32 weights."""
    return [
        (f.name, f.shape, f.start, f.stop, f.of(f.master.detach()).float().clone())
        for f in fragments(engine.ds)
    ]


def pack(output: Path, source: Path, tokenizer: Path, *options: object) -> None:
    """Pack a file of texts."""
    assert toy_corpus.pack(output, [source], tokenizer, *options) == 0


def make_corpus(folder: Path, texts: int) -> tuple[Path, Path]:
    """(a file of texts, a byte tokenizer's folder)."""
    source = toy_corpus.write_jsonl(folder / "texts.jsonl", toy_corpus.numbered(texts, 8))
    return source, toy_corpus.byte_tokenizer(folder / "tokenizer")


def train(arguments: list[str]) -> int:
    """The trainer's command, in this process."""
    return trainer.main(arguments)


def export(run: Path, output: Path, step: int) -> Path:
    """Export a run's checkpoint in float32."""
    return exporting.export(trained.find(run, step), output, dtype=torch.float32, max_shard_size=10**9)
