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
    L, D = config.num_hidden_layers, config.hidden_size
    wide, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    attention = 2 * seq_len * wide
    products = 4 * D * wide + 6 * D * config.intermediate_size  # q, o, gate, up, down
    head = 2 * D * config.vocab_size
    if not family_of(config).has_passes:
        products = L * products + cached_kvs(config) * 4 * D * kv
        attention *= L
        again = 0.0 if recompute == "none" else products + attention
        model = 3 * products + 3.5 * attention + 3 * head
        return Flops(model, model + again)
    if not mixes_layers(config):
        return None
    k = config.num_kv_channels
    router = 2 * k * L * len(config.router_sources) * D if config.routing == "dynamic" else 0
    pool = 2 * (router + 2 * k * L * D + 2 * k * kv * D)  # keys and values
    block, back = products + attention, 2 * products + 2.5 * attention
    counts = pass_counts(config.training_schedule(), seq_len, recompute=recompute)
    forward, backward, repeated = counts.forward, counts.backward, counts.repeated
    model = forward.layers(L) * block + forward.pools * pool + 3 * head
    model += backward.layers(L) * back + 2 * backward.pools * pool
    return Flops(model, model + repeated.layers(L) * block + repeated.pools * pool)
