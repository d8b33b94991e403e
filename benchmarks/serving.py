"""vLLM on WhiteMatter beside vLLM on Qwen3 of the same shape: decoding, prefill for its FLOPs, concurrency.

    make test-serving ARGS=--collect-only                    # once: builds .venv-serving
    .venv-serving/bin/python benchmarks/serving.py --json serving.json
    .venv/bin/python benchmarks/serving.py --plot serving.json serving.png

Weights are random. The engines live in this process and take turns; what is printed are ratios of medians,
since a machine's speed changes while they run. Decoding: a step's time over Qwen3's (bar: 1). Prefill: time
over Qwen3's, for its products over Qwen3's (bar: 1.5). Concurrency: how many tokens a GiB of cache holds, and
what a fixed cache serves when many more sequences ask than fit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

BAR_DECODE, BAR_PREFILL = 1.0, 1.5
BLOCK = 32


@dataclass(frozen=True)
class Candidate:
    """A model: `channels` None is Qwen3; `fields` go into its config.json."""

    name: str
    channels: int | None
    fields: dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--prompts", nargs="*", default=["1x512", "4x128"], help="COUNTxLENGTH")
    parser.add_argument("--cache-mib", type=int, default=16, help="the fixed cache; 0 leaves that part out")
    parser.add_argument("--sequences", type=int, default=24, help="of 128 tokens, that ask for that cache")
    parser.add_argument("--steps", type=int, default=24, help="of decoding, in each round")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of computing, not of the clock")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("JSON", "PNG"), help="draw what --json wrote")
    options = parser.parse_args()
    if options.plot:
        if not options.plot[0].is_file():
            parser.error(f"{options.plot[0]} does not exist; --json writes such a file")
        draw(json.loads(options.plot[0].read_text()), options.plot[1])
        return 0
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    rows = [row for part in (speed, concurrency) for row in part(options)]
    facts = {"load": os.getloadavg()[0], "cores": os.cpu_count(), **vars(options) | {"json": None}}
    if options.json:
        options.json.write_text(json.dumps({"facts": facts, "rows": rows}, indent=2, default=str) + "\n")
    print(f"{facts['cores']} cores, load {facts['load']:.1f} at the end")
    return 0


def candidates(options: argparse.Namespace) -> list[Candidate]:
    """Qwen3 first; WhiteMatter with the trained passes, with a layerwise start and one pass, and exact."""
    few = {"prefill": "cyclic", "prefill_groups": 1, "prefill_passes": 1, "start": "layerwise"}
    return [
        Candidate("qwen3", None, {}),
        Candidate("trained", options.channels, {}),
        Candidate("layerwise + 1", options.channels, few),
    ]


def write_config(candidate: Candidate, options: argparse.Namespace, folder: Path) -> Path:
    """A folder with a config.json; vLLM draws the weights itself."""
    entry = {
        "vocab_size": 4096,
        "hidden_size": options.width,
        "intermediate_size": 3 * options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": options.width // 8,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "dtype": options.dtype,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
    }
    if candidate.channels is not None:
        entry |= {"model_type": "whitematter", "architectures": ["WhiteMatterForCausalLM"]}
        entry |= {
            "num_kv_channels": candidate.channels,
            "num_groups": 8,
            "no_grad_passes": 1,
            "grad_passes": 2,
        }
        entry |= candidate.fields
    folder = folder / candidate.name.replace(" ", "_")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(entry))
    return folder


def engine(candidate: Candidate, options: argparse.Namespace, **settings: Any) -> Any:
    """vLLM on a candidate, without prefix caching (prompts here have nothing in common)."""
    from vllm import LLM

    with tempfile.TemporaryDirectory() as scratch:
        usual = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": options.dtype,
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "block_size": BLOCK,
            "max_num_seqs": max([64, *options.batches]),
            "max_num_batched_tokens": 4096,
        }
        return LLM(str(write_config(candidate, options, Path(scratch))), **(usual | settings))


def speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Decoding and prefill."""
    models = candidates(options)
    engines = {model.name: engine(model, options) for model in models}
    rows = []
    for batch in options.batches:
        asked = prompts(batch, 16)
        calls = {
            name: [lambda llm=llm, n=n, asked=asked: run(llm, asked, n) for n in (2, 2 + options.steps)]
            for name, llm in engines.items()
            if name in ("qwen3", "trained")  # decoding knows no prefill
        }
        times = take_turns(calls, options)
        per_step = {name: median(b - a for a, b in found) / options.steps for name, found in times.items()}
        ratio = per_step["trained"] / per_step["qwen3"]
        rows.append(row(f"decode, batch {batch}", "whitematter", ratio, BAR_DECODE, per_step))
    for shape in options.prompts:
        count, length = map(int, shape.split("x"))
        asked = prompts(count, length)
        times = take_turns(
            {n: [lambda llm=e, asked=asked: run(llm, asked, 1)] for n, e in engines.items()}, options
        )
        seconds = {name: median(found[0] for found in all_) for name, all_ in times.items()}
        base = prefill_products(models[0], options, length)
        for model in models[1:]:
            products = prefill_products(model, options, length) / base
            ratio = seconds[model.name] / seconds["qwen3"]
            note = {"products": products, "time": ratio} | seconds
            rows.append(row(f"prefill {shape}, per product", model.name, ratio / products, BAR_PREFILL, note))
    return rows


