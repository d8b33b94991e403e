"""Which parameter gets which rule, the rules themselves, and the learning-rate schedule.

Muon (paper section 4.1): momentum, then five Newton-Schulz steps that push all singular values of the update
towards 1. It is meant for weight *matrices*: q, o, gate, up, down, each channel's key and value projection,
and the routers' W. Everything else is AdamW. `parameter_table` decides that by an explicit list of names,
never by dimension: a stacked `[k, out, in]` projection is k matrices, while stacked norms, router biases and
the dummy are none although they have two or three dimensions. A trainable parameter that the list does not
name is refused.

`MuonAdamW` is a plain torch optimizer that works on whatever pieces ZeRO leaves on this rank (see
partition.py): momentum and AdamW are elementwise, so they run on the pieces; Newton-Schulz needs whole
matrices, so each matrix has one owner rank, which receives the other pieces, orthogonalises, and sends the
results back. At stages 1 and 2 most matrices lie on one rank already and only those cut by a partition's edge
travel; at stage 3 all do.

DeepSpeed has a Muon of its own. We do not use it: configured by name it picks parameters by dimension, at
stages 1-3 it updates its momentum while gradients are being reduced, before anyone can decide to skip the
step, and its clipping then acts on the orthogonalised update instead of the gradient.

Where the state lives: `optimizer.state[master]` for every fp32 master tensor of partition.masters(engine):
`momentum` (Muon) or `exp_avg` and `exp_avg_sq` (AdamW), each shaped like the master and on its device. The
number of updates made so far (AdamW's bias correction) is the one scalar, `step` in every parameter group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from wm_ds.optim.partition import Fragment, Master

# Newton-Schulz's quintic coefficients (Jordan et al., 2024): steep at 0, not convergent to exactly 1.
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_EPS = 1e-7
EXCHANGE_ELEMENTS = 1 << 26  # matrices sent to their owners at a time: 256 MiB in fp32

# Every parameter of every model family, by the end of its name: (pattern, rule, decayed). "matrix" parameters
# are [out, in] or [k, out, in]; for the rest only AdamW makes sense. Weight decay 0.1 of the paper is read
# as: on all matrices, embeddings and head; not on gains (norms), biases and the dummy, whose zero is not a
# neutral value.
RULES: tuple[tuple[str, str, bool], ...] = (
    (r"embed_tokens\.weight", "embedding", True),
    (r"lm_head\.weight", "head", True),
    (r"self_attn\.(q_proj|k_proj|v_proj|o_proj)\.weight", "matrix", True),
    (r"mlp\.(gate_proj|up_proj|down_proj)\.weight", "matrix", True),
    (r"pool\.(key|value)\.proj", "matrix", True),
    (r"pool\.(key|value)\.router_weight", "matrix", True),
    (r"pool\.(key|value)\.router_bias", "other", False),
    (r"pool\.(key|value)\.(source_norm|channel_norm|head_norm)", "other", False),
    (r"dummy_(key|value)", "other", False),
    (r"(input_layernorm|post_attention_layernorm|q_norm|k_norm|\bnorm)\.weight", "other", False),
)


class OptimizerError(ValueError):
    """The parameters do not fit the optimizer's rules; the message names the parameter."""


@dataclass(frozen=True)
class Row:
    """One line of the parameter table."""

    name: str
    shape: tuple[int, ...]
    rule: str
    """muon or adamw"""
    decay: float
    scale: float
    """Muon's update is multiplied by this before the learning rate; 1 for AdamW."""

    @property
    def matrices(self) -> int:
        """How many matrices Muon sees in it."""
        return self.shape[0] if len(self.shape) == 3 else 1


