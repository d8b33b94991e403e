#!/usr/bin/env python3
"""Inference as ratios to transformers' Qwen3 of the same width and depth, in one process on one device.

    python benchmarks/inference.py                                      the paper's shape (slow on a CPU)
    python benchmarks/inference.py --layers 4 --width 128 --length 256 --contexts 128 256 --repeats 3

Prefill: three cyclic passes of eight groups over a prompt, and one or two passes behind a layerwise start
("sweep + passes x groups"); the cache made, no logits but the last. The bar is 1.1 times the ratio of FLOPs
that these need in fp32, 1.25 times in bf16. Decoding: one more token behind contexts of the given lengths;
the bar is 1.05 at k <= L. Cache: bytes, exactly k/L. Candidates run in turn, `--repeats` rounds after a
warm-up (ten times as many in decoding), and a ratio is the median over rounds of the two times of one
round, so that a slow machine slows down both. On a machine that other programs use, `--cpu-time` counts the
seconds that this process was computing instead of those that passed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from benchmarks.machine import machine_line
from benchmarks.turns import take_turns
from tools.count_flops import prefill as prefill_flops
from wm_ds.config import load as configuration
from wm_ds.distributed import process_group
from wm_ds.families import build_model, model_config
from wm_ds.model.modeling import CACHE_FIELD

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PREFILL_BAR = {"float32": 1.1, "bfloat16": 1.25}
DECODE_BAR = 1.05
# Ways to read a prompt, as `generate` takes them. The first is the paper's.
PREFILLS: dict[str, dict[str, Any]] = {
    "3 x 8 groups": {"prefill_passes": 3},
    "sweep + 1 x 1": {"prefill_start": "layerwise", "prefill_passes": 1, "prefill_groups": 1},
    "sweep + 1 x 8": {"prefill_start": "layerwise", "prefill_passes": 1},
    "sweep + 2 x 1": {"prefill_start": "layerwise", "prefill_passes": 2, "prefill_groups": 1},
}


@dataclass(frozen=True)
class Options:
    """What to compare: the command line's options, see main."""

    layers: int
    width: int
    channels: list[int]
    length: int
    contexts: list[int]
    vocabulary: int
    dtypes: list[str]
    repeats: int
    cpu_time: bool
    json: bool


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--channels", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--length", type=int, default=2048, help="of the prompt in prefill")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 4096])
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of computing, not of the clock")
    parser.add_argument("--json", action="store_true")
    options = Options(**vars(parser.parse_args()))
    device = process_group.pick_device(0)[0]
    if options.cpu_time and device.type != "cpu":
        parser.error(f"--cpu-time is for computing on a CPU, the device here is {device}")
    rows = [row for dtype in options.dtypes for row in compare(options, dtype, device)]
    print(json.dumps(rows, indent=2) if options.json else table(rows))
    print(f"at the end: {machine_line()}", file=sys.stderr)  # stdout may be the JSON
    return 0


def build(options: Options, channels: int | None) -> Any:
    """Qwen3 (channels None) or WhiteMatter at the options' shape, fp32 on the current default device."""
    shape: dict[str, Any] = {
        "family": "vanilla" if channels is None else "whitematter",
        "hidden_size": options.width,
        "intermediate_size": 3 * options.width,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": options.width * 3 // 16,
    }
    if channels is not None:
        shape |= {"num_kv_channels": channels, "num_groups": 8, "no_grad_passes": 1, "grad_passes": 2}
    length = max(options.length, *options.contexts) + 1
    config = model_config(
        configuration.Model(**shape), vocab_size=options.vocabulary, seq_len=length, eos_id=None
    )
    return build_model(config, seed=0).eval()


