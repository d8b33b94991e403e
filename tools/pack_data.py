#!/usr/bin/env python
"""Tokenize and pack a corpus into shards for training.

    python tools/pack_data.py --input 'texts/*.jsonl.gz' --tokenizer DIR --output packed --seq-len 2048
    python tools/pack_data.py ... --task $SLURM_ARRAY_TASK_ID --tasks 16     # one slice of the work
    python tools/pack_data.py merge packed                                   # after all slices: the manifest

The same command again goes on where a killed one stopped. docs/data.md explains format and choices.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wm_ds.errors import run_cli
from wm_ds.packing import workers
from wm_ds.packing.bad_records import BadRecords
from wm_ds.packing.hf_datasets import DATASET_PREFIX
from wm_ds.packing.inputs import find_inputs
from wm_ds.packing.manifest import merge
from wm_ds.packing.plan import PackError, Plan, Settings, make_plan
from wm_ds.packing.progress import Progress
from wm_ds.packing.tokenizer import open_tokenizer


@dataclass(frozen=True)
class Job:
    """What to do with a plan: where to, by how many processes, and which slice of it (None: the whole)."""

    output: Path
    bad: BadRecords
    workers: int
    task: int
    tasks: int | None
    json: bool


def arguments(argv: list[str]) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        action="extend",
        required=True,
        metavar="PATH",
        help="files, folders, quoted globs (.jsonl .json .txt, each also with .gz or .zst; .parquet .arrow), "
        "folders of Dataset.save_to_disk, or hf:NAME[@REVISION] for a Hugging Face dataset, streamed",
    )
    add(
        "--tokenizer",
        required=True,
        help="Hugging Face folder or name, tokenizer.json, or sentencepiece .model",
    )
    add("--output", required=True, type=Path, metavar="DIR")
    add("--seq-len", type=int, default=2048, help="positions of a training sequence (default 2048)")
    add(
        "--align",
        type=int,
        default=8,
        help="start every document at a multiple of this many positions, with masked filler before it: with "
        "the model's group count, a document's place does not matter; 1 packs without filler (default 8)",
    )
    add("--holdout", type=int, default=0, metavar="N", help="sequences of the held-out split (default 0)")
    add(
        "--holdout-by",
        choices=("row", "document"),
        default="row",
        help="row: held-out sequences may begin and end inside documents that training also sees, as in the "
        "paper; document: training sees no document of a held-out sequence (default row)",
    )
    add(
        "--tail",
        choices=("pad", "drop"),
        default="pad",
        help="the corpus's last, incomplete sequence: fill it with masked filler, or drop it (default pad)",
    )
    add("--shuffle-seed", type=int, default=0, help="names the order whose end is held out (default 0)")
    add("--eos", metavar="TOKEN", help="token that ends every document (default: the tokenizer's EOS)")
    add(
        "--literal-tokens",
        choices=("special", "all"),
        default="special",
        help="added tokens whose characters stay characters inside a document: those marked special, or all "
        "(for Qwen: also <think>, <|fim_prefix|>, ...) (default special)",
    )
    add(
        "--encoder",
        choices=("tokenizers", "quicktok"),
        default="tokenizers",
        help="quicktok: many times faster for byte-level BPE; checked against tokenizers on a sample of the "
        "inputs first, and refused on any difference (needs the package quicktok-v1)",
    )
    add("--text-field", default="text", help="field or column that holds a document (default text)")
    add(
        "--txt-split",
        choices=("file", "blank-lines"),
        default="file",
        help="a .txt file is one document, or documents separated by blank lines (default file)",
    )
    add("--dataset-split", default="train", help="split of a hf: dataset (default train)")
    add("--dataset-config", help="configuration of a hf: dataset")
    add(
        "--on-bad-record",
        choices=("fail", "skip"),
        default="fail",
        help="invalid JSON or UTF-8, lone surrogates, a missing, null or non-string text, damaged or "
        "truncated compressed files: stop at the first, or leave out and count (default fail)",
    )
    add("--allow-truncated", action="store_true", help="take what a truncated compressed file still holds")
    add("--workers", type=int, default=workers.default_workers(), help="processes (default: usable cores)")
    add(
        "--shard-bytes",
        type=int,
        metavar="N",
        help="input bytes a shard is made of (default: 1/64 of the corpus, from 1 MiB to 256 MiB)",
    )
    add("--task", type=int, default=0, help="pack slice i of --tasks n (a SLURM array); finish with merge")
    add("--tasks", type=int, help="number of slices")
    add("--json", action="store_true", help="print the summary as one JSON object on stdout")
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"--workers {args.workers} must be at least 1")
    if args.tasks is None and args.task:
        parser.error("--task needs --tasks")
    if not 0 <= args.task < (args.tasks or 1):
        parser.error(f"--task {args.task} is not one of --tasks {args.tasks}: they count from 0")
    return args


def merge_arguments(argv: list[str]) -> argparse.Namespace:
    """The parsed command line of `merge`."""
    parser = argparse.ArgumentParser(
        prog="pack_data.py merge", description="Verify all shards, write the manifest."
    )
    parser.add_argument("output", type=Path, metavar="DIR")
    parser.add_argument("--json", action="store_true", help="print the summary as one JSON object on stdout")
    return parser.parse_args(argv)


def make_job(args: argparse.Namespace) -> tuple[Plan, Job]:
    """What the command line asks for. Raises PackError where inputs or tokenizer cannot be used."""
    files = find_inputs(args.input, dataset_split=args.dataset_split, dataset_config=args.dataset_config)
    for name in args.input:
        folder = name if os.path.exists(name) else name.removeprefix(DATASET_PREFIX)
        if args.output.resolve().is_relative_to(Path(folder).resolve()):
            raise PackError(f"--output {args.output} lies inside --input {name}; choose another folder")
    tokenizer = open_tokenizer(args.tokenizer, args.eos, args.literal_tokens)
    settings = Settings(
        seq_len=args.seq_len,
        align=args.align,
        tail=args.tail,
        holdout=args.holdout,
        holdout_by=args.holdout_by,
        shuffle_seed=args.shuffle_seed,
        text_field=args.text_field,
        txt_split=args.txt_split,
        shard_bytes=args.shard_bytes,
        literal_tokens=args.literal_tokens,
        encoder=args.encoder,
    )
    bad = BadRecords(args.on_bad_record == "skip", args.allow_truncated)
    job = Job(args.output, bad, args.workers, args.task, args.tasks, args.json)
    return make_plan(files, tokenizer, settings), job


def run_pack(plan: Plan, job: Job) -> dict[str, Any] | None:
    """Pack; the manifest, or None where this was one task of several."""
    tasks = job.tasks or 1
    todo = workers.unpublished(job.output, workers.task_units(plan, job.task, tasks))
    with Progress("packing", plan.bytes_of(todo), len(todo)) as progress:
        done = workers.pack(
            plan,
            job.output,
            bad=job.bad,
            workers=job.workers,
            task=job.task,
            tasks=tasks,
            report=progress.update,
        )
    if job.tasks is None:
        return merge(job.output, verify=False)
    if job.json:
        print(json.dumps({"output": str(job.output), "task": job.task, "tasks": tasks, **done}))
    else:
        print(
            f"task {job.task} of {tasks}: {done['shards']} shards are published in {job.output} with "
            f"{done['documents']:,} documents, {done['tokens']:,} tokens, "
            f"{done['bad']:,} bad records left out; when all tasks are done, run: "
            f"python tools/pack_data.py merge {shlex.quote(str(job.output))}"
        )
    return None


def run_merge(output: Path) -> dict[str, Any]:
    """Verify all shards and write the manifest."""
    with Progress("verifying", 0, 0) as progress:
        done = 0

        def report(size: int) -> None:
            nonlocal done
            done += size
            progress.update(done, 0, 0)

        return merge(output, verify=True, report=report)


def summary(manifest: dict[str, Any], output: Path) -> str:
    """What was packed, in a few lines."""
    counts, bad = manifest["counts"], manifest["bad"]
    lines = [
        f"{output}: {counts['tokens']:,} tokens in {counts['written']:,} documents, "
        f"{manifest['sequences']:,} sequences of {manifest['seq_len']} "
        f"({manifest['holdout']:,} held out by {manifest['holdout_by']}), "
        f"{len(manifest['shards'])} shards of {manifest['dtype']}",
        f"records: read={counts['read']} written={counts['written']} empty={counts['empty']} "
        f"bad={counts['bad']} blank_lines={counts['blank_lines']}",
        f"filler (align {manifest['align']}): {counts['filler']:,} positions; "
        f"dropped at the end (tail {manifest['tail']}): {counts['dropped_tokens']:,} tokens",
    ]
    if left_out := manifest.get("holdout_left_out"):
        lines.append(
            f"not trained on, since their documents are held out: {left_out['positions']:,} positions, among "
            f"them {left_out['sequences']:,} whole sequences"
        )
    if bad:
        lines.append("bad records: " + ", ".join(f"{reason}={count}" for reason, count in bad.items()))
        lines += [
            f"  {example['place']}: {example['reason']} ({example['detail']})"
            for example in manifest["bad_examples"]
        ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv, interrupted="interrupted; run the same command again to go on")


def run(argv: list[str] | None = None) -> None:
    """The command, its errors as exceptions."""
    argv = sys.argv[1:] if argv is None else argv
    manifest: dict[str, Any] | None
    if argv[:1] == ["merge"]:
        args = merge_arguments(argv[1:])
        manifest = run_merge(args.output)
    else:
        args = arguments(argv)
        manifest = run_pack(*make_job(args))
    if manifest is not None:
        if args.json:
            chosen = {name: value for name, value in manifest.items() if name not in ("shards", "inputs")}
            print(json.dumps({"output": str(args.output), **chosen}))
        else:
            print(summary(manifest, args.output))


if __name__ == "__main__":
    sys.exit(main())
