"""A checkpoint of named fragments -> a folder that transformers loads without this project.

    DIR/config.json              with auto_map, and generation_config.json
    DIR/model*.safetensors       and their index, where there are several
    DIR/tokenizer.json …         the tokenizer's files
    DIR/*.py                     the model's own code (WhiteMatter; vanilla is a plain Qwen3 and needs none)
    DIR/README.md, export.json   the model card, and where it came from

Tensors are read in pieces, cast once from the fp32 masters and written one shard at a time, so memory is
bounded by one shard while writing, and by the model in the export's dtype while checking: first in the
process that loads the folder, then in this one, which builds the checkpoint's own model. The folder is built
as a hidden sibling without a config.json, checked (`check`), and takes its name by rename: whatever moment a
kill hits, DIR is the old folder, the new one, or absent, and what is left beside it does not load.
"""

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig

from wm_ds import model as model_package
from wm_ds.checkpoint.format import Reader, verify
from wm_ds.export import model_card, standalone
from wm_ds.export.tokenizer import ExportError, agree_on_ids, copy_tokenizer
from wm_ds.families import family_of
from wm_ds.files import give_usual_mode, sync_directory
from wm_ds.trained import Trained, TrainedError

PROVENANCE = "export.json"
UNCHECKED = "config.json.unchecked"  # config.json gets its name last: a folder without it does not load
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# A comparison in the export's own dtype: same code and weights, so only the order of sums may differ.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
GREEDY_TOKENS = 32


@dataclass(frozen=True)
class Shard:
    """One weight file to be: its tensors' names in order and their bytes in the export's dtype."""

    file: str
    names: list[str]
    size: int


def export(
    source: Trained,
    output: Path,
    *,
    dtype: torch.dtype,
    max_shard_size: int,
    say: Callable[[str], None] = print,
) -> Path:
    """Write `source` to `output`; returns that. Raises ExportError, CheckpointError or TrainedError."""
    output = output.resolve()
    _check_target(output)
    tokenizer_dir = source.tokenizer_dir()
    config = source.hf_config()
    sha256 = source.data["tokenizer"]["sha256"]
    tokenizer_size = agree_on_ids(config, tokenizer_dir, int(source.data["eos_id"]), sha256)
    config.dtype = dtype
    say(f"verifying {source.path}")
    problems = verify(source.path)
    if problems:
        raise ExportError("; ".join(problems))
    output.parent.mkdir(parents=True, exist_ok=True)
    for leftover in output.parent.glob(glob.escape(f".{output.name}.unfinished-") + "*"):
        shutil.rmtree(leftover)
    part = output.parent / f".{output.name}.unfinished-{os.getpid()}"
    part.mkdir()
    try:
        with source.reader() as reader:
            write_weights(reader, source.shapes(), part, dtype, max_shard_size, say)
        copy_tokenizer(tokenizer_dir, part, config.max_position_embeddings)
        _write_code_and_config(config, tokenizer_size, part)
        facts = source.facts() | {"dtype": str(dtype).removeprefix("torch.")}
        (part / PROVENANCE).write_text(json.dumps(facts, indent=2) + "\n")
        (part / "README.md").write_text(model_card.render(facts, config))
        check(source, part, dtype, say)
        (part / UNCHECKED).rename(part / "config.json")
        _publish(part, output)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return output


# -- weights ---------------------------------------------------------------------------------------------


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
    say: Callable[[str], None],
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
        say(f"writing {shard.file} ({number + 1}/{len(shards)}, {shard.size / 1e6:.1f} MB)")
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


# -- configuration, code -------------------------------------------------------------------------------------


