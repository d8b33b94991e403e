"""Load an exported folder in a process that cannot import wm_ds, compare its logits, and complete prompts.

    python tools/check_export.py DIR [--against RUN_OR_CHECKPOINT] [--prompt TEXT ...] [--tokens 40]

With --against, the logits that the folder computes are compared with those of the training stack's own model,
built from the checkpoint's fp32 masters in the folder's dtype.
"""

import argparse
import sys
from pathlib import Path
from typing import Any


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("folder", type=Path, metavar="DIR")
    found.add_argument("--against", type=Path, metavar="RUN_OR_CHECKPOINT")
    found.add_argument("--step", type=int, help="of a run: the checkpoint of this step")
    found.add_argument(
        "--prompt", action="append", default=[], metavar="TEXT", help="complete it; repeatable"
    )
    found.add_argument("--tokens", type=int, default=40, help="to add to each prompt (default 40)")
    found.add_argument("--json", type=Path, metavar="FILE", help="also write the result here")
    return found


if __name__ == "__main__":  # before the imports that take seconds, so that --help need not wait for them
    parser().parse_args()

import torch

from wm_ds import trained
from wm_ds.errors import run_cli
from wm_ds.export import standalone
from wm_ds.export.tokenizer import ExportError
from wm_ds.export.verify import TOLERANCE, load_apart
from wm_ds.files import write_json


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> None:
    """Check what the command line names. Raises WmError."""
    args = parser().parse_args(argv)
    folder = trained.find(args.folder)
    if folder.run_dir is not None:
        raise ExportError(f"{args.folder} is not an exported folder")
    against = None if args.against is None else trained.find(args.against, args.step)
    result = compare(folder, args.prompt, args.tokens, against)
    if args.json:
        write_json(args.json, result, indent=2, ascii=False)


def compare(
    folder: trained.Trained, prompts: list[str], new_tokens: int, against: trained.Trained | None
) -> dict[str, Any]:
    """Load the folder apart, complete the prompts by so many tokens, and compare its logits with a run's.

    Raises ExportError where it does not load, or is not the model of `against`.
    """
    config = folder.hf_config()
    generator = torch.Generator().manual_seed(1)
    length = min(64, config.max_position_embeddings)
    tokens = torch.randint(config.vocab_size, (2, length), generator=generator).tolist()
    request = {"tokens": tokens, "prompts": prompts, "prompt_tokens": new_tokens}
    tensors, printed = load_apart(folder.path, request)
    print(f"loaded {folder.path} as {printed['class']} in {printed['dtype']}, in a process without wm_ds")
    result = {"class": printed["class"], "dtype": printed["dtype"], "texts": printed["texts"]}
    if against is not None:
        dtype = getattr(torch, printed["dtype"].removeprefix("torch."))
        model = against.load(dtype)
        ours = standalone.probe(model, tokens, 0)["logits"]
        difference = (ours - tensors["logits"]).abs().max().item()
        allowed = TOLERANCE[dtype] * max(1.0, ours.abs().max().item())
        print(
            f"{ours.numel():,} logits differ from {against.path} by {difference:.1e}, "
            f"{allowed:.1e} is allowed"
        )
        if not difference <= allowed:
            raise ExportError(f"{folder.path} is not the model of {against.path}")
        result["difference"] = difference
    for text in printed["texts"]:
        print(f"--- {text}")
    return result


if __name__ == "__main__":
    sys.exit(main())
