"""Speed and memory of packing, side by side on the same text, as ratios.

    python benchmarks/packing.py --input prose.jsonl more.jsonl --tokenizer DIR
    python benchmarks/packing.py --input prose.jsonl --tokenizer DIR --memory 20 400

Contenders:
    bare        `tokenizers` encode_batch_fast over texts that are already in memory; writes nothing
    ours        what tools/pack_data.py does with a shard, read -> tokenize -> write, with `tokenizers`
    quicktok    the same with --encoder quicktok (if quicktok-v1 is installed and knows the tokenizer)
    datatrove   its pipeline JsonlReader -> DocumentTokenizer (if datatrove is installed)

All run in one process on one core, tokenizers loaded beforehand, and take turns on pieces of the text. No two
documents are the same, since every tokenizer remembers words it has seen. Measured is CPU time (user +
system, all threads): it does not count what other programs do, and taking turns evens out how much they
disturb the caches. Memory is that of the whole command, at two sizes of corpus.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from wm_ds.packing import unit
from wm_ds.packing.bad_records import BadRecords
from wm_ds.packing.documents import PieceReader, Reading
from wm_ds.packing.inputs import cut, find_inputs
from wm_ds.packing.plan import Settings, make_plan
from wm_ds.packing.quicktok import QuicktokEncoder, build, check
from wm_ds.packing.tokenizer import TokenizerError, TokenizerSpec, make_encoder, open_tokenizer

ROOT = Path(__file__).resolve().parents[1]
EOS = "<|endoftext|>"


def texts_of(names: list[str]) -> list[str]:
    reading, texts = Reading(txt_split="blank-lines"), []
    inputs = find_inputs(names)
    for group in cut(inputs, 1 << 26, reading.txt_split):
        for piece in group:
            records = PieceReader(inputs[piece.input], piece, reading, lambda _: None)
            texts += [record.text for record in records if record.text]
    return texts


def write(path: Path, texts: list[str], repeat: int = 1) -> float:
    """Write jsonl; returns megabytes of text (UTF-8, without the JSON around it)."""
    with open(path, "w", encoding="utf-8") as file:
        for _ in range(repeat):
            for text in texts:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    return repeat * sum(len(text.encode()) for text in texts) / 1e6


def bare(spec: TokenizerSpec) -> Callable[[Path, list[str]], None]:
    tokenizer = Tokenizer.from_str(spec.payload.decode())
    return lambda _, texts: tokenizer.encode_batch_fast(texts, add_special_tokens=False) and None


def ours(spec: TokenizerSpec, scratch: Path, fast: Path | None) -> Callable[[Path, list[str]], None]:
    encoder = QuicktokEncoder(spec, fast) if fast else make_encoder(spec)

    def measured(source: Path, _: list[str]) -> None:
        root = scratch / "out"
        root.mkdir()
        plan = make_plan(find_inputs([str(source)]), spec, Settings(2048, shard_bytes=1 << 30))
        unit.pack_unit(plan, 0, root, encoder, BadRecords(), lambda *_: None)
        shutil.rmtree(root)

    return measured


def datatrove(tokenizer: Path, scratch: Path) -> Callable[[Path, list[str]], None]:
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from loguru import logger

    logger.remove()
    step = DocumentTokenizer(
        str(scratch / "datatrove"), str(tokenizer / "tokenizer.json"), eos_token=EOS, shuffle_documents=False
    )

    def measured(source: Path, _: list[str]) -> None:
        reader = JsonlReader(str(source.parent), glob_pattern=source.name)
        step.run(reader.run(rank=0, world_size=1), rank=0, world_size=1)

    return measured


def contenders(tokenizer: Path, scratch: Path) -> dict[str, Callable[[Path, list[str]], None]]:
    spec = open_tokenizer(str(tokenizer), EOS)
    found = {"bare": bare(spec), "ours": ours(spec, scratch, None)}
    try:
        build(spec, scratch / "quicktok")
        check(spec, scratch / "quicktok", [])
        found["quicktok"] = ours(spec, scratch, scratch / "quicktok")
    except TokenizerError as error:
        print(f"quicktok: left out, {error}")
    if importlib.util.find_spec("datatrove") is None:
        print("datatrove: not installed (pip install datatrove orjson), left out")
    else:
        found["datatrove"] = datatrove(tokenizer, scratch)
    return found


def speed(texts: list[str], tokenizer: Path, scratch: Path, pieces: int) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    runners = contenders(tokenizer, scratch)
    times: dict[str, list[float]] = {name: [] for name in runners}
    total = 0.0
    for number in range(-1, pieces):  # the first turn warms up and is not counted
        part = texts[:20] if number < 0 else texts[number::pieces]
        source = scratch / f"piece{number}.jsonl"
        written = write(source, part)
        total += written if number >= 0 else 0.0
        for name, run_on in runners.items():
            begin = time.process_time()
            run_on(source, part)
            if number >= 0:
                times[name].append(time.process_time() - begin)
        source.unlink()
    print(f"{len(texts):,} documents, {total:.1f} MB of text in {pieces} turns, {tokenizer}, one core")
    print(f"{'':<12}{'MB/s of CPU':>12}{'of bare':>10}{'of datatrove':>14}   (median of the turns' ratios)")
    for name in runners:
        row = f"{name:<12}{total / sum(times[name]):>12.2f}"
        for base, width in (("bare", 10), ("datatrove", 14)):
            if base in times:
                ratios = [one / two for one, two in zip(times[base], times[name], strict=True)]
                row += f"{statistics.median(ratios):>{width}.2f}"
        print(row)


def peak_of(encoder: str, source: Path, tokenizer: Path, output: Path) -> float:
    """Peak memory, in megabytes, of the packing command in one process."""
    options = {"--input": source, "--tokenizer": tokenizer, "--output": output, "--encoder": encoder}
    words = [str(word) for option in options.items() for word in option]
    command = [sys.executable, str(ROOT / "tools" / "pack_data.py"), "--workers", "1", "--eos", EOS, *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed")
    return usage.ru_maxrss / 1024


def memory(texts: list[str], tokenizer: Path, scratch: Path, sizes: list[int], encoder: str) -> None:
    once = sum(len(text.encode()) for text in texts) / 1e6
    peaks = []
    for size in sizes:
        source = scratch / f"{size}.jsonl"
        written = write(source, texts, max(1, round(size / once)))
        shutil.rmtree(scratch / "out", ignore_errors=True)
        peaks.append(peak_of(encoder, source, tokenizer, scratch / "out"))
        print(f"{encoder}: {written:,.0f} MB of text, peak memory {peaks[-1]:,.0f} MB", flush=True)
        source.unlink()
    print(f"peak memory of the largest over the smallest: {peaks[-1] / peaks[0]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", required=True, help="texts, as for tools/pack_data.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--pieces", type=int, default=9, help="turns that the text is dealt to (default 9)")
    parser.add_argument("--memory", type=int, nargs="+", metavar="MB", help="measure memory at these sizes")
    parser.add_argument("--memory-encoder", choices=("tokenizers", "quicktok"), default="tokenizers")
    args = parser.parse_args()
    texts = texts_of(args.input)
    with tempfile.TemporaryDirectory() as scratch:
        if args.memory:
            memory(texts, args.tokenizer, Path(scratch), args.memory, args.memory_encoder)
        else:
            speed(texts, args.tokenizer, Path(scratch), args.pieces)


if __name__ == "__main__":
    main()
