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


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("folder", type=Path, metavar="DIR")
    found.add_argument("config", help="the run's YAML")
    found.add_argument("overrides", nargs="*", metavar="section.field=value")
    return found


if __name__ == "__main__":  # before the imports that take seconds, so that --help need not wait for them
    parser().parse_args()

from wm_ds import trained
from wm_ds.checkpoint.directory import list_checkpoints
from wm_ds.config import load as configuration
from wm_ds.errors import WmError, run_cli
from wm_ds.export.weights import read_weights
from wm_ds.upcycle.first_step import begin, model_of


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
    model = model_of(config)
    if kind != model.config.model_type:
        raise ImportFailed(f"{folder} holds a model of type {kind}, the run's is {model.config.model_type}")
    weights = dict(read_weights(folder))
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for name in sorted(set(shapes) | set(weights)):
        there = tuple(weights[name].shape) if name in weights else None
        if there != shapes.get(name):
            here = _shape(shapes.get(name))
            raise ImportFailed(f"{folder}: {name} is {_shape(there)} there and {here} in the run")
    return begin(config, model, (weights[name] for name in shapes))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


if __name__ == "__main__":
    sys.exit(main())
