"""Muon and AdamW in one optimizer that works on whatever pieces ZeRO leaves on this rank.

Muon (paper section 4.1): momentum, then five Newton-Schulz steps that push all singular values of the update
towards 1. Momentum and AdamW are elementwise, so they run on the pieces; Newton-Schulz needs whole matrices,
which travel to one owner each (exchange.py).

DeepSpeed has a Muon of its own. We do not use it: configured by name it picks parameters by dimension, at
stages 1-3 it updates its momentum while gradients are being reduced, before anyone can decide to skip the
step, and its clipping then acts on the orthogonalised update instead of the gradient.

Where the state lives: `optimizer.state[master]` for every fp32 master tensor of partition.masters(engine):
`momentum` (Muon) or `exp_avg` and `exp_avg_sq` (AdamW), each shaped like the master and on its device. The
number of updates made so far (AdamW's bias correction) is the one scalar, `step` in every parameter group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from wm_ds.optim.exchange import Exchange, Planner
from wm_ds.optim.param_rules import Row
from wm_ds.optim.partition import Fragment, Master

# Newton-Schulz's quintic coefficients (Jordan et al., 2024): steep at 0, not convergent to exactly 1.
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_EPS = 1e-7

# What each rule keeps per master, besides the one count of updates.
STATE = {"muon": ("momentum",), "adamw": ("exp_avg", "exp_avg_sq")}


@dataclass(frozen=True)
class Settings:
    """Both rules' numbers; the keys of the run's `optim` section of the same names say what they mean."""

    lr: float
    momentum: float = 0.95
    ns_steps: int = 5
    ns_dtype: torch.dtype = torch.bfloat16
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8


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
        settings: Settings,
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
                    "lr": settings.lr,
                    "step": 0,
                }
            )
        super().__init__(groups, {})
        self.settings = settings
        # Until `attach`: some of DeepSpeed's wrappers call step() while they are being built.
        self.skip = True
        self.grad_scale = 1.0
        self._exchanges: dict[int, list[Exchange]] = {}
        self._fragments: list[Fragment] = []
        self._updated: dict[int, list[slice]] = {}

    def attach(self, masters: list[Master], fragments: list[Fragment], device: torch.device) -> None:
        """Create the state and plan the exchanges. Collective: every rank calls it, with its own pieces.

        `masters` and `fragments` come from partition.py. `device` is where matrices travel and are
        orthogonalised (the accelerator, also when states are offloaded).
        """
        self._device, self._fragments = device, fragments
        for master in masters:
            names = STATE[self.param_groups[master.group]["rule"]]
            for name in names:
                self.state[master.tensor][name] = torch.zeros_like(
                    master.tensor, dtype=torch.float32, requires_grad=False
                )
        planner = Planner(f for f in fragments if self.table[f.name].rule == "muon")
        for master in masters:
            if self.param_groups[master.group]["rule"] == "muon":
                rows = (self.table[name] for name in master.names)
                self._exchanges[id(master.tensor)] = planner.exchanges(rows)
        self.skip = False

    def freeze(self, names: set[str]) -> None:
        """From now on leave these parameters and their state as they are; their gradients must be zero."""
        self._updated = {}
        for fragment in sorted(self._fragments, key=lambda f: f.offset):
            if fragment.name not in names:
                continue
            key, size = id(fragment.master), fragment.stop - fragment.start
            *before, rest = self._updated.get(key, [slice(0, fragment.master.numel())])
            parts = [slice(rest.start, fragment.offset), slice(fragment.offset + size, rest.stop)]
            self._updated[key] = [*before, *parts]

    def _parts(self, master: Tensor, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Views of tensors like `master` on what is not frozen of it; the tensors themselves where all is."""
        if id(master) not in self._updated:
            return [tensors]
        ranges = (part for part in self._updated[id(master)] if part.stop > part.start)
        return [tuple(tensor.reshape(-1)[part] for tensor in tensors) for part in ranges]

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
        parts: list[tuple[Tensor, ...]] = []
        for p in masters:
            grad = p.grad if self.grad_scale == 1.0 else p.grad * self.grad_scale  # type: ignore[operator]
            state = self.state[p]
            parts += self._parts(p, p, grad, state["exp_avg"], state["exp_avg_sq"])  # type: ignore[arg-type]
        if not parts:
            return
        weights, grads, averages, squares = (list(tensors) for tensors in zip(*parts, strict=True))
        counts = [torch.tensor(float(group["step"])) for _ in weights]  # adamw adds 1 itself
        adamw(
            weights,
            grads,
            averages,
            squares,
            [],
            counts,
            foreach=None,
            fused=False,
            amsgrad=False,
            beta1=self.settings.betas[0],
            beta2=self.settings.betas[1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=self.settings.eps,
            maximize=False,
        )

    def _muon(self, master: Tensor, group: dict) -> None:
        buffer = self.state[master]["momentum"]
        grad = (
            (master.grad if self.grad_scale == 1.0 else master.grad * self.grad_scale)
            .to(buffer.dtype)
            .contiguous()
        )
        momentum = self.settings.momentum
        for mean, new in self._parts(master, buffer, grad):
            mean.lerp_(new, 1.0 - momentum)
        update = grad.lerp(buffer, momentum)  # Nesterov
        for exchange in self._exchanges[id(master)]:
            exchange.apply(update, self._device, self._orthogonalized)
        for weight, step in self._parts(master, master, update):
            weight.mul_(1.0 - group["lr"] * group["weight_decay"])
            weight.add_(step, alpha=-group["lr"])

    def _orthogonalized(self, matrix: Tensor, scale: float) -> Tensor:
        return orthogonalize(matrix, self.settings.ns_steps, self.settings.ns_dtype).mul_(scale)
