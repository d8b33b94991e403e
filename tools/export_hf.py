"""Export a checkpoint as a Hugging Face folder that transformers loads without this project.

    python tools/export_hf.py RUN_OR_CHECKPOINT --output DIR [--dtype bfloat16] [--max-shard-size 5GB]

Takes a run directory (its latest checkpoint, or --step N) or one checkpoint's directory, of any ZeRO stage
and number of ranks. Runs on one CPU. The folder is checked before it gets its name: every tensor against the
checkpoint, then logits and generated tokens in a process that cannot import wm_ds.
"""

import argparse
import dataclasses
import logging
import resource
import sys
import time
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT")
    found.add_argument(
        "--output", type=Path, required=True, help="folder to write; an older export is replaced"
    )
    found.add_argument("--step", type=int, help="export the checkpoint of this step")
    found.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="of the weights (default bfloat16)",
    )
    found.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of one weight file (default 5GB)"
    )
    found.add_argument("--tokenizer", type=Path, help="the tokenizer's folder, where the run's own has moved")
    found.add_argument(
        "--push-to-hub", metavar="NAME", help="also upload the folder to this repository of the Hub"
    )
    found.add_argument("--private", action="store_true", help="create that repository as a private one")
    return found


if __name__ == "__main__":  # before the imports that take seconds, so that --help need not wait for them
    parser().parse_args()

from wm_ds import trained
from wm_ds.distributed import log as terminal
from wm_ds.errors import run_cli
from wm_ds.export.export import export
from wm_ds.export.tokenizer import ExportError
from wm_ds.export.weights import DTYPES, parse_size

log = logging.getLogger("wm_ds.export_hf")


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> None:
    """Export what the command line names. Raises WmError."""
    args = parser().parse_args(argv)
    terminal.start()
    start = time.monotonic()
    size = parse_size(args.max_shard_size)
    source = trained.find(args.source, args.step)
    if source.run_dir is None:
        raise ExportError(f"{args.source} is an exported folder already")
    if args.tokenizer is not None:
        source = dataclasses.replace(source, tokenizer=args.tokenizer)
    hub = Hub(args.push_to_hub, args.private) if args.push_to_hub else None
    if hub is not None:
        hub.check()
    folder = export(source, args.output, dtype=DTYPES[args.dtype], max_shard_size=size)
    if hub is not None:
        hub.push(folder)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = time.monotonic() - start
    log.info(f"exported step {source.step} to {folder} in {seconds:.0f} s, {peak / 1e9:.2f} GB peak")


class Hub:
    """A repository of the Hugging Face Hub to upload to. Raises ExportError, one line, where that fails."""

    def __init__(self, name: str, private: bool) -> None:
        from huggingface_hub import HfApi

        self.name, self.private, self.api = name, private, HfApi()

    def check(self) -> None:
        """Is the Hub there, and does it know us? Asked before the export, which may take an hour."""
        try:
            self.api.whoami()
        except Exception as error:
            raise ExportError(
                f"cannot upload to {self.name}: {reason(error)}; nothing was exported"
            ) from None

    def push(self, folder: Path) -> None:
        """Upload the folder. Raises ExportError."""
        log.info(f"uploading to {self.name}")
        try:
            self.api.create_repo(self.name, private=self.private, exist_ok=True)
            self.api.upload_folder(
                repo_id=self.name, folder_path=folder, commit_message=f"Upload {folder.name}"
            )
        except Exception as error:
            raise ExportError(
                f"{folder} is complete, but uploading it to {self.name} failed: {reason(error)}"
            ) from None


def reason(error: Exception) -> str:
    """What went wrong, in one line: the client's errors have many kinds and most have several lines."""
    from huggingface_hub.errors import LocalTokenNotFoundError

    if isinstance(error, LocalTokenNotFoundError):
        return "no token; run `hf auth login` or set HF_TOKEN"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)}"


if __name__ == "__main__":
    sys.exit(main())
