#!/usr/bin/env python
"""Train a small tokenizer on the same kinds of input that pack_data reads.

    python tools/train_tokenizer.py --input texts/*.txt --vocab-size 4096 --output tokenizer

The folder loads with transformers.AutoTokenizer without remote code. EOS is also the padding token.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from wm_ds.errors import run_cli
from wm_ds.packing import train_tokenizer
from wm_ds.packing.documents import BLANK, PieceReader, Reading
from wm_ds.packing.inputs import Input, InputError, cut, find_inputs


def arguments(argv: list[str] | None) -> argparse.Namespace:
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
    return parser.parse_args(argv)


def read_texts(inputs: list[Input], reading: Reading, limit: int) -> Iterator[str]:
    """Texts of the inputs in order until `limit` bytes; raises InputError at a bad record."""
    size = 0
    for unit in cut(inputs, 1 << 28, reading.txt_split):
        for piece in unit:
            item = inputs[piece.input]
            for record in PieceReader(item, piece, reading, lambda _: None):
                if record.problem == BLANK:
                    continue
                if record.text is None:
                    raise InputError(
                        f"bad record {record.where + 1} of {item.name}: {record.problem} ({record.detail})"
                    )
                size += len(record.text.encode())
                yield record.text
                if size >= limit:
                    return


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    reading = Reading(args.text_field, args.txt_split)
    inputs = find_inputs(args.input, dataset_split=args.dataset_split, dataset_config=args.dataset_config)
    texts = list(read_texts(inputs, reading, args.max_bytes))
    if not any(texts):
        raise InputError("the inputs hold no text to train on")
    model = train_tokenizer.train(texts, args.vocab_size, args.eos)
    tokenizer = train_tokenizer.wrap(model, args.eos)
    sample = [text[:20_000] for text in texts[:: max(1, len(texts) // 100)]]
    measures = train_tokenizer.save(tokenizer, model, args.output, sample)
    print(json.dumps({"tokenizer": str(args.output), **measures}))


if __name__ == "__main__":
    sys.exit(main())
