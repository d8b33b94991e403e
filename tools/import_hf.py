"""Start a run from a model in Hugging Face format: the way back of export_hf.py.

    python tools/import_hf.py DIR configs/X.yaml [section.field=value ...]

Makes the run's directory with a checkpoint of step 0 that holds the folder's weights as fp32 masters, with
optimizer state as at a fresh start. Then train as usual with the same configuration: it resumes from there,
with the learning rate's warm-up and the data from their beginning. The folder's model must be the run's: same
family, shapes and tied embeddings.
"""

import argparse
import sys
from pathlib import Path
from typing import Any


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("folder", type=Path, metavar="DIR")
    found.add_argument("config", help="the run's YAML")
    found.add_argument("overrides", nargs="*", metavar="section.field=value")
    return found


if __name__ == "__main__":  # before the imports that take seconds, so that --help need not wait for them
    parser().parse_args()

import torch

from wm_ds import trained
from wm_ds.checkpoint import format as files
from wm_ds.checkpoint import rng
from wm_ds.checkpoint.directory import checkpoints_dir, list_checkpoints, publish, step_name
from wm_ds.config import load as configuration
from wm_ds.engine.deepspeed_config import table_for
from wm_ds.errors import WmError, run_cli
from wm_ds.export.weights import read_weights
from wm_ds.files import write_atomically
from wm_ds.optim.muon import STATE as STATE_OF_RULE

NOT_TRAINED = {"steps": 0, "tokens": 0, "skipped": 0, "skipped_in_a_row": 0}
NO_LOSS_YET = {"loss_mean": 0.0, "loss_var": 0.0, "loss_count": 0, "updates": 0}


class ImportFailed(WmError, RuntimeError):
    """The folder cannot become this run; the message is one line."""


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> None:
    """Import what the command line names. Raises WmError."""
    args = parser().parse_args(argv)
    config = configuration.load(args.config, args.overrides)
    path = import_folder(args.folder, config)
    print(f"{path}: weights of {args.folder}; train with the same configuration to go on from there")


def import_folder(folder: Path, config: configuration.Config) -> Path:
    """Write the checkpoint of step 0; returns its path. Raises ImportFailed and the readers' errors."""
    source = trained.find(folder)
    kind = source.hf_config().model_type if source.run_dir is None else ""
    if source.run_dir is not None:
        raise ImportFailed(f"{folder} is a run of this project; resume it, or export it first")
    run = Path(config.run.dir)
    if list_checkpoints(run):
        raise ImportFailed(f"{run} has checkpoints already; give another run.dir")
    run.mkdir(parents=True, exist_ok=True)
    write_atomically(run / "config.yaml", configuration.dump(config))
    target = trained.Trained(run, run)
    model = target.on_meta()
    if kind != model.config.model_type:
        raise ImportFailed(f"{folder} holds a model of type {kind}, the run's is {model.config.model_type}")
    weights = dict(read_weights(folder))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name in sorted(set(shapes) | set(weights)):
        there = tuple(weights[name].shape) if name in weights else None
        if there != shapes.get(name):
            here = _shape(shapes.get(name))
            raise ImportFailed(f"{folder}: {name} is {_shape(there)} there and {here} in the run")
    partial = checkpoints_dir(run) / f"{step_name(0)}.partial-import"
    partial.mkdir(parents=True)
    manifest = write(partial, weights, model, config)
    return publish(run, partial, 0, manifest, fence=lambda: None)


def write(
    folder: Path, weights: dict[str, torch.Tensor], model: Any, config: configuration.Config
) -> files.Manifest:
    """All files of the checkpoint but the manifest, which is returned."""
    rules = {row.name: row.rule for row in table_for(config, model)}
    specs: list[tuple[str, torch.dtype, int]] = []
    tensors: list[torch.Tensor] = []
    entries: dict[str, files.Entry] = {}
    for name, tensor in weights.items():
        size, states = tensor.numel(), {}
        for kind in (files.WEIGHT, *STATE_OF_RULE[rules[name]]):
            specs.append((f"{name}:{kind}:0", torch.float32, size))
            tensors.append(tensor.float().flatten() if kind == files.WEIGHT else torch.zeros(size))
            states[kind] = files.State("float32", [("rank_00000.safetensors", 0, size)])
        entries[name] = files.Entry(tuple(tensor.shape), "trainable", updates=0, states=states)
    held = {
        "rank_00000.safetensors": files.write_fragments(folder / "rank_00000.safetensors", specs, tensors),
        "rank_00000.json": files.write_json(folder / "rank_00000.json", {"random": rng.capture()}),
        files.CLIENT: files.write_json(folder / files.CLIENT, {"engine": NOT_TRAINED | NO_LOSS_YET}),
    }
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if model.config.tie_word_embeddings else {}
    counters = {"global_steps": 0, "global_samples": 0, "skipped_steps": 0}
    facts = {"step": 0, "sequence": 1, "attempt": 0, "world_size": 1, "zero_stage": 0, "engine": counters}
    manifest = files.Manifest(facts, entries, tied, held)
    manifest.check_coverage()
    return manifest


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


if __name__ == "__main__":
    sys.exit(main())
