"""The proof that an exported folder is the checkpoint's model: tensors, then logits and text elsewhere.

Elsewhere is a process that runs standalone.py and cannot import wm_ds: it stands for somebody who has only
the folder.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import GenerationConfig

from wm_ds.export import standalone
from wm_ds.export.tokenizer import ExportError
from wm_ds.export.weights import read_weights
from wm_ds.trained import Trained

log = logging.getLogger(__name__)
# A comparison in the export's own dtype: same code and weights, so only the order of sums may differ.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
GREEDY_TOKENS = 32


def check(source: Trained, folder: Path, dtype: torch.dtype) -> float:
    """Prove that the folder holds the checkpoint's model; returns the largest difference of logits.

    Names, shapes and values of all tensors first; then the folder is loaded by another process that cannot
    import wm_ds, and its logits and greedy tokens are compared with those of the checkpoint's own model in
    the same dtype. Raises ExportError.
    """
    log.info("checking: every tensor against the checkpoint")
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

    log.info("checking: loading it in a process without wm_ds, comparing logits and greedy tokens")
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
    log.info(f"checked: logits equal to {difference:.1e}, {GREEDY_TOKENS} greedy tokens equal")
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