def _write_code_and_config(config: Any, tokenizer_size: int, folder: Path) -> None:
    """All that transformers needs beside weights and tokenizer."""
    ids = {name: getattr(config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    family = family_of(config)
    causal_lm = family.model_class
    if not family.own_code and tokenizer_size < config.vocab_size:
        # Our own models know by tokenizer_size that padding of the vocabulary is not to be generated.
        ids["suppress_tokens"] = list(range(tokenizer_size, config.vocab_size))
    GenerationConfig(**ids).save_pretrained(folder)
    # Every field of this model, and none of the many that transformers gives any model.
    common = PreTrainedConfig().to_dict()
    entry = {k: v for k, v in config.to_dict().items() if k not in common or common[k] != v}
    entry["model_type"] = config.model_type
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"):
        entry[name] = getattr(config, name)
    entry["dtype"] = str(config.dtype).removeprefix("torch.")
    entry["architectures"] = [causal_lm.__name__]
    if family.own_code:
        entry["tokenizer_size"] = tokenizer_size
        for file in sorted(Path(model_package.__file__).parent.glob("*.py")):
            shutil.copyfile(file, folder / file.name)
        base = getattr(model_package, causal_lm.__name__.replace("ForCausalLM", "Model"))
        classes = {"AutoConfig": type(config), "AutoModel": base, "AutoModelForCausalLM": causal_lm}
        entry["auto_map"] = {
            auto: f"{cls.__module__.rpartition('.')[2]}.{cls.__name__}" for auto, cls in classes.items()
        }
    (folder / UNCHECKED).write_text(json.dumps(entry, indent=2, sort_keys=True) + "\n")


# -- check and publish ---------------------------------------------------------------------------------------


def check(source: Trained, folder: Path, dtype: torch.dtype, say: Callable[[str], None] = print) -> float:
    """Prove that the folder holds the checkpoint's model; returns the largest difference of logits.

    Names, shapes and values of all tensors first; then the folder is loaded by another process that cannot
    import wm_ds, and its logits and greedy tokens are compared with those of the checkpoint's own model in
    the same dtype. Raises ExportError.
    """
    say("checking: every tensor against the checkpoint")
    shapes = source.shapes()
    with source.reader() as reader:
        for name, tensor in read_weights(folder):
            if name not in shapes:
                raise ExportError(f"{folder}: holds {name}, which the model does not have")
            expected = shapes.pop(name)
            if tuple(tensor.shape) != tuple(expected) or tensor.numel() == 0:
                raise ExportError(
                    f"{folder}: {name} has shape {list(tensor.shape)}, expected {list(expected)}"
                )
            if not torch.equal(tensor, reader.tensor(name, dtype=dtype)):
                raise ExportError(f"{folder}: the values of {name} are not the checkpoint's")
    if shapes:
        raise ExportError(f"{folder}: lacks {', '.join(sorted(shapes)[:3])} ({len(shapes)} tensors)")

    say("checking: loading it in a process without wm_ds, comparing logits and greedy tokens")
    config = source.hf_config()
    generator = torch.Generator().manual_seed(0)
    length = min(37, config.max_position_embeddings)
    tokens = torch.randint(config.vocab_size, (2, length), generator=generator).tolist()
    request = {"tokens": tokens, "new_tokens": GREEDY_TOKENS}
    with _as_published(folder) as view:
        theirs, _ = load_apart(view, request, name=folder)
    model = source.load(dtype)
    model.generation_config = GenerationConfig.from_pretrained(folder)
    ours = standalone.probe(model, tokens, GREEDY_TOKENS)
    del model
    difference = (ours["logits"] - theirs["logits"]).abs().max().item()
    scale = max(1.0, ours["logits"].abs().max().item())
    if not difference <= TOLERANCE[dtype] * scale:
        raise ExportError(
            f"{folder}: logits differ from the checkpoint's by {difference:.3g}; "
            f"{TOLERANCE[dtype] * scale:.3g} is allowed"
        )
    if not torch.equal(ours["greedy"], theirs["greedy"]):
        raise ExportError(f"{folder}: greedy tokens differ from the checkpoint's")
    say(f"checked: logits equal to {difference:.1e}, {GREEDY_TOKENS} greedy tokens equal")
    return difference


@contextmanager
def _as_published(folder: Path) -> Iterator[Path]:
    """The folder as it will be, made of links and elsewhere: a kill during the check must leave nothing at
    the export's place that loads."""
    with tempfile.TemporaryDirectory() as scratch:
        view = Path(scratch) / folder.name.lstrip(".")
        view.mkdir()
        for file in folder.iterdir():
            (view / file.name.removesuffix(".unchecked")).symlink_to(file.resolve())
        yield view


def load_apart(
    folder: Path, request: dict[str, Any], *, name: Path | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Run standalone.py on the folder in a process of its own; returns its tensors and what it printed.

    Raises ExportError with the process's last words, about `name` (default the folder).
    """
    with tempfile.TemporaryDirectory() as scratch:
        request_file, result_file = Path(scratch) / "request.json", Path(scratch) / "result.safetensors"
        request_file.write_text(json.dumps(request))
        environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
        # A module cache of its own: code of an earlier export with the same folder name must not be found.
        environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": scratch, "TRANSFORMERS_VERBOSITY": "error"}
        command = [
            sys.executable,
            "-I",
            str(standalone.__file__),
            str(folder.resolve()),
            str(request_file),
            str(result_file),
        ]
        result = subprocess.run(
            command, cwd=scratch, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if result.returncode:
            words = [line for line in result.stderr.strip().splitlines() if line.strip()][-3:]
            raise ExportError(f"{name or folder} does not load by itself: {' | '.join(words)}")
        return load_file(result_file), json.loads(result.stdout.strip().splitlines()[-1])


def _check_target(output: Path) -> None:
    if (
        output.exists()
        and not (output / PROVENANCE).is_file()
        and (not output.is_dir() or any(output.iterdir()))
    ):
        raise ExportError(
            f"{output} exists and is not an export of wm_ds; choose another --output or remove it"
        )


def _publish(part: Path, output: Path) -> None:
    for file in part.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    sync_directory(part)
    replaced = None
    if output.exists():
        replaced = output.rename(output.parent / f".{output.name}.unfinished-replaced")
    part.rename(output)
    sync_directory(output.parent)
    if replaced is not None:
        shutil.rmtree(replaced)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "200MB", "64KB" (powers of ten) or a plain number. Raises ExportError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?", text.strip(), re.IGNORECASE)
    if not match or float(match.group(1)) <= 0:
        raise ExportError(f"{text!r} is not a size; write for example 5GB or 200MB")
    return int(float(match.group(1)) * 1000 ** " KMGT".index(match.group(2).upper() or " "))


__all__ = [
    "DTYPES",
    "ExportError",
    "TrainedError",
    "check",
    "export",
    "load_apart",
    "parse_size",
]
