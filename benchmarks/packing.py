"""Speed and memory of packing, side by side on the same text, as ratios.

    python benchmarks/packing.py --input prose.jsonl more.jsonl --tokenizer DIR
    python benchmarks/packing.py --input prose.jsonl --tokenizer DIR --memory 20 400

Contenders, each on one core and in a process of its own:
    bare        `tokenizers` encode_batch_fast over texts that are already in memory; writes nothing
    ours        tools/pack_data.py, read -> tokenize -> write, with the `tokenizers` encoder
    quicktok    the same with --encoder quicktok (if quicktok-v1 is installed and knows the tokenizer)
    datatrove   its pipeline JsonlReader -> DocumentTokenizer (if datatrove is installed)

Measured is CPU time (user + system, threads included), because it does not count what other programs on the
machine do. Starting Python and loading a tokenizer take seconds and have nothing to do with the size of a
corpus; so every contender runs on a fifth of the text and on all of it, and its speed is the difference of
the texts over the difference of the times. Rounds alternate between contenders; the median of each is taken.
The documents are different from each other, since every tokenizer remembers words it has seen.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wm_ds.documents import PieceReader, Reading
from wm_ds.inputs import cut, find_inputs

ROOT = Path(__file__).resolve().parents[1]

BARE = """
import json, os, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[2])
texts = [json.loads(line)["text"] for line in open(sys.argv[1], "rb")]
begin = time.process_time()
for first in range(0, len(texts), 1000):
    tokenizer.encode_batch_fast(texts[first : first + 1000], add_special_tokens=False)
print(time.process_time() - begin)
"""

DATATROVE = """
import os, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from loguru import logger
logger.remove()
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
source, tokenizer, output = sys.argv[1:]
LocalPipelineExecutor(
    [
        JsonlReader(os.path.dirname(source), glob_pattern=os.path.basename(source)),
        DocumentTokenizer(output, tokenizer, eos_token="<|endoftext|>", shuffle_documents=False),
    ],
    workers=1,
    logging_dir=output + "/logs",
).run()
"""


def texts_of(names: list[str]) -> list[str]:
    reading, texts = Reading(txt_split="blank-lines"), []
    inputs = find_inputs(names)
    for unit in cut(inputs, 1 << 26, reading.txt_split):
        for piece in unit:
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


def run(command: list[str]) -> tuple[float, float, str]:
    """(CPU seconds, peak megabytes, standard output) of a command on one core."""
    core = min(os.sched_getaffinity(0))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = process.stdout.read(), process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ... failed: {errors[-2000:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, output


def command(name: str, source: Path, tokenizer: Path, output: Path) -> list[str]:
    if name == "bare":
        return [sys.executable, "-c", BARE, str(source), str(tokenizer / "tokenizer.json")]
    if name == "datatrove":
        return [sys.executable, "-c", DATATROVE, str(source), str(tokenizer / "tokenizer.json"), str(output)]
    packer = [
        sys.executable,
        str(ROOT / "tools" / "pack_data.py"),
        "--workers",
        "1",
        "--eos",
        "<|endoftext|>",
    ]
    encoder = "quicktok" if name == "quicktok" else "tokenizers"
    options = {"--input": source, "--tokenizer": tokenizer, "--output": output, "--encoder": encoder}
    return packer + [str(word) for option in options.items() for word in option]


def seconds(name: str, source: Path, tokenizer: Path, scratch: Path) -> float:
    output = scratch / "out"
    shutil.rmtree(output, ignore_errors=True)
    cpu, _, printed = run(command(name, source, tokenizer, output))
    return float(printed) if name == "bare" else cpu


def contenders(tokenizer: Path, scratch: Path, probe: Path) -> list[str]:
    names = ["bare", "ours"]
    if importlib.util.find_spec("quicktok") is None:
        print("quicktok: not installed (pip install quicktok-v1), left out")
    else:
        try:
            seconds("quicktok", probe, tokenizer, scratch)
            names.append("quicktok")
        except RuntimeError as error:
            print(f"quicktok: left out, {error}")
    if importlib.util.find_spec("datatrove") is None:
        print("datatrove: not installed (pip install datatrove), left out")
    else:
        names.append("datatrove")
    return names


def speed(texts: list[str], tokenizer: Path, scratch: Path, rounds: int) -> None:
    small, large = scratch / "small.jsonl", scratch / "large.jsonl"
    megabytes = [write(small, texts[::5]), write(large, texts)]
    names = contenders(tokenizer, scratch, small)
    times: dict[str, list[list[float]]] = {name: [[], []] for name in names}
    for number in range(rounds):
        for name in names:
            for part, source in enumerate((small, large)):
                times[name][part].append(seconds(name, source, tokenizer, scratch))
        print(f"round {number + 1} of {rounds} done at {time.strftime('%H:%M:%S')}", file=sys.stderr)
    speeds, starts = {}, {}
    for name in names:
        one, all_ = (statistics.median(values) for values in times[name])
        speeds[name] = (megabytes[1] - megabytes[0]) / (all_ - one)
        starts[name] = max(0.0, one - megabytes[0] / speeds[name])
    print(f"{len(texts):,} documents, {megabytes[1]:.1f} MB of text, {tokenizer}, one core, {rounds} rounds")
    print(f"{'':<12}{'MB/s of CPU':>12}{'start, s':>10}{'of bare':>10}{'of datatrove':>14}")
    for name in names:
        against = f"{speeds[name] / speeds['datatrove']:>14.2f}" if "datatrove" in names else ""
        row = f"{name:<12}{speeds[name]:>12.2f}{starts[name]:>10.1f}{speeds[name] / speeds['bare']:>10.2f}"
        print(row + against)


def memory(texts: list[str], tokenizer: Path, scratch: Path, sizes: list[int], encoder: str) -> None:
    once = sum(len(text.encode()) for text in texts) / 1e6
    peaks = []
    for size in sizes:
        source = scratch / f"{size}.jsonl"
        written = write(source, texts, max(1, round(size / once)))
        shutil.rmtree(scratch / "out", ignore_errors=True)
        _, peak, _ = run(command(encoder, source, tokenizer, scratch / "out"))
        peaks.append(peak)
        print(f"{encoder}: {written:,.0f} MB of text, peak memory {peak:,.0f} MB", flush=True)
        source.unlink()
    print(f"peak memory of the largest over the smallest: {peaks[-1] / peaks[0]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", nargs="+", required=True, help="texts, as for tools/pack_data.py")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", type=int, nargs="+", metavar="MB", help="measure memory at these sizes")
    parser.add_argument("--memory-encoder", choices=("ours", "quicktok"), default="ours")
    args = parser.parse_args()
    texts = texts_of(args.input)
    with tempfile.TemporaryDirectory() as scratch:
        if args.memory:
            memory(texts, args.tokenizer, Path(scratch), args.memory, args.memory_encoder)
        else:
            speed(texts, args.tokenizer, Path(scratch), args.rounds)


if __name__ == "__main__":
    main()
