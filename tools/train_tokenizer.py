#!/usr/bin/env python
"""Train a small tokenizer on the same kinds of input that pack_data reads.

    python tools/train_tokenizer.py --input texts/*.txt --vocab-size 4096 --output tokenizer

The folder loads with transformers.AutoTokenizer without remote code. EOS is also the padding token.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from wm_ds.errors import run_cli
from wm_ds.packing import train_tokenizer
from wm_ds.packing.bad_records import BadRecordError, BadRecords, describe, example
from wm_ds.packing.documents import BLANK, PieceReader, Reading
from wm_ds.packing.inputs import Input, InputError, cut, find_inputs


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", action="extend", required=True, metavar="PATH", help="as in pack_data.py")
    add("--output", required=True, type=Path, metavar="DIR")
    add("--vocab-size", type=int, default=4096, help="ids of the tokenizer, all included (default 4096)")
    add("--eos", default="<|endoftext|>", help="token that ends a document (default <|endoftext|>)")
    add("--text-field", default="text", help="field or column that holds a document (default text)")
    add("--txt-split", choices=("file", "blank-lines"), default="file")
    add("--dataset-split", default="train", help="split of a hf: dataset (default train)")
    add("--dataset-config", help="configuration of a hf: dataset")
    add(
        "--max-bytes",
        type=int,
        default=100_000_000,
        help="train on this much text from the start (default 1e8)",
    )
    add(
        "--character-coverage",
        type=float,
        default=0.9995,
        metavar="SHARE",
        help="share of the text's characters that get a piece of their own, 0.98 to 1; rarer characters are "
        "written as bytes (default 0.9995)",
    )
    add(
        "--on-bad-record",
        choices=("fail", "skip"),
        default="fail",
        help="as in pack_data.py: stop at the first bad record, or leave such records out and count them "
        "(default fail)",
    )
    add("--allow-truncated", action="store_true", help="take what a truncated compressed file still holds")
    return parser.parse_args(argv)


def read_texts(
    inputs: list[Input], reading: Reading, limit: int, bad: BadRecords
) -> tuple[list[str], Counter[str]]:
    """Texts of the inputs in order until `limit` bytes, and the bad records that were left out, by reason.

    Raises BadRecordError at the first bad record that the policy does not allow.
    """
    texts: list[str] = []
    size, left_out = 0, Counter[str]()
    for unit in cut(inputs, 1 << 28, reading.txt_split):
        for piece in unit:
            item = inputs[piece.input]
            for record in PieceReader(item, piece, reading, lambda _: None):
                if record.problem == BLANK:
                    continue
                if record.problem is not None:
                    if not bad.allows(record.problem):
                        raise BadRecordError(describe(example(item, piece, record)))
                    left_out[record.problem] += 1
                elif record.text:
                    texts.append(record.text)
                    size += len(record.text.encode())
                    if size >= limit:
                        return texts, left_out
    return texts, left_out


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> None:
    """The command, its errors as exceptions."""
    args = arguments(argv)
    if args.max_bytes < 1:
        raise train_tokenizer.TrainingError(f"--max-bytes {args.max_bytes} must be at least 1")
    train_tokenizer.check_output(args.output)
    reading = Reading(args.text_field, args.txt_split)
    bad = BadRecords(args.on_bad_record == "skip", args.allow_truncated)
    inputs = find_inputs(args.input, dataset_split=args.dataset_split, dataset_config=args.dataset_config)
    texts, left_out = read_texts(inputs, reading, args.max_bytes, bad)
    if not texts:
        raise InputError(
            f"the inputs hold no text to train on (bad records left out: {dict(left_out) or 'none'})"
        )
    model = train_tokenizer.train(texts, args.vocab_size, args.eos, args.character_coverage)
    tokenizer = train_tokenizer.wrap(model, args.eos)
    sample = [text[:20_000] for text in texts[:: max(1, len(texts) // 100)]]
    measures = train_tokenizer.save(tokenizer, model, args.output, sample)
    used = {"documents": len(texts), "text_bytes": sum(len(text.encode()) for text in texts)}
    print(json.dumps({"tokenizer": str(args.output), **measures, **used, "bad": dict(left_out)}))


if __name__ == "__main__":
    sys.exit(main())
