"""Step 0 of a run from a dense model: everything is checked first, then the run's directory is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import AutoTokenizer

from wm_ds.checkpoint.directory import list_checkpoints
from wm_ds.config.schema import Config
from wm_ds.data.shards import load_manifest
from wm_ds.errors import one_line
from wm_ds.families import family_of
from wm_ds.files import write_json
from wm_ds.packing.tokenizer import open_tokenizer
from wm_ds.trained import UPCYCLED
from wm_ds.upcycle import mapping
from wm_ds.upcycle.dense import Dense, UpcycleError, model_section
from wm_ds.upcycle.first_step import begin, model_of


def upcycle(dense: Dense, config: Config, choice: str = mapping.DEFAULT) -> Path:
    """Write the run's checkpoint of step 0; returns its path. Raises UpcycleError and the readers' errors."""
    run = Path(config.run.dir)
    if list_checkpoints(run):
        raise UpcycleError(f"{run} has checkpoints already; give another run.dir")
    model = model_of(config)
    check_fields(dense, config, model.config.vocab_size)
    mapping.check(model.config, choice)
    if dense.tokenizer is not None:
        _check_tokenizer(dense.tokenizer, config)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    _check_tensors(dense, shapes, model.config)

    def values() -> Iterator[Tensor]:
        for name, shape in shapes.items():
            yield mapping.value(name, shape, model.config, dense, choice)

    run.mkdir(parents=True, exist_ok=True)
    write_json(run / UPCYCLED, _provenance(dense, choice, family_of(model.config).has_pool), indent=1)
    return begin(config, model, values())


def check_fields(dense: Dense, config: Config, vocab_size: int) -> None:
    """Raises UpcycleError that names every field in which the run's blocks are not the dense model's."""
    try:
        wanted = model_section(dense.config)
    except UpcycleError as error:
        raise UpcycleError(f"{dense.path}: {error}") from None
    said = config.model.fields() | {"vocab_size": vocab_size}
    differing = [
        f"model.{name} is {said.get(name)} in the run and {value} there"
        for name, value in wanted.items()
        if said.get(name) != value
    ]
    if differing:
        raise UpcycleError(
            f"{dense.path} is another model than the run's: {'; '.join(differing)} (--print-model prints the "
            "section)"
        )


def _check_tensors(dense: Dense, shapes: dict[str, tuple[int, ...]], config: Any) -> None:
    """The dense model's own names and shapes, whatever the run takes of them. Raises UpcycleError."""
    width, heads = config.hidden_size, config.head_dim
    kv = config.num_key_value_heads * heads
    needed = {name: shape for name, shape in shapes.items() if name in dense.shapes}
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        needed |= {at + "input_layernorm.weight": (width,)}
        for side in "kv":
            needed[f"{at}self_attn.{side}_proj.weight"] = (kv, width)
            if config_has_bias(dense.config):
                needed[f"{at}self_attn.{side}_proj.bias"] = (kv,)
        if dense.config.model_type == "qwen3":
            needed[at + "self_attn.k_norm.weight"] = (heads,)
    needed |= {
        name: shape
        for name, shape in shapes.items()
        if not name.startswith(("model.pool.", "model.dummy_")) and ".fusion." not in name
    }
    for name, shape in needed.items():
        there = dense.shapes.get(name)
        if there != tuple(shape):
            found = "absent" if there is None else str(list(there))
            raise UpcycleError(f"{dense.path}: {name} is {found} there, expected {list(shape)}")
    untied = config.tie_word_embeddings and "lm_head.weight" in dense.shapes
    ignored = [name for name in dense.shapes if name.endswith("rotary_emb.inv_freq")]
    unused = sorted(
        set(dense.shapes) - set(needed) - set(ignored) - ({"lm_head.weight"} if untied else set())
    )
    if unused:
        raise UpcycleError(
            f"{dense.path} has {unused[0]} ({len(unused)} tensors) that nothing in the run would hold"
        )


def config_has_bias(config: Any) -> bool:
    """Whether the dense model's query, key and value projections have biases."""
    return config.model_type == "qwen2"


def _check_tokenizer(folder: Path, config: Config) -> None:
    """The data must have been packed with the model's tokenizer. Raises UpcycleError."""
    data = load_manifest(config.data.sources()[0].path)
    name = "" if (folder / "tokenizer.json").is_file() else "tokenizer.model"
    theirs = open_tokenizer(str(folder / name) if name else str(folder))
    if theirs.sha256 == data["tokenizer"]["sha256"]:
        return
    places = [config.data.tokenizer, str(Path(config.data.sources()[0].path) / "tokenizer")]
    places.append(data["tokenizer"]["name"])
    ours = next((p for p in places if p and (Path(p) / "tokenizer.json").is_file()), None)
    try:
        same = ours is not None and _vocabulary(Path(ours)) == _vocabulary(folder)
    except (OSError, ValueError) as error:
        raise UpcycleError(f"{folder}: its tokenizer cannot be read: {one_line(str(error))}") from None
    if not same:
        raise UpcycleError(
            f"{config.data.sources()[0].path} was not packed with the tokenizer of {folder}, so ids would "
            f"mean other tokens; pack the text with tools/pack_data.py --tokenizer {folder}"
        )


def _vocabulary(folder: Path) -> dict[str, int]:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False).get_vocab()


def _provenance(dense: Dense, choice: str, pool: bool) -> dict[str, Any]:
    """What RUN/upcycled.json says, and every export.json of the run."""
    config = json.dumps(dense.config.to_dict(), sort_keys=True, default=str)
    return {
        "from": str(dense.path.resolve()),
        "model_type": dense.config.model_type,
        "config_sha256": hashlib.sha256(config.encode()).hexdigest(),
        "groups": choice,
        "dummy": "zero" if pool else None,
    }
