"""Small runs for the tests of export and evaluation: packed data, tokenizer, checkpoint, no training.

The checkpoint is written as several ranks would: every tensor is cut into fragments that lie in two files.
"""

import json
import random
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support import settings
from tools import pack_data
from wm_ds import trained
from wm_ds.checkpoint import format
from wm_ds.export import export
from wm_ds.families import model_class
from wm_ds.packing.tokenizer import make_encoder, open_tokenizer

EOS = "<|endoftext|>"
MODEL = settings.MODEL | {"vocab_size": 320}


def make_tokenizer(folder: Path) -> Path:
    """Byte-level BPE without merges: 256 bytes and EOS, which is id 256."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS).save_pretrained(folder)
    return folder


def make_data(folder: Path, tokenizer: Path, seq_len: int = 64) -> Path:
    """Random words, packed: 60 documents, 8 held-out sequences."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshr", k=rng.randint(1, 7))) for _ in range(40)]
    text = folder.parent / "text.jsonl"
    with text.open("w") as file:
        for _ in range(60):
            file.write(json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(1, 40)))}) + "\n")
    sizes = f"--seq-len {seq_len} --holdout 8 --workers 1"
    command = f"--input {text} --tokenizer {tokenizer} --output {folder} {sizes}"
    assert pack_data.main(command.split()) == 0
    return folder


def make_run(root: Path, step: int = 7, seq_len: int = 64, **model: object) -> Path:
    """A run directory with one checkpoint of a model with random weights; returns it."""
    tokenizer, data = root / "tokenizer", root / "packed"
    if not data.exists():
        make_data(data, make_tokenizer(tokenizer), seq_len)
    run = root / "run"
    run.mkdir(parents=True, exist_ok=True)
    written = {
        "run": {"dir": str(run)},
        "model": {**MODEL, **model},
        "data": {"train": str(data), "tokenizer": str(tokenizer)},
        "batch": {"global_batch": 8, "micro_batch": 2},
        "optim": {"lr": 1e-3},
        "steps": 10,
    }
    (run / "config.yaml").write_text(yaml.safe_dump(written))
    rows = [{"step": i, "loss": 6.0 - i / 10, "tokens": 512 * i, "attempt": 1} for i in range(1, step + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save(run, build(run, seed=step), step)
    return run


def build(run: Path, seed: int) -> torch.nn.Module:
    """The run's model with every parameter random, also those that start at zero or one."""
    config = trained.Trained(run, run).hf_config()
    model = model_class(config)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.06 * noise + (1.0 if "norm" in name else 0.0))
    return model.eval()


def save(run: Path, model: torch.nn.Module, step: int) -> Path:
    """Write a checkpoint as two ranks would, and make it the latest."""
    rng = random.Random(step)
    entries, per_file = {}, {"rank_00000.safetensors": [], "rank_00001.safetensors": []}
    for name, parameter in model.named_parameters():
        flat, cut = parameter.detach().flatten(), rng.randint(0, parameter.numel())
        state = format.State("float32")
        for (file, held), start, stop in zip(per_file.items(), (0, cut), (cut, flat.numel())):
            if start < stop:
                held.append((f"{name}:{format.WEIGHT}:{start}", flat[start:stop]))
                state.fragments.append((file, start, stop))
        entries[name] = format.Entry(tuple(parameter.shape), "trainable", states={format.WEIGHT: state})
    tied = {}
    if model.config.tie_word_embeddings:
        tied["lm_head.weight"] = "model.embed_tokens.weight"
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    files = {}
    for file, held in per_file.items():
        specs = [(key, torch.float32, tensor.numel()) for key, tensor in held]
        files[file] = format.write_fragments(folder / file, specs, [tensor for _, tensor in held])
    facts = {"step": step, "sequence": step, "attempt": "a", "world_size": 2, "zero_stage": 2}
    manifest = format.Manifest(facts, entries, tied, files)
    manifest.check_coverage()
    (folder / format.MANIFEST).write_text(manifest.to_json())
    (run / "checkpoints" / "latest").write_text(f"{folder.name}\n")
    return folder


def random_rows(rows: int, length: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, vocab, (rows, length)))


def run_export(
    source: Path, out: Path, step: int | None = None, dtype=torch.float32, size: int = 10**9
) -> Path:
    """Export without a word; returns the folder."""
    return export.export(trained.find(source, step), out, dtype=dtype, max_shard_size=size)


def assert_packer_ids(tokenizer, packer: Path) -> None:
    rng = random.Random(0)
    texts = [
        "".join(chr(rng.choice([*range(32, 127), 32, 233, 0x4E2D, 10])) for _ in range(20))
        for _ in range(1000)
    ]
    ids, offsets = make_encoder(open_tokenizer(str(packer))).encode(texts)
    assert tokenizer(texts)["input_ids"] == [ids[a:b].tolist() for a, b in pairwise(offsets)]


def assert_one_line_error(result: subprocess.CompletedProcess, *words: str) -> None:
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words), lines[0]
