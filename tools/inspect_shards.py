#!/usr/bin/env python
"""Look into packed data: what it is, whether it is intact, what a model would see.

python tools/inspect_shards.py DIR                            # summary
python tools/inspect_shards.py DIR --verify                   # read everything, compare checksums
python tools/inspect_shards.py DIR --documents 0 17           # decoded documents, by number
python tools/inspect_shards.py DIR --sequence 3 --split train # one training sequence and its segments
python tools/inspect_shards.py DIR --histogram --png lengths.png
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from wm_ds.data import shards
from wm_ds.errors import run_cli
from wm_ds.files import write_atomically
from wm_ds.packing.plan import TOKENIZER
from wm_ds.packing.progress import Progress
from wm_ds.packing.tokenizer import open_decoder

_BAR = 50  # characters of the longest bar


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR")
    add("--verify", action="store_true", help="read all shards and compare sizes and sha256")
    add("--documents", type=int, nargs="+", default=[], metavar="N", help="print documents, counted from 0")
    add("--sequence", type=int, metavar="N", help="print sequence N of --split, in the packed order")
    add("--split", choices=("train", "holdout"), default="train")
    add("--histogram", action="store_true", help="print a histogram of document lengths in tokens")
    add("--png", type=Path, metavar="FILE", help="write that histogram as a picture")
    add("--characters", type=int, default=2000, help="cut printed texts after this many (default 2000)")
    return parser.parse_args(argv)


def summary(folder: Path, manifest: dict[str, Any]) -> str:
    """What the manifest says, as a table."""
    counts = manifest["counts"]
    size = sum((folder / r["name"] / "tokens.bin").stat().st_size for r in manifest["shards"])
    rows = [
        ("format", f"{manifest['format']} version {manifest['version']}, key {manifest['key'][:16]}"),
        ("tokenizer", f"{manifest['tokenizer']['name']} (sha256 {manifest['tokenizer']['sha256'][:16]})"),
        ("vocabulary", f"{manifest['vocab_size']:,} ids as {manifest['dtype']}"),
        ("end of document", f"{manifest['eos_token']!r} = {manifest['eos_id']}"),
        ("tokens", f"{counts['tokens']:,} from {counts['text_bytes']:,} bytes of text"),
        ("documents", f"{counts['written']:,}"),
        (
            "records",
            f"{counts['read']:,} read, {counts['empty']:,} empty, {counts['bad']:,} bad "
            f"{manifest['bad'] or ''}".rstrip(),
        ),
        (
            "sequences",
            f"{manifest['sequences']:,} of {manifest['seq_len']}, {manifest['holdout']:,} held out "
            f"by {manifest.get('holdout_by', 'row')}",
        ),
        ("alignment", f"{manifest['align']}, {counts['filler']:,} filler positions"),
        ("tail", f"{manifest['tail']}, {counts['dropped_tokens']:,} tokens dropped"),
        ("shards", f"{len(manifest['shards']):,} with {size:,} bytes of tokens"),
        ("inputs", f"{len(manifest['inputs']):,}"),
    ]
    lines = [f"{name:<16} {value}" for name, value in rows]
    for item in manifest["inputs"][:10]:
        lines.append(
            f"    {item['name']}: {item['bytes']:,} bytes, {item['documents']:,} documents, "
            f"{item['tokens']:,} tokens"
        )
    if len(manifest["inputs"]) > 10:
        lines.append(f"    and {len(manifest['inputs']) - 10:,} more")
    return "\n".join(lines)


def verify(folder: Path, manifest: dict[str, Any]) -> str:
    """Read every file and compare it with its checksum; words for people."""
    dtype = shards.token_dtype(manifest["vocab_size"])
    total = sum(r["length"] * dtype.itemsize + r["documents"] * 8 for r in manifest["shards"])
    with Progress("verifying", total, 0) as progress:
        done = 0

        def report(size: int) -> None:
            nonlocal done
            done += size
            progress.update(done, 0, 0)

        for record in manifest["shards"]:
            shards.open_shard(folder, record, dtype)
            shards.verify_shard(folder, record, report)
    return f"verified: {len(manifest['shards'])} shards, {total:,} bytes, all checksums right"


def document_tokens(folder: Path, manifest: dict[str, Any], number: int) -> np.ndarray:
    """Ids of document `number`, EOS included; raises ShardError if there is none."""
    dtype = shards.token_dtype(manifest["vocab_size"])
    left = number
    for record in manifest["shards"]:
        if 0 <= left < record["documents"]:
            tokens, ends = shards.open_shard(folder, record, dtype)
            start = shards.align_up(int(ends[left - 1]), manifest["align"]) if left else 0
            return np.array(tokens[start : int(ends[left])])
        left -= record["documents"]
    raise shards.ShardError(
        f"document {number} does not exist: {folder} holds documents 0 .. {manifest['counts']['written'] - 1}"
    )


def shortened(text: str, characters: int) -> str:
    """The text, or its beginning and how much is left out."""
    if len(text) <= characters:
        return text
    return f"{text[:characters]}... ({len(text) - characters:,} more characters)"


def show_documents(
    folder: Path, manifest: dict[str, Any], numbers: list[int], characters: int
) -> Iterator[str]:
    """The documents of these numbers as text."""
    decode = open_decoder(folder / TOKENIZER)
    for number in numbers:
        ids = document_tokens(folder, manifest, number)
        yield f"--- document {number}: {ids.size - 1:,} tokens and EOS"
        yield shortened(decode(ids[:-1].tolist()), characters)


def show_sequence(folder: Path, split: str, index: int, characters: int) -> Iterator[str]:
    """One row of a split, document by document."""
    from wm_ds.data.sequences import PackedSequences

    sequences = PackedSequences(folder, split)
    if not 0 <= index < len(sequences):
        raise shards.ShardError(
            f"sequence {index} does not exist: split {split!r} has sequences 0 .. {len(sequences) - 1}"
        )
    number = int(sequences.sequence_numbers(np.array([index]))[0])
    ids_T, documents_T = sequences.sequence(number)
    labels_T = sequences[index].labels.numpy()
    decode = open_decoder(folder / TOKENIZER)
    yield (
        f"--- sequence {index} of {split}: number {number} in stream order, positions "
        f"{number * sequences.seq_len:,} .. {(number + 1) * sequences.seq_len - 1:,}; "
        f"{int((labels_T >= 0).sum())} positions have a label"
    )
    cuts = np.flatnonzero(np.diff(documents_T)) + 1
    for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), sequences.seq_len], strict=True):
        if documents_T[start] < 0:
            yield f"[{start}:{stop}] filler"
            continue
        ids = ids_T[start:stop].tolist()
        end = "ends with EOS" if ids[-1] == sequences.eos_id else "goes on in the next sequence"
        yield f"[{start}:{stop}] segment {documents_T[start]}, {end}"
        yield f"    ids  {' '.join(map(str, ids[:12]))}{' ...' if len(ids) > 12 else ''}"
        yield f"    text {shortened(decode(ids), characters)!r}"


def length_histogram(folder: Path, manifest: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(counts, edges): documents by length in tokens, EOS included, in bins that double."""
    edges = 2 ** np.arange(0, 64, dtype=np.uint64)
    counts = np.zeros(edges.size - 1, dtype=np.int64)
    for record in manifest["shards"]:
        _, ends = shards.open_shard(folder, record, shards.token_dtype(manifest["vocab_size"]))
        for first in range(0, ends.size, 1 << 20):  # in parts: there may be more documents than memory
            stops = np.array(ends[max(first - 1, 0) : first + (1 << 20)])
            starts = shards.align_up(stops[:-1], manifest["align"])
            if first == 0:
                starts, stops = np.concatenate([[0], starts]), np.concatenate([[0], stops])
            lengths = stops[1:] - starts
            counts += np.bincount(np.log2(lengths).astype(np.int64), minlength=counts.size)
    used = np.flatnonzero(counts)
    return counts[used[0] : used[-1] + 1], edges[used[0] : used[-1] + 2]


