"""A checkpoint of named fragments -> a folder that transformers loads without this project.

    DIR/config.json              with auto_map, and generation_config.json
    DIR/model*.safetensors       and their index, where there are several
    DIR/tokenizer.json …         the tokenizer's files
    DIR/*.py                     the model's own code (not for vanilla, which is a plain Qwen3)
    DIR/README.md, export.json   the model card, and where it came from

Tensors are read in pieces, cast once from the fp32 masters and written one shard at a time, so memory is
bounded by one shard while writing, and by the model in the export's dtype while checking: first in the
process that loads the folder, then in this one, which builds the checkpoint's own model. The folder is built
as a hidden sibling without a config.json, checked (`check`), and takes its name by rename: whatever moment a
kill hits, DIR is the old folder, the new one, or absent, and what is left beside it does not load.
"""

import glob
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig

from wm_ds import model as model_package
from wm_ds.checkpoint.format import verify
from wm_ds.export import model_card
from wm_ds.export.holdout import check_holdout, trainers_record
from wm_ds.export.tokenizer import ExportError, agree_on_ids, copy_tokenizer
from wm_ds.export.verify import check
from wm_ds.export.weights import write_weights
from wm_ds.families import family_of
from wm_ds.files import sync_directory
from wm_ds.trained import Trained

log = logging.getLogger(__name__)
PROVENANCE = "export.json"
UNCHECKED = "config.json.unchecked"  # config.json gets its name last: a folder without it does not load


def export(
    source: Trained,
    output: Path,
    *,
    dtype: torch.dtype,
    max_shard_size: int,
) -> Path:
    """Write `source` to `output`; returns that. Raises ExportError, CheckpointError or TrainedError."""
    output = output.resolve()
    _check_target(output)
    tokenizer_dir = source.tokenizer_dir()
    config = source.hf_config()
    sha256 = source.data["tokenizer"]["sha256"]
    tokenizer_size = agree_on_ids(config, tokenizer_dir, int(source.data["eos_id"]), sha256)
    config.dtype = dtype
    log.info(f"verifying {source.path}")
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
            write_weights(reader, source.shapes(), part, dtype, max_shard_size)
        copy_tokenizer(tokenizer_dir, part, config.max_position_embeddings)
        _write_code_and_config(config, tokenizer_size, part)
        facts = source.facts() | {"dtype": str(dtype).removeprefix("torch.")}
        facts["trainer_holdout"] = trainers_record(source)
        (part / PROVENANCE).write_text(json.dumps(facts, indent=2) + "\n")
        (part / "README.md").write_text(model_card.render(facts, config))
        check(source, part, dtype)
        check_holdout(source, dtype)
        (part / UNCHECKED).rename(part / "config.json")
        _publish(part, output)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return output


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
