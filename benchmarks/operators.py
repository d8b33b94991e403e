#!/usr/bin/env python3
"""What a training step, a prefill and a decoded token launch and move, counted and not timed.

    python benchmarks/operators.py                                    the paper's shape (slow on a CPU)
    python benchmarks/operators.py --layers 4 --width 128 --length 256 --channels 4

`launched`: operators that compute or copy, in eager mode, forward and backward. Views and allocations launch
nothing and do not count. `moved`: bytes that operators other than products and attention read and write, per
token; an expanded operand counts once. Both depend on torch's version and on the device's attention kernel,
not on how fast the machine is or what else it does. Qwen3 of transformers, same shape, is counted alike.
Compiled blocks are not counted: torch.compile does not run under a dispatch mode.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.machine import machine_line
from wm_ds.config import load as configuration
from wm_ds.engine.loss import TokenLoss
from wm_ds.families import build_model, model_config
from wm_ds.model.modeling import CACHE_FIELD

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "mv", "dot"}
ALLOCATIONS = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "lift_fresh",
}
GATHERS = {"embedding", "index_select", "gather", "index"}
FILLS = {"copy_", "zero_", "fill_"}


@dataclass(frozen=True)
class Shape:
    """One model and its input. `channels` None: Qwen3."""

    layers: int
    width: int
    length: int
    rows: int
    vocabulary: int
    channels: int | None


@dataclass
class Counts:
    """What was launched, by operator, and bytes read and written by all but products and attention."""

    launched: Counter[str] = field(default_factory=Counter)
    moved: int = 0

    @property
    def operators(self) -> int:
        return self.launched.total()


class Counting(TorchDispatchMode):
    """Counts every operator that runs inside of it, those of backward too."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ALLOCATIONS or func.is_view or name == "_unsafe_view" or not _tensors(result):
            return result
        self.counts.launched[name] += 1
        if name not in PRODUCTS and "attention" not in name:
            self.counts.moved += _bytes(func, args, kwargs or {}, result)
        return result


def _bytes(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    """Read and written by one operator. A gather reads as much of its table as it returns; what an operator
    changes in place it reads and writes, unless it only fills it."""
    name = func.overloadpacket.__name__
    operands = _tensors((args, kwargs))
    written = sum(map(_touched, _tensors(result)))
    if name in GATHERS:
        return 2 * written + sum(map(_touched, operands[1:]))
    return written + sum(map(_touched, operands[1:] if name in FILLS else operands))


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _touched(x: Tensor) -> int:
    """Bytes of a tensor, its expanded dimensions once."""
    count = 1
    for size, stride in zip(x.shape, x.stride()):
        count *= 1 if stride == 0 and size else size
    return count * x.element_size()


def counted(call: Callable[[], object]) -> Counts:
    """The counts of one call, after a first one that fills caches of masks and tables."""
    call()
    with Counting() as counting:
        call()
    return counting.counts


def build(shape: Shape, recompute: str = "none") -> Any:
    """The model of a shape, fp32, seed 0."""
    model: dict[str, Any] = {
        "family": "vanilla" if shape.channels is None else "whitematter",
        "hidden_size": shape.width,
        "intermediate_size": 3 * shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": shape.width * 3 // 16,
    }
    if shape.channels is not None:
        model |= {"num_kv_channels": shape.channels, "num_groups": 8, "no_grad_passes": 1, "grad_passes": 2}
    config = model_config(
        configuration.Model(**model), vocab_size=shape.vocabulary, seq_len=shape.length + 2, eos_id=None
    )
    return build_model(config, seed=0, recompute=recompute)


def training(shape: Shape, recompute: str, *, autocast: bool) -> Counts:
    """Forward and backward of one micro-batch; gradients are made anew, as in a step without accumulation."""
    module = TokenLoss(build(shape, recompute)).train()
    ids = torch.arange(shape.rows * shape.length).reshape(shape.rows, shape.length) % shape.vocabulary
    documents = torch.zeros_like(ids, dtype=torch.int32)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = module(ids, ids, documents)
        loss.backward()
        module.zero_grad(set_to_none=True)

    return counted(step)


def inference(shape: Shape, dtype: torch.dtype) -> tuple[Counts, Counts]:
    """A prefill that makes the cache and the last position's logits, and one token behind it."""
    lm = build(shape).eval().to(dtype)
    ids = torch.arange(shape.rows * shape.length).reshape(shape.rows, shape.length) % shape.vocabulary

    def prefill() -> Any:
        return getattr(lm(ids, use_cache=True, logits_to_keep=1), CACHE_FIELD)

    def decode() -> None:
        lm(ids[:, :1], use_cache=True, **{CACHE_FIELD: cache})
        cache.crop(-1)

    with torch.no_grad():
        cache = prefill()
        return counted(prefill), counted(decode)


def table(shapes: Iterable[Shape], policies: list[str], *, bf16: bool) -> list[dict[str, Any]]:
    """One row for each count: what, model, operators launched, bytes moved per token."""
    rows: list[dict[str, Any]] = []
    for shape in shapes:
        name = "qwen3" if shape.channels is None else f"k={shape.channels}"
        tokens = shape.rows * shape.length
        for policy in ["none"] if shape.channels is None else policies:
            counts = training(shape, policy, autocast=bf16)
            rows.append(_row(f"training, {policy}", name, counts, tokens))
        prefill, decode = inference(shape, torch.bfloat16 if bf16 else torch.float32)
        rows += [_row("prefill", name, prefill, tokens), _row("a token", name, decode, shape.rows)]
    return rows


def _row(what: str, model: str, counts: Counts, tokens: int) -> dict[str, Any]:
    by_name = dict(counts.launched.most_common())
    moved = round(counts.moved / tokens)
    return {"what": what, "model": model, "launched": counts.operators, "moved": moved, "operators": by_name}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("layers", 16), ("width", 512), ("length", 2048), ("rows", 1), ("vocabulary", 8192)):
        parser.add_argument(f"--{name}", type=int, default=value, help="default %(default)s")
    parser.add_argument("--channels", type=int, nargs="+", default=[8], help="k (default 8)")
    parser.add_argument("--policies", nargs="+", default=["none", "group"], help="recompute")
    parser.add_argument(
        "--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: training in autocast"
    )
    parser.add_argument("--top", type=int, default=0, help="also the most frequent operators of each row")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    sizes = (options.layers, options.width, options.length, options.rows, options.vocabulary)
    shapes = [Shape(*sizes, channels) for channels in (None, *options.channels)]
    rows = table(shapes, options.policies, bf16=options.precision == "bf16")
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    print(f"{'':<24}{'model':<8}{'launched':>10}{'moved, bytes/token':>20}")
    for row in rows:
        print(f"{row['what']:<24}{row['model']:<8}{row['launched']:>10,}{row['moved']:>20,}")
        for name, count in list(row["operators"].items())[: options.top]:
            print(f"    {name:<36}{count:>8,}")
    print(machine_line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