def concurrency(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens of cache for each GiB, and many sequences of 128 tokens on a fixed cache."""
    if not options.cache_mib:
        return []
    rows, engines = [], {}
    for model in candidates(options)[:2]:
        layers = options.layers if model.channels is None else model.channels
        bytes_each = 2 if options.dtype == "bfloat16" else 4
        block = layers * 2 * 4 * (options.width // 8) * bytes_each * BLOCK
        blocks = options.cache_mib * 2**20 // block  # and one that is vLLM's own
        engines[model.name] = engine(model, options, num_gpu_blocks_override=blocks + 1, max_model_len=256)
        rows.append({"what": "cache", "model": model.name, "tokens_per_gib": 2**30 // block * BLOCK})
    asked = prompts(options.sequences, 64)
    most: dict[str, int] = {}
    calls = {n: [lambda n=n, e=e: most.update({n: serve(e, asked, 64)})] for n, e in engines.items()}
    times = take_turns(calls, options)
    seconds = {name: median(found[0] for found in all_) for name, all_ in times.items()}
    for name in engines:
        served = options.sequences * 64 / seconds[name]
        rows.append(
            {
                "what": f"{options.sequences} sequences on {options.cache_mib} MiB",
                "model": name,
                "running": most[name],
            }
            | {"tokens_per_s": served, "throughput": seconds["qwen3"] / seconds[name]}
        )
        print(f"{rows[-1]}", flush=True)
    return rows


def serve(llm: Any, asked: list[dict[str, Any]], new: int) -> int:
    """All answers, as fast as the cache allows: the most sequences that ran at once, on a step's average."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(asked):
        llm.llm_engine.add_request(str(number), prompt, sampling)
    running = []
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
        running.append(len(llm.llm_engine.engine_core.engine_core.scheduler.running))
    return max(running)


def run(llm: Any, asked: list[dict[str, Any]], new: int) -> None:
    """Greedy answers of `new` tokens."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    llm.generate(asked, sampling, use_tqdm=False)


def prompts(count: int, length: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [{"prompt_token_ids": [draw.randrange(4096) for _ in range(length)]} for _ in range(count)]


def prefill_products(model: Candidate, options: argparse.Namespace, length: int) -> float:
    """Multiplications of a prompt's matrix products, head and embedding left out, for each token."""
    width, layers, heads = options.width, options.layers, 8 * (options.width // 8)
    kv = heads // 2
    block = 2 * width * heads + 3 * width * 3 * width + heads * length  # q, o, MLP, scores and values
    if model.channels is None:
        return layers * (block + 2 * width * kv)
    k, sources = model.channels, -(-layers // 2)
    channel = 2 * (layers * sources * width + layers * width + kv * width)  # router, mixture, projection
    pool = k * channel
    passes = model.fields.get("prefill_passes", 3)
    start = layers * (block + channel) + pool if model.fields.get("start") == "layerwise" else pool
    return start + passes * (layers * block + pool)


def take_turns(calls: dict[str, list[Any]], options: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Seconds of each candidate's calls, in rounds after a warm-up."""
    clock = time.process_time if options.cpu_time else time.perf_counter
    seconds: dict[str, list[list[float]]] = {name: [] for name in calls}
    for turn in range(options.repeats + 1):
        for name, parts in calls.items():
            found = []
            for call in parts:
                start = clock()
                call()
                found.append(clock() - start)
            if turn:
                seconds[name].append(found)
    return seconds


def row(what: str, model: str, ratio: float, bar: float, note: dict[str, float]) -> dict[str, Any]:
    """A ratio and whether it meets its bar; printed at once, since the whole takes long."""
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in note.items())
    print(
        f"{what}, {model}: {ratio:.2f} ({'met' if ratio <= bar else 'not met'}: {bar}; {numbers})", flush=True
    )
    return {"what": what, "model": model, "ratio": ratio, "bar": bar, "met": ratio <= bar, "note": note}


def draw(found: dict[str, Any], path: Path) -> None:
    """Tokens for each GiB, sequences at once and their throughput, side by side."""
    from matplotlib import pyplot

    caches = [row for row in found["rows"] if row["what"] == "cache"]
    served = [row for row in found["rows"] if "running" in row]
    if not caches:
        raise SystemExit("error: the file has no figures of concurrency; run without --cache-mib 0")
    facts = found["facts"]
    names = [
        "Qwen3" if row["model"] == "qwen3" else f"WhiteMatter, k = {facts['channels']}" for row in caches
    ]
    panels = (
        ("tokens of cache for each GiB", [row["tokens_per_gib"] for row in caches]),
        (f"sequences at once on {facts['cache_mib']} MiB", [row["running"] for row in served]),
        ("throughput over Qwen3's", [row["throughput"] for row in served]),
    )
    figure, axes = pyplot.subplots(1, 3, figsize=(10, 3.2), layout="constrained")
    for axis, (title, values) in zip(axes, panels):
        bars = axis.bar(names, values, color=["#9aa5b1", "#2f6f9f"], width=0.6)
        axis.bar_label(bars, [f"{value:,.3g}" if value < 10 else f"{value:,}" for value in values])
        axis.set_title(title, fontsize=10)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{facts['layers']} layers, width {facts['width']}, {facts['dtype']}", fontsize=10)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    sys.exit(main())