def parameter_table(
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    *,
    optimizer: str = "muon",
    weight_decay: float = 0.1,
    update_scale: str = "rms",
    embedding_rule: str = "adamw",
    head_rule: str = "adamw",
    tied: bool = False,
) -> list[Row]:
    """The rule for every trainable parameter, in the model's order.

    `shapes`: (name, shape) of the trainable parameters, names relative to the Hugging Face model, tied
    weights once. `optimizer` adamw puts everything on AdamW. `update_scale`: see `muon_scale`. With `tied`
    the one shared matrix is named as the embedding and follows `embedding_rule`. Raises OptimizerError for a
    parameter that no rule names, or one with a matrix rule that is no matrix.
    """
    rows = []
    for name, shape in shapes:
        hits = [(kind, decayed) for pattern, kind, decayed in RULES if re.search(rf"(^|\.){pattern}$", name)]
        if not hits:
            raise OptimizerError(
                f"parameter {name} {list(shape)} has no optimizer rule: add it to RULES in "
                "wm_ds/optim/param_rules.py"
            )
        kind, decayed = hits[0]
        matrix = (
            kind == "matrix"
            or (kind, embedding_rule) == ("embedding", "muon")
            or (kind, head_rule) == ("head", "muon")
        )
        if matrix and len(shape) not in (2, 3):
            raise OptimizerError(
                f"parameter {name} {list(shape)} is listed as a matrix but has {len(shape)} dimensions"
            )
        rule = "muon" if optimizer == "muon" and matrix else "adamw"
        scale = muon_scale(shape[-2], shape[-1], update_scale) if rule == "muon" else 1.0
        rows.append(Row(name, tuple(shape), rule, weight_decay if decayed else 0.0, scale))
    return rows


def muon_scale(rows: int, cols: int, update_scale: str) -> float:
    """Factor on the orthogonalised update of one [rows, cols] matrix.

    rms: 0.2 sqrt(max(rows, cols)), which gives the update AdamW's typical RMS, so that one learning rate
    serves both (Liu et al., 2025; torch's `match_rms_adamw`). spectral: sqrt(max(1, rows / cols)) (Jordan et
    al., 2024).
    """
    if update_scale == "rms":
        return 0.2 * math.sqrt(max(rows, cols))
    return math.sqrt(max(1.0, rows / cols))


def format_table(rows: list[Row]) -> str:
    """The table as text; rows that differ only in the layer's number become one line."""
    folded: dict[tuple, list[str]] = {}
    for row in rows:
        pattern = re.sub(r"\.layers\.\d+\.", ".layers.*.", row.name)
        folded.setdefault((pattern, row.shape, row.rule, row.decay, row.scale), []).append(row.name)
    lines = [f"{'parameter':52} {'count':>5} {'shape':20} {'rule':6} {'decay':>6} {'scale':>7}"]
    for (pattern, shape, rule, decay, scale), names in folded.items():
        lines.append(
            f"{pattern:52} {len(names):>5} {'x'.join(map(str, shape)):20} {rule:6} {decay:>6g} {scale:>7.4g}"
        )
    total = sum(math.prod(r.shape) for r in rows)
    muon = sum(math.prod(r.shape) for r in rows if r.rule == "muon")
    lines.append(f"{total:,} parameters: {muon:,} Muon, {total - muon:,} AdamW")
    return "\n".join(lines)


