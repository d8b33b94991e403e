"""A checkpoint's weights as safetensors files: cast once, one file at a time, with an index where needed."""

import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from wm_ds.checkpoint.format import Reader
from wm_ds.export.tokenizer import ExportError
from wm_ds.files import give_usual_mode

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Shard:
    """One weight file to be: its tensors' names in order and their bytes in the export's dtype."""

    file: str
    names: list[str]
    size: int


def plan_shards(sizes: dict[str, int], max_shard_size: int) -> list[Shard]:
    """Tensors in order into as few files as the limit allows; one that exceeds it has a file of its own."""
    groups: list[list[str]] = []
    filled = 0
    for name, size in sizes.items():
        if not groups or filled + size > max_shard_size:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    total = len(groups)
    return [
        Shard(
            "model.safetensors" if total == 1 else f"model-{i + 1:05d}-of-{total:05d}.safetensors",
            names,
            sum(sizes[name] for name in names),
        )
        for i, names in enumerate(groups)
    ]


def write_weights(
    reader: Reader,
    shapes: dict[str, tuple[int, ...]],
    folder: Path,
    dtype: torch.dtype,
    max_shard_size: int,
) -> None:
    """All tensors of `shapes`, cast once, in shards with an index.

    Raises ExportError where the checkpoint's names or shapes are not the model's.
    """
    held = {name: entry.shape for name, entry in reader.manifest.tensors.items()}
    missing, unexpected = sorted(set(shapes) - set(held)), sorted(set(held) - set(shapes))
    if missing or unexpected:
        raise ExportError(
            f"{reader.path} is not a checkpoint of this model: missing {missing[:3]} ({len(missing)}), "
            f"unexpected {unexpected[:3]} ({len(unexpected)})"
        )
    for name, shape in shapes.items():
        if tuple(held[name]) != tuple(shape):
            raise ExportError(
                f"{reader.path}: {name} has shape {list(held[name])}, the model's is {list(shape)}"
            )
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}
    shards = plan_shards(sizes, max_shard_size)
    for number, shard in enumerate(shards):
        log.info(f"writing {shard.file} ({number + 1}/{len(shards)}, {shard.size / 1e6:.1f} MB)")
        tensors = {name: reader.tensor(name, dtype=dtype) for name in shard.names}
        save_file(tensors, folder / shard.file, metadata={"format": "pt"})
        give_usual_mode(folder / shard.file)  # the library keeps them to their owner
        del tensors
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {name: shard.file for shard in shards for name in shard.names},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an exported folder, one at a time."""
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                yield name, tensors.get_tensor(name)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "200MB", "64KB" (powers of ten) or a plain number. Raises ExportError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if not match or float(match.group(1)) <= 0:
        raise ExportError(f"{text!r} is not a size; write for example 5GB or 200MB")
    return int(float(match.group(1)) * 1000 ** " KMGT".index(match.group(2).upper() or " "))