def histogram_text(counts: np.ndarray, edges: np.ndarray) -> str:
    """Document lengths as bars of text."""
    lines = ["document lengths in tokens (EOS included)"]
    for count, low, high in zip(counts.tolist(), edges.tolist(), edges[1:].tolist()):
        bar = "#" * round(_BAR * count / max(counts.max(), 1))
        lines.append(f"{low:>12,} .. {high - 1:<12,} {count:>14,} {bar}")
    return "\n".join(lines)


def histogram_picture(counts: np.ndarray, edges: np.ndarray, path: Path) -> None:
    """Document lengths as a picture (PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    axes.bar(range(counts.size), counts, width=0.9)
    axes.set_xticks(range(counts.size), [f"{low:,}" for low in edges[:-1].tolist()], rotation=45)
    axes.set_xlabel("tokens from this length to the next (EOS included)")
    axes.set_ylabel("documents")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    pyplot.close(figure)
    write_atomically(path, picture.getvalue())


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> None:
    """The command, its errors as exceptions."""
    args = arguments(argv)
    manifest = shards.load_manifest(args.folder)
    asked = args.documents or args.sequence is not None or args.histogram or args.png
    if not asked or args.verify:
        print(summary(args.folder, manifest))
    if args.verify:
        print(verify(args.folder, manifest))
    for line in show_documents(args.folder, manifest, args.documents, args.characters):
        print(line)
    if args.sequence is not None:
        for line in show_sequence(args.folder, args.split, args.sequence, args.characters):
            print(line)
    if args.histogram or args.png:
        counts, edges = length_histogram(args.folder, manifest)
        if args.histogram:
            print(histogram_text(counts, edges))
        if args.png:
            histogram_picture(counts, edges, args.png)


if __name__ == "__main__":
    sys.exit(main())
