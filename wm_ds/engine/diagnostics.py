"""Measurements of WhiteMatter's iteration, on one row now and then: how far passes move, what routers do.

Shapes: N tokens, k channels, L source layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wm_ds.distributed import process_group
from wm_ds.engine.engine import Engine
from wm_ds.families import mixes_layers


def observe(engine: Engine, micro_batch: dict[str, Tensor]) -> dict[str, Any]:
    """One forward without gradient over the first row of each rank; averages over ranks. Collective.

    residuals [passes]: relative change of the pool in each pass (0: the fixed point is reached).
    gain [2]: how much a small change of the pool then grows in one more pass, a random one and what the pass
    before has made of it (model/gain.py).
    router_entropy [k]: of |alpha| over the L sources, in nats, per channel; keys and values apart. 0 is one
    source, log L is all alike. feedback_share [k]: part of |alpha| that lies on states deeper than the input
    of the layer that reads the channel, averaged over its readers. router_share [k][L]: of |alpha|, what each
    source has. peak_memory_gib [ranks]: since the start,
    on the GPU, or resident on a CPU. Only WhiteMatter with feedback has more than that.
    """
    memory = {"peak_memory_gib": peak_memory(engine)}
    model = engine.lm.model
    if not mixes_layers(model.config):
        return memory
    branches = {"key": model.pool.key, "value": model.pool.value}
    sums = {name: _Average() for name in branches}
    readers_kL = _deeper(model.config.num_kv_channels, model.config.num_hidden_layers).to(engine.world.device)

    def watched(name: str, original: Any) -> Any:
        def mixing_weights(hat_NLD: Tensor) -> Tensor:
            alpha_NkL = original(hat_NLD)
            share_NkL = alpha_NkL.detach().abs().float()
            share_NkL = share_NkL / share_NkL.sum(-1, keepdim=True).clamp(min=1e-12)
            entropy_k = -(share_NkL * share_NkL.clamp(min=1e-12).log()).sum(-1).mean(0)
            feedback_k = (share_NkL * readers_kL).sum(-1).mean(0)
            sums[name].add(torch.cat([entropy_k, feedback_k, share_NkL.mean(0).flatten()]))
            return alpha_NkL

        return mixing_weights

    row = {k: v[:1] for k, v in micro_batch.items()}
    try:
        model.measure_residuals = model.measure_gain = True
        for name, branch in branches.items():
            branch.mixing_weights = watched(name, branch.mixing_weights)
        # Compiled code would be compiled again for every number that is added up, and then given up.
        with torch.compiler.set_stance("force_eager"):
            engine.evaluate([row])
    finally:
        model.measure_residuals = model.measure_gain = False
        for branch in branches.values():
            branch.__dict__.pop("mixing_weights", None)
    mean = [model.gain.float(), model.residuals.float(), *(sums[name].mean() for name in branches)]
    packed = torch.cat([m.to(engine.world.device) for m in mean]).double()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(packed)
    numbers = [round(x, 5) for x in (packed / engine.world.size).tolist()]
    k, L = model.config.num_kv_channels, model.config.num_hidden_layers
    gain, numbers = numbers[: len(model.gain)], numbers[len(model.gain) :]
    passes = len(numbers) - 2 * k * (2 + L)
    parts = [numbers[passes:][i * k : (i + 1) * k] for i in range(2 * (2 + L))]
    key, value = parts[: 2 + L], parts[2 + L :]
    return memory | {
        "residuals": numbers[:passes],
        "gain": gain,
        "router_entropy": {"key": key[0], "value": value[0]},
        "feedback_share": {"key": key[1], "value": value[1]},
        "router_share": {"key": _rows(key[2:], L), "value": _rows(value[2:], L)},
    }


def _rows(parts: list[list[float]], length: int) -> list[list[float]]:
    numbers = [round(x, 4) for part in parts for x in part]
    return [numbers[i : i + length] for i in range(0, len(numbers), length)]


def peak_memory(engine: Engine) -> list[float]:
    """Of every rank, in GiB. Collective."""
    mine = [0.0] * engine.world.size
    mine[engine.world.rank] = process_group.peak_memory_bytes(engine.world.device) / (1 << 30)
    return [round(x, 3) for x in process_group.all_reduce_sum(mine, engine.world.device)]


class _Average:
    def __init__(self) -> None:
        self._sum: Tensor | float = 0.0
        self._count = 0

    def add(self, value: Tensor) -> None:
        self._sum, self._count = self._sum + value, self._count + 1

    def mean(self) -> Tensor:
        return torch.as_tensor(self._sum) / max(self._count, 1)


def _deeper(channels: int, layers: int) -> Tensor:
    """[k, L]: for channel j and source s, the share of the layers l = j mod k that lie below s."""
    table = torch.zeros(channels, layers)
    for j in range(channels):
        readers = range(j, layers, channels)
        for s in range(layers):
            table[j, s] = sum(s > reader for reader in readers) / len(readers)
    return table
