#!/usr/bin/env python3
"""FLOPs per token of training, prefill and decoding: the paper's Table 2, from the models as built.

    python tools/count_flops.py                       the paper's models that configs/ holds
    python tools/count_flops.py configs/X.yaml …      any run's model
    python tools/count_flops.py --json                the same as data, in FLOPs per token

Every model is built at full size on the meta device (shapes without numbers: no GPU or memory) and run there,
every product counted by torch's formulas. Conventions are the paper's (§4.5): the LM head is left out, causal
attention counts as half of the T x T products in training and prefill, its backward as 2.5 times its forward,
and a decoding step attends to T keys.

Two accountings:

paper   What the paper's numbers contain. Prefill is n passes of all L blocks and n + 2 pools. Training runs n
        passes of L blocks and n + 3 pools forward; backward goes through n_g·L - (n_g - 1) blocks and
        n_g + 1 pools, less the last group's last one, which nobody reads. What a block and a pool cost is
        measured on the model; only how often they run is the paper's. For LCKV see `sandwich_accounting`.
lean    What our passes do: the costs of block and pool, as often as the plan of the passes has them
        (model/work.py); a test compares that with counting whole steps. Only a position's last update runs
        the last block, the pool is never evaluated twice, and entries that nobody reads are not made.
        `recompute` is the forward work that backward repeats when each group is recomputed (recompute:
        group), apart from the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    found = argparse.ArgumentParser(description="FLOPs per token of a run's model, counted on meta tensors.")
    found.add_argument("configs", nargs="*", help="runs to count; default: the paper's models in configs/")
    found.add_argument("--length", type=int, default=2048, help="tokens of a sequence (default %(default)s)")
    found.add_argument("--json", action="store_true", help="print FLOPs per token as JSON")
    return found


if __name__ == "__main__":  # before the imports that take seconds, so that --help need not wait for them
    parser().parse_args()

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry
from transformers import PreTrainedModel

from wm_ds.config.load import load
from wm_ds.config.schema import Config
from wm_ds.errors import run_cli
from wm_ds.families import build_model, has_passes, model_config
from wm_ds.model import LCKVForCausalLM, Schedule, Start, WhiteMatterForCausalLM
from wm_ds.model.modeling import CACHE_FIELD
from wm_ds.model.work import Count, pass_counts, plan
from wm_ds.plan.meta_run import MetaTracker

ROOT = Path(__file__).resolve().parents[1]
PAPER_MODELS = ["vanilla_16l", "vanilla_24l", "vanilla_32l", "lckv_w4", "lckv_w7", "wm_k8", "wm_k16"]
# Keys that a query of the paper's condensed LCKV layers meets beyond the tokens. The paper mentions none, but
# with eight all of its LCKV figures come out to the last digit, its multiples of vanilla included.
LCKV_PREFIX = 8
VOCABULARY = 151_936  # Qwen3's; no number here depends on it, since the head is left out


@dataclass(frozen=True)
class Flops:
    """FLOPs per token."""

    training: float
    prefill: float
    decode: float


@dataclass(frozen=True)
class Report:
    """One model in both accountings; `recompute` is what group recomputation adds to training."""

    name: str
    length: int
    paper: Flops
    lean: Flops
    recompute: float


class _Attention(torch.autograd.Function):
    """Stands in for attention while counting: right shapes, no products, and its FLOPs on the account."""

    @staticmethod
    def forward(ctx: Any, account: Account, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.account, ctx.shapes = account, (q.shape, k.shape, v.shape)
        account.add(q.shape, 1.0)
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        ctx.account.add(ctx.shapes[0], 2.5)
        return None, *(grad.new_empty(shape) for shape in ctx.shapes)


class Account:
    """FLOPs of attention where every query meets `keys` keys."""

    def __init__(self, keys: float) -> None:
        self.keys = keys
        self.flops = 0.0

    def add(self, query_shape: torch.Size, factor: float) -> None:
        """Two products of 2·keys·d FLOPs for each query of [B, H, n, d]."""
        self.flops += factor * 4 * query_shape.numel() * self.keys

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """In the place of scaled_dot_product_attention."""
        return _Attention.apply(self, query, key, value)


class Products(MetaTracker):
    """FLOPs of the products that run inside, by torch's own formulas, on meta tensors.

    torch's FlopCounterMode gives the same sum and tells modules apart, for which it takes many times as long.
    """

    known: ClassVar[dict[Any, tuple | None]] = {}  # MetaTracker's results, for all counts

    def __init__(self) -> None:
        super().__init__()
        self.results, self.flops = self.known, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


def count(run: Callable[[], Any], account: Account) -> float:
    """FLOPs of `run()` on meta tensors, attention by `account` (a backward pass: its forward's account)."""
    before = account.flops
    # A patch, because a torch-function mode is off inside backward, where layers are recomputed.
    with (
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", account.attend),
        Products() as products,
    ):
        run()
    return products.flops + account.flops - before


def on_meta(config: Config, length: int) -> PreTrainedModel:
    """The run's model without numbers, for sequences of `length` tokens."""
    with torch.device("meta"):
        hf_config = model_config(config.model, vocab_size=VOCABULARY, seq_len=length, eos_id=None)
        return build_model(hf_config, seed=0)


def forward(lm: PreTrainedModel, length: int, past: int = 0, **options: Any) -> Any:
    """The base model (no LM head) on one row of `length` tokens behind `past` cached ones."""
    if not isinstance(lm, WhiteMatterForCausalLM):
        # Training gives vanilla its document mask in four dimensions; transformers looks into any other.
        options["attention_mask"] = torch.zeros(1, 1, length, past + length, device="meta")
        options["position_ids"] = torch.zeros(1, length, dtype=torch.long, device="meta")
    return lm.model(input_ids=torch.zeros(1, length, dtype=torch.long, device="meta"), **options)


def train(lm: PreTrainedModel, length: int, **options: Any) -> tuple[float, float]:
    """FLOPs of a forward and of its backward pass."""
    lm.train()
    lm.zero_grad(set_to_none=True)
    hidden: list[Tensor] = []
    account = Account(length / 2)
    ahead = count(lambda: hidden.append(forward(lm, length, **options).last_hidden_state), account)
    back = count(lambda: hidden[0].sum().backward(), account)
    return ahead, back


@torch.no_grad()
def decode(lm: PreTrainedModel, length: int) -> float:
    """FLOPs of one more token behind `length` cached ones."""
    lm.eval()
    one_pass: dict[str, Any] = {"schedule": Schedule.jacobi(1)} if has_passes(lm.config) else {}
    cache = getattr(forward(lm, length, use_cache=True, **one_pass), CACHE_FIELD)
    return count(lambda: forward(lm, 1, length, use_cache=True, **{CACHE_FIELD: cache}), Account(length))


@torch.no_grad()
def prefill(lm: PreTrainedModel, length: int, **options: Any) -> float:
    """FLOPs of the configured prefill with its cache, all positions' final states included; or of another
    `schedule`."""
    lm.eval()
    return count(lambda: forward(lm, length, use_cache=True, **options), Account(length / 2))


def report(name: str, lm: PreTrainedModel, length: int = 2048) -> Report:
    """Both accountings of a model on the meta device, at sequences of `length` tokens."""
    step = decode(lm, length)
    config = lm.config
    if not has_passes(config):
        ahead, back = train(lm, length)
        lean = Flops((ahead + back) / length, prefill(lm, length) / length, step)
        return Report(name, length, lean, lean, 0.0)
    sandwich = isinstance(lm, LCKVForCausalLM)
    costs = sandwich_costs(lm, length) if sandwich else pass_costs(lm, length)
    paper = sandwich_accounting if sandwich else paper_accounting
    counts = pass_counts(config.training_schedule(), length, recompute="group")
    training = costs.forward(counts.forward) + costs.backward(counts.backward)
    filled = pass_counts(config.prefill_schedule(), length, gradient=False, keep_cache=True)
    lean = Flops(training / length, costs.forward(filled.forward) / length, step)
    again = repeated(lm, costs, length) / length
    return Report(name, length, paper(config, costs, length, step), lean, again)


def repeated(lm: WhiteMatterForCausalLM, costs: Costs, length: int) -> float:
    """FLOPs of the forward work that backward repeats when every step is recomputed.

    A recomputation ends at the last tensor that backward reads, so the last product of a step without a pool
    is not repeated. What that saves, and what a model repeats outside its passes, is measured on one Jacobi
    pass, which is one such step.
    """
    one, schedule = Schedule.jacobi(1), lm.config.training_schedule()
    whole, counted = (
        costs.forward(pass_counts(s, length, recompute="group").repeated) for s in (one, schedule)
    )
    plain = sum(train(lm, length, schedule=one))
    lm.model.recompute = "group"
    less = whole - (sum(train(lm, length, schedule=one)) - plain)
    lm.model.recompute = "none"
    updates = [update for step in plan(schedule, length, gradient=True).steps for update in step]
    ends = sum(len(u.positions) for u in updates if u.needs_hidden and not u.needs_pool)
    return counted - less * ends / length


@dataclass(frozen=True)
class Costs:
    """FLOPs, forward and backward, of putting a whole row through one block, the pool, and the rest.

    `depth`: blocks that the passes go through. `rest` runs once: LCKV's layers outside the passes.
    `channels`: those that the layers of a layerwise start's sweep read.
    """

    depth: int
    block: tuple[float, float]
    pool: tuple[float, float]
    rest: tuple[float, float] = (0.0, 0.0)
    channels: tuple[float, float] = (0.0, 0.0)

    def forward(self, count: Count) -> float:
        """Of so many evaluations."""
        return self._of(count, 0)

    def backward(self, count: Count) -> float:
        """Of gradient through so many evaluations."""
        return self._of(count, 1)

    def _of(self, count: Count, way: int) -> float:
        passes = count.layers(self.depth) * self.block[way] + count.pools * self.pool[way]
        return passes + count.sweeps * self.channels[way] + self.rest[way]


def pass_costs(lm: WhiteMatterForCausalLM, length: int) -> Costs:
    """From Jacobi runs of one and two passes with gradient, whose make-up the plan of the passes tells
    (`pass_counts`): two equations in block and pool, forward and backward alike."""
    layers = lm.config.num_hidden_layers
    one, two = (train(lm, length, schedule=Schedule.jacobi(passes)) for passes in (1, 2))
    found = []
    for a, b, (blocks, pools), (more, further) in zip(one, two, *make_up(layers, length)):
        both = blocks * further - more * pools
        found.append(((a * further - b * pools) / both, (blocks * b - more * a) / both))
    block, pool = zip(*found)
    costs = Costs(layers, block, pool)
    starts = (lm.config.training_schedule().start, lm.config.prefill_schedule().start)
    if not any(start.sweeps for start in starts):
        return costs
    # One pass behind a sweep with gradient; what block and pool do not explain of it is the channels.
    swept = Schedule.jacobi(1, start=Start("layerwise", grad=True))
    ahead, back = train(lm, length, schedule=swept)
    counts = pass_counts(swept, length)
    rest = (ahead - costs.forward(counts.forward), back - costs.backward(counts.backward))
    return replace(costs, channels=rest)


def paper_accounting(config: Any, costs: Costs, length: int, step: float) -> Flops:
    """The paper's counts of blocks and pools at this model's measured costs of each."""
    layers, n, grad = config.num_hidden_layers, config.no_grad_passes + config.grad_passes, config.grad_passes
    (block, block_back), (pool, pool_back) = costs.block, costs.pool
    training = n * layers * block + (n + 3) * pool
    training += (grad * layers - (grad - 1)) * block_back
    training += (grad + 1 - 1 / config.num_groups) * pool_back
    passes = config.prefill_schedule("cyclic").passes
    return Flops(training / length, (passes * layers * block + (passes + 2) * pool) / length, step)


def make_up(layers: int, length: int) -> list[list[tuple[float, float]]]:
    """(blocks, pools) in the forward and in the backward of one Jacobi pass over `layers`, then of two."""
    counts = [pass_counts(Schedule.jacobi(passes), length) for passes in (1, 2)]
    return [[(part.layers(layers), part.pools) for part in (c.forward, c.backward)] for c in counts]


def sandwich_costs(lm: LCKVForCausalLM, length: int) -> Costs:
    """The same from one run more, of a model with a layer more: three equations, warm-up layers the third."""
    config = lm.config
    condensed = len(config.condensed)
    with torch.device("meta"):
        deeper = type(lm)(
            type(config)(**{**config.to_dict(), "num_hidden_layers": config.num_hidden_layers + 1})
        )
    one, two = (train(lm, length, schedule=Schedule.jacobi(passes)) for passes in (1, 2))
    more = train(deeper, length, schedule=Schedule.jacobi(1))
    found = []
    for a, b, c, (blocks, pools), (twice, further) in zip(one, two, more, *make_up(condensed, length)):
        block = c - a
        shared = (b - a - (twice - blocks) * block) / (further - pools)
        found.append((block, shared, a - blocks * block - pools * shared))
    block, pool, rest = zip(*found)
    return Costs(condensed, block, pool, rest)


def sandwich_accounting(config: Any, costs: Costs, length: int, step: float) -> Flops:
    """The paper's counts for LCKV: n Jacobi passes of all condensed layers, warm-up layers once.

    A shared KV is made for each pass and once for the cache; n_g of them are differentiated.
    """
    condensed, n = len(config.condensed), config.no_grad_passes + config.grad_passes
    (block, block_back), (shared, shared_back), (warm_up, warm_up_back) = costs.block, costs.pool, costs.rest
    extra = length * 4 * LCKV_PREFIX * config.num_attention_heads * config.head_dim
    block, block_back = block + extra, block_back + 2.5 * extra
    prefill = warm_up + n * condensed * block + (n + 1) * shared
    backward = (config.grad_passes * condensed - (config.grad_passes - 1)) * block_back
    backward += config.grad_passes * shared_back + warm_up_back
    return Flops((prefill + backward) / length, prefill / length, step + condensed * extra / length)


def table(reports: list[Report]) -> str:
    """GFLOP per token, and multiples of the first model."""
    base = reports[0]
    lines = [f"GFLOP per token, T = {base.length}; x: multiple of {base.name}"]
    lines.append(f"{'':16}{'training':>15}{'prefill':>15}{'decode':>15}   recompute")
    for accounting in ("paper", "lean"):
        lines.append(f"{accounting} accounting")
        for item in reports:
            cells = ""
            for column in ("training", "prefill", "decode"):
                value, first = (getattr(getattr(r, accounting), column) for r in (item, base))
                cells += f"{value / 1e9:9.3f}{value / first:6.2f}"
            extra = f"{item.recompute / 1e9:11.3f}" if accounting == "lean" and item.recompute else ""
            lines.append(f"  {item.name:14}{cells}{extra}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> int:
    """The command, its errors as exceptions."""
    arguments = parser().parse_args(argv)
    if arguments.length < 1:
        print(f"error: --length {arguments.length}: a sequence has at least one token", file=sys.stderr)
        return 2
    paths = [Path(path) for path in arguments.configs]
    if not paths:
        paths = [ROOT / "configs" / f"paper_{name}.yaml" for name in PAPER_MODELS]
        for path in [path for path in paths if not path.exists()]:
            print(f"note: {path.name} is not in configs/, left out", file=sys.stderr)
            paths.remove(path)
    reports = [report(path.stem, on_meta(load(path), arguments.length), arguments.length) for path in paths]
    print(json.dumps([asdict(item) for item in reports], indent=2) if arguments.json else table(reports))
    return 0


if __name__ == "__main__":
    sys.exit(main())
