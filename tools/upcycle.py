"""Start a run from a dense model that exists: Qwen3, Qwen2, Llama or Mistral, or a vanilla run.

    python tools/upcycle.py FOLDER configs/X.yaml [section.field=value ...] [--pool mean]
    python tools/upcycle.py FOLDER --print-model

Makes the run's directory with a checkpoint of step 0: blocks, embedding and head are the folder's, and what
layers share in the run (the pool's channels, an LCKV sandwich's KV) starts as the layers that read it had it.
Then train as usual with the same configuration: it resumes from there. docs/upcycling.md says what stays
different.
"""

import argparse
import sys
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("folder", type=Path, metavar="FOLDER", help="of transformers, or a vanilla run's")
    found.add_argument("config", nargs="?", help="the run's YAML")
    found.add_argument("overrides", nargs="*", metavar="section.field=value")
    found.add_argument("--step", type=int, help="of a vanilla run: this checkpoint, not the latest")
    found.add_argument(
        "--pool",
        default="mean",
        metavar="nearest|top|mean",
        help="which of the layers that read a shared KV it starts from (default mean)",
    )
    found.add_argument(
        "--print-model", action="store_true", help="print the run's model section for FOLDER, write nothing"
    )
    return found


if __name__ == "__main__":  # before the imports that take seconds, so that --help need not wait for them
    parser().parse_args()

import yaml

from wm_ds.config import load as configuration
from wm_ds.errors import run_cli
from wm_ds.upcycle.dense import UpcycleError, model_section, open_dense
from wm_ds.upcycle.run import upcycle


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> None:
    """Upcycle what the command line names. Raises WmError."""
    args = parser().parse_args(argv)
    with open_dense(args.folder, args.step) as dense:
        if args.print_model:
            section = {k: v for k, v in model_section(dense.config).items() if v is not None}
            print(yaml.safe_dump({"model": section}, sort_keys=False), end="")
            return
        if args.config is None:
            raise UpcycleError("name the run's YAML after the folder, or --print-model")
        config = configuration.load(args.config, args.overrides)
        path = upcycle(dense, config, args.pool)
    print(f"{path}: blocks of {args.folder}; train with the same configuration to go on from there")


if __name__ == "__main__":
    sys.exit(main())