def orthogonalize(matrix: Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Newton-Schulz: the nearest semi-orthogonal matrix, roughly (singular values within about 0.7-1.2).

    `matrix` [..., rows, cols]; every matrix of a stack is treated alone. Computed in `dtype`, returned in
    fp32.
    """
    a, b, c = NS_COEFFICIENTS
    x = matrix.to(dtype)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=NS_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(torch.float32)


@dataclass
class _Exchange:
    """One batch of matrices on their way to their owners and back. Sizes are element counts per rank."""

    send: list[list[tuple[Fragment, int, int]]]
    """Per owner: (fragment, start, stop in the flattened parameter) of my pieces, in matrix order."""
    receive: list[int]
    """Per sender: elements that I get for the matrices I own."""
    mine: list[tuple[tuple[int, int], float, list[tuple[int, int, int]]]]
    """Matrices I own: (rows, cols), scale, pieces as (sender, offset in what it sends me, count)."""
    local: bool
    """No rank sends anything to another."""


# What each rule keeps per master, besides the one count of updates.
_STATE = {"muon": ("momentum",), "adamw": ("exp_avg", "exp_avg_sq")}


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the table's matrices and AdamW for the rest, under any ZeRO stage.

    Build it from the model's parameters, give it to `deepspeed.initialize`, then call `attach`. Before each
    engine step the trainer sets `grad_scale` (clipping) and `skip`; `skip` leaves weights, momenta, decay and
    the update count untouched.
    """

    def __init__(
        self,
        table: list[Row],
        parameters: dict[str, torch.nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype = torch.bfloat16,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        self.table = {row.name: row for row in table}
        groups = []
        for rule, decay in sorted({(r.rule, r.decay) for r in table}, reverse=True):
            names = [r.name for r in table if (r.rule, r.decay) == (rule, decay)]
            groups.append(
                {
                    "params": [parameters[n] for n in names],
                    "rule": rule,
                    "weight_decay": decay,
                    "lr": lr,
                    "step": 0,
                }
            )
        super().__init__(groups, {})
        self.momentum, self.nesterov = momentum, nesterov
        self.ns_steps, self.ns_dtype = ns_steps, ns_dtype
        self.betas, self.eps = betas, eps
        # Until `attach`: some of DeepSpeed's wrappers call step() while they are being built.
        self.skip = True
        self.grad_scale = 1.0
        self._exchanges: dict[int, list[_Exchange]] = {}

    def attach(self, masters: list[Master], fragments: list[Fragment], device: torch.device) -> None:
        """Create the state and plan the exchanges. Collective: every rank calls it, with its own pieces.

        `masters` and `fragments` come from partition.py. `device` is where matrices travel and are
        orthogonalised (the accelerator, also when states are offloaded).
        """
        self._device = device
        for master in masters:
            names = _STATE[self.param_groups[master.group]["rule"]]
            for name in names:
                self.state[master.tensor][name] = torch.zeros_like(
                    master.tensor, dtype=torch.float32, requires_grad=False
                )
        self._plan(masters, fragments)
        self.skip = False

    def set_lr(self, lr: float) -> None:
        """Learning rate of every group, for the coming step."""
        for group in self.param_groups:
            group["lr"] = lr

    def count_update(self) -> None:
        """Note that a step's updates are complete; a step is several calls of `step` under ZeRO."""
        for group in self.param_groups:
            group["step"] += 1

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update every master that has a gradient. DeepSpeed calls this once per partition of a step."""
        if self.skip:
            return
        for group in self.param_groups:
            masters = [p for p in group["params"] if p.grad is not None]
            if group["rule"] == "adamw":
                self._adamw(masters, group)
            else:
                for master in masters:
                    self._muon(master, group)

    def _adamw(self, masters: list[Tensor], group: dict) -> None:
        if not masters:
            return
        state = [self.state[p] for p in masters]
        counts = [torch.tensor(float(group["step"])) for _ in masters]  # adamw adds 1 itself
        grads = [p.grad if self.grad_scale == 1.0 else p.grad * self.grad_scale for p in masters]
        adamw(
            masters,
            grads,
            [s["exp_avg"] for s in state],
            [s["exp_avg_sq"] for s in state],
            [],
            counts,
            foreach=None,
            fused=False,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.eps,
            maximize=False,
        )

    def _muon(self, master: Tensor, group: dict) -> None:
        buffer = self.state[master]["momentum"]
        grad = (
            (master.grad if self.grad_scale == 1.0 else master.grad * self.grad_scale)
            .to(buffer.dtype)
            .contiguous()
        )
        buffer.lerp_(grad, 1.0 - self.momentum)
        update = grad.lerp(buffer, self.momentum) if self.nesterov else buffer.clone()
        for exchange in self._exchanges[id(master)]:
            self._orthogonalize(exchange, update)
        master.mul_(1.0 - group["lr"] * group["weight_decay"])
        master.add_(update, alpha=-group["lr"])

    def _orthogonalize(self, exchange: _Exchange, update: Tensor) -> None:
        """Replace the exchange's matrices inside `update` by their scaled orthogonalisation."""
        pieces = [[f.of(update)[a - f.start : b - f.start] for f, a, b in to] for to in exchange.send]
        outgoing = [_cat(p, self._device) for p in pieces]
        if exchange.local:
            incoming = outgoing
        else:
            sizes = [o.numel() for o in outgoing]
            received = torch.empty(sum(exchange.receive), dtype=torch.float32, device=self._device)
            dist.all_to_all_single(received, torch.cat(outgoing), exchange.receive, sizes)
            incoming = list(received.split(exchange.receive))
        for (rows, cols), scale, parts in exchange.mine:
            whole = torch.cat([incoming[r].narrow(0, o, n) for r, o, n in parts])
            result = (
                orthogonalize(whole.view(rows, cols), self.ns_steps, self.ns_dtype).mul_(scale).reshape(-1)
            )
            done = 0
            for r, o, n in parts:
                incoming[r].narrow(0, o, n).copy_(result.narrow(0, done, n))
                done += n
        if not exchange.local:
            back = torch.empty(sum(sizes), dtype=torch.float32, device=self._device)
            dist.all_to_all_single(back, torch.cat(incoming), sizes, exchange.receive)
            outgoing = list(back.split(sizes))
        for to, result in zip(pieces, outgoing):
            done = 0
            for piece in to:
                piece.copy_(result.narrow(0, done, piece.numel()))
                done += piece.numel()

    def _plan(self, masters: list[Master], fragments: list[Fragment]) -> None:
        """Decide every matrix's owner and who sends what to whom; the same on every rank."""
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        own = {f.name: f for f in fragments if self.table[f.name].rule == "muon"}
        held = [(f.name, f.start, f.stop) for f in own.values()]
        everyone: list = [held]
        if world > 1:
            everyone = [None] * world
            dist.all_gather_object(everyone, held)
            if all(f.stop - f.start == math.prod(f.shape) for f in own.values()) and all(
                h == held for h in everyone
            ):
                everyone, world, rank = [held], 1, 0  # stage 0: everybody holds everything and needs no one
        holders: dict[str, list[tuple[int, int, int]]] = {}
        for r, ranges in enumerate(everyone):
            for name, start, stop in ranges:
                holders.setdefault(name, []).append((r, start, stop))
        load = [0.0] * world
        for master in masters:
            if self.param_groups[master.group]["rule"] != "muon":
                continue
            exchanges = self._exchanges[id(master.tensor)] = []
            batch: list[tuple[str, int]] = []
            size = 0
            for name in master.names:
                row = self.table[name]
                for index in range(row.matrices):
                    batch.append((name, index))
                    size += row.shape[-2] * row.shape[-1]
                    if size >= EXCHANGE_ELEMENTS:
                        exchanges.append(self._batch(batch, holders, own, load, rank, world))
                        batch, size = [], 0
            if batch:
                exchanges.append(self._batch(batch, holders, own, load, rank, world))

    def _batch(
        self,
        batch: list[tuple[str, int]],
        holders: dict[str, list[tuple[int, int, int]]],
        own: dict[str, Fragment],
        load: list[float],
        rank: int,
        world: int,
    ) -> _Exchange:
        send: list[list[tuple[Fragment, int, int]]] = [[] for _ in range(world)]
        receive = [0] * world
        mine = []
        local = True
        for name, index in batch:
            row = self.table[name]
            rows, cols = row.shape[-2:]
            first = index * rows * cols
            last = first + rows * cols
            pieces = sorted(
                (max(a, first), min(b, last), r) for r, a, b in holders[name] if max(a, first) < min(b, last)
            )
            held = [0] * world
            for a, b, r in pieces:
                held[r] += b - a
            owner = min(range(world), key=lambda r: (-held[r], load[r], r))
            load[owner] += rows * cols * min(rows, cols)
            local = local and held[owner] == rows * cols
            parts = []
            for a, b, r in pieces:
                if r == rank:
                    send[owner].append((own[name], a, b))
                if owner == rank:
                    parts.append((r, receive[r], b - a))
                    receive[r] += b - a
            if owner == rank:
                mine.append(((rows, cols), row.scale, parts))
        return _Exchange(send, receive, mine, local)


def _cat(pieces: list[Tensor], device: torch.device) -> Tensor:
    if not pieces:
        return torch.empty(0, dtype=torch.float32, device=device)
    return torch.cat([p.to(device) for p in pieces])


# The learning rate, as a pure function of the step


def learning_rate(
    step: int,
    *,
    peak: float,
    total: int,
    warmup: int,
    kind: str = "cosine",
    floor: float = 0.1,
    decay: int = 0,
) -> float:
    """The learning rate of step `step`, counted from 1 to `total`.

    Linear warm-up: step s <= warmup has peak * s / warmup, so step `warmup` is the first at the peak. Then
    cosine: half a cosine from the peak down to floor * peak, reached exactly at step `total`; wsd: constant
    at the peak, and over the last `decay` steps linearly to floor * peak, reached at step `total`; constant:
    the peak. `floor` is a fraction of the peak. Steps beyond `total` keep the last value.
    """
    if warmup > 0 and step <= warmup:
        return peak * step / warmup
    step = min(step, total)
    if kind == "constant":
        return peak
    if kind == "wsd":
        left = total - step
        return peak if left >= decay else peak * (floor + (1.0 - floor) * left / decay)
    progress = (step - warmup) / (total - warmup)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
