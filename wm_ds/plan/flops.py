"""Floating-point operations of a training step, per token.

Conventions: a multiply-add is two; causal attention counts as half; attention's backward is 2.5 times its
forward, a product's twice. How often blocks and pool run is counted on the model's own plan of the schedule
(model/work.py), dead work left out. Model FLOPs are what the schedule needs; hardware FLOPs add what the
recompute policy runs a second time.

L layers, D width, I intermediate, T tokens a row, k channels, Hq/G query/KV heads of width d.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers.configuration_utils import PretrainedConfig

from wm_ds.families import cached_kvs, family_of, mixes_layers
from wm_ds.model.work import pass_counts


@dataclass(frozen=True)
class Flops:
    """Per token of a training step, forward and backward, head included."""

    model: float
    hardware: float


def training(config: PretrainedConfig, seq_len: int, recompute: str = "none") -> Flops | None:
    """FLOPs per token for rows of `seq_len`; None for a model that this does not know (no MFU is logged
    then)."""
    family = family_of(config)
    head = 3 * 2 * config.hidden_size * config.vocab_size
    if not family.has_passes:
        body, again = _once(config, seq_len, recompute)
    elif family.name == "lckv":
        body, again = _sandwich(config, seq_len, recompute)
    elif family.has_pool:
        body, again = (_pooled if mixes_layers(config) else _without_feedback)(config, seq_len, recompute)
    else:
        return None
    return Flops(body + head, body + head + again)


@dataclass(frozen=True)
class _Part:
    """FLOPs per token of something that is run once, and of its backward."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def _block(config: PretrainedConfig, seq_len: int, kv: float = 0.0) -> _Part:
    """A layer, with `kv` FLOPs for keys and values of its own."""
    wide = config.num_attention_heads * config.head_dim
    attention = 2 * seq_len * wide
    products = 4 * config.hidden_size * wide + 6 * config.hidden_size * config.intermediate_size + kv
    return _Part(products + attention, 2 * products + 2.5 * attention)


def _kv(config: PretrainedConfig) -> float:
    """One projection each to keys and values."""
    return 4 * config.hidden_size * config.num_key_value_heads * config.head_dim


def _own_kv(config: PretrainedConfig, seq_len: int) -> _Part:
    """Qwen3's layer: q, k, v, o, gate, up, down."""
    return _block(config, seq_len, _kv(config))


def _once(config: PretrainedConfig, seq_len: int, recompute: str) -> tuple[float, float]:
    """Layers that run once, whether each has KV of its own or some share one."""
    block, kv = _block(config, seq_len), cached_kvs(config) * _kv(config)
    body = config.num_hidden_layers * block.both + 3 * kv
    return body, 0.0 if recompute == "none" else config.num_hidden_layers * block.forward + kv


def _iterated(
    config: PretrainedConfig, seq_len: int, recompute: str, depth: int, pool: float, channels: float = 0.0
) -> tuple[float, float]:
    """`depth` layers and a pool of so many FLOPs, as often as the plan of the passes has them; what
    backward runs again. `channels`: those of a layerwise start's sweep."""
    block = _block(config, seq_len)
    counts = pass_counts(config.training_schedule(), seq_len, recompute=recompute)
    forward, backward, repeated = counts.forward, counts.backward, counts.repeated
    body = forward.layers(depth) * block.forward + forward.pools * pool + forward.sweeps * channels
    body += backward.layers(depth) * block.backward
    body += 2 * (backward.pools * pool + backward.sweeps * channels)
    again = repeated.layers(depth) * block.forward + repeated.pools * pool + repeated.sweeps * channels
    return body, again


def _pooled(config: PretrainedConfig, seq_len: int, recompute: str) -> tuple[float, float]:
    """WhiteMatter: all layers are iterated."""
    L, D, k = config.num_hidden_layers, config.hidden_size, config.num_kv_channels
    router = 2 * k * L * len(config.router_sources) * D if config.routing == "dynamic" else 0
    pool = 2 * (router + 2 * k * L * D) + k * _kv(config)  # keys and values
    return _iterated(config, seq_len, recompute, L, pool, _channels(config))


def _channels(config: PretrainedConfig) -> float:
    """The channels that L-1 layers read in the sweep of a layerwise start, keys and values. Their routers
    read the states so far, and one vector for all that are missing."""
    L, D = config.num_hidden_layers, config.hidden_size
    total = 0.0
    for layer in range(L - 1):
        known = sum(source <= layer for source in config.router_sources)
        router = 2 * L * (known + 1) * D if config.routing == "dynamic" else 0
        total += 2 * (router + 2 * L * D) + _kv(config)
    return total


def _sandwich(config: PretrainedConfig, seq_len: int, recompute: str) -> tuple[float, float]:
    """LCKV: warm-up layers once, the condensed ones iterated with one projection for all of them."""
    body, again = _iterated(config, seq_len, recompute, len(config.condensed), _kv(config))
    own = _own_kv(config, seq_len)
    outside = 0.0 if recompute == "none" else config.warmup_layers * own.forward
    return body + config.warmup_layers * own.both, again + outside


def _without_feedback(config: PretrainedConfig, seq_len: int, recompute: str) -> tuple[float, float]:
    """The ablation: every layer once, each behind a channel of the layers up to its own."""
    L, D = config.num_hidden_layers, config.hidden_size
    mixing = 0.0
    for layer in range(L):
        sources = sum(source <= layer for source in config.router_sources)
        router = 2 * (layer + 1) * sources * D if config.routing == "dynamic" else 0
        mixing += 2 * (router + 2 * (layer + 1) * D)
    own = _own_kv(config, seq_len)
    again = 0.0 if recompute == "none" else L * own.forward + mixing
    return L * own.both + 3 * mixing, again