@torch.no_grad()
def compare(options: Options, dtype: str, device: torch.device) -> list[dict[str, Any]]:
    """One row for each measurement of each k, in one dtype."""
    named: dict[str, int | None] = {"vanilla": None} | {f"k={k}": k for k in options.channels}
    models = {name: build(options, k).to(device, DTYPES[dtype]) for name, k in named.items()}
    prompt = torch.randint(options.vocabulary, (1, options.length), device=device)
    lean = {name: prefill_ratios(options, k) for name, k in named.items() if k is not None}

    rows = []
    prefills = {"vanilla": lambda: run_prefill(models["vanilla"], prompt)}
    for name in lean:
        for how, settings in PREFILLS.items():
            prefills[f"{name}, {how}"] = lambda m=models[name], s=settings: run_prefill(m, prompt, **s)
    times = take_turns(prefills, options.repeats, cpu_time=options.cpu_time)
    for name, ratios in lean.items():
        for how, flops in ratios.items():
            what = f"prefill of {options.length}, {how}"
            bar = PREFILL_BAR[dtype] * flops
            rows.append(
                row(what, name, dtype, ratio_of(times, f"{name}, {how}"), bar, f"{flops:.2f} x FLOPs")
            )
    for context in options.contexts:
        tokens = torch.randint(options.vocabulary, (1, context), device=device)
        caches = {name: run_prefill(model, tokens) for name, model in models.items()}
        sizes = {name: cache_bytes(cache) for name, cache in caches.items()}
        token = tokens[:, :1]

        def decode(name: str, token: torch.Tensor = token, caches: dict = caches) -> None:
            models[name](token, use_cache=True, **{CACHE_FIELD: caches[name]})
            caches[name].crop(-1)

        decodes = {n: lambda n=n: decode(n) for n in named}
        times = take_turns(decodes, options.repeats * 10, cpu_time=options.cpu_time)
        for name, k in list(named.items())[1:]:
            ratio = ratio_of(times, name)
            rows.append(row(f"decode behind {context}", name, dtype, ratio, DECODE_BAR, "time"))
            share = sizes[name] / sizes["vanilla"]
            rows.append(row(f"cache of {context}", name, dtype, share, int(k or 0) / options.layers, "bytes"))
    return rows


def row(what: str, name: str, dtype: str, ratio: float, bar: float, note: str) -> dict[str, Any]:
    """One line of the table; also printed at once on stderr, since the whole takes long."""
    met = ratio <= bar * (1 + 1e-9)
    print(f"{what}, {name}, {dtype}: {ratio:.3f} ({bar:.3f})", file=sys.stderr, flush=True)
    return {"what": what, "model": name, "dtype": dtype, "ratio": ratio, "bar": bar, "met": met, "note": note}


def prefill_ratios(options: Options, channels: int) -> dict[str, float]:
    """FLOPs of each way to read a prompt, over those of Qwen3's prefill."""
    with torch.device("meta"):
        base = prefill_flops(build(options, None), options.length)
        lm = build(options, channels)
        found = {}
        for how, settings in PREFILLS.items():
            named = {name.removeprefix("prefill_"): value for name, value in settings.items()}
            schedule = lm.config.prefill_schedule("cyclic", **named)
            found[how] = prefill_flops(lm, options.length, schedule=schedule) / base
    return found


def run_prefill(model: Any, tokens: torch.Tensor, **settings: Any) -> Any:
    """The cache of a prompt; logits of its last position only, as generation needs."""
    return getattr(model(tokens, use_cache=True, logits_to_keep=1, **settings), CACHE_FIELD)


def cache_bytes(cache: Any) -> int:
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def ratio_of(seconds: dict[str, list[float]], name: str) -> float:
    """The median, over rounds, of a candidate's time over vanilla's."""
    return median(mine / theirs for mine, theirs in zip(seconds[name], seconds["vanilla"]))


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'':<32}{'model':<8}{'dtype':<10}{'ratio':>8}{'bar':>8}"]
    for r in rows:
        verdict = f"{'met' if r['met'] else 'not met'} ({r['note']})"
        numbers = f"{r['ratio']:>8.3f}{r['bar']:>8.3f}"
        lines.append(f"{r['what']:<32}{r['model']:<8}{r['dtype']:<10}{numbers}  {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
