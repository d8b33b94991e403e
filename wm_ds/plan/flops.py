"""Floating-point operations of a training step, per token, in closed form.

Conventions: a multiply-add is two; causal attention counts as half; attention's backward is 2.5 times its
forward, a product's twice. Model FLOPs are the least that the schedule needs (dead work left out): only the
last pass needs the last block, its last group needs no pool, and the pool with gradient that starts the
gradient passes is the last detached pass's own. Hardware FLOPs add what the recompute policy runs a second
time.

L layers, D width, I intermediate, T tokens a row, k channels, g groups, Hq/G query/KV heads of width d.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers.configuration_utils import PretrainedConfig


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
    if config.model_type == "qwen3":
        block = products + 4 * D * kv + attention
        back = 2 * (products + 4 * D * kv) + 2.5 * attention
        again = 0.0 if recompute == "none" else L * block
        model = L * (block + back) + 3 * head
        return Flops(model, model + again)
    if config.model_type != "whitematter" or not config.feedback:
        return None
    k, g = config.num_kv_channels, config.num_groups
    router = 2 * k * L * len(config.router_sources) * D if config.routing == "dynamic" else 0
    pool = 2 * (router + 2 * k * L * D + 2 * k * kv * D)  # keys and values
    passes, n_grad = config.no_grad_passes + config.grad_passes, config.grad_passes
    forward_blocks = passes * L - (passes - 1)
    grad_blocks = n_grad * L - (n_grad - 1)
    forward_pools = passes + 1 - 1 / g
    grad_pools = n_grad + 1 - 1 / g
    block, back = products + attention, 2 * products + 2.5 * attention
    model = forward_blocks * block + grad_blocks * back + (forward_pools + 2 * grad_pools) * pool + 3 * head
    again = {"none": 0.0, "layer": grad_blocks * block}.get(
        recompute, grad_blocks * block + grad_pools * pool
    )
    if "group" in recompute:
        # The last detached pass runs its blocks again for the pool that carries gradient; entries of the
        # start that the first pass with a backward overwrote are made again, too (passes.py).
        again += (L - 1) * block if config.no_grad_passes else 0.0
        again += (pool if passes > 1 else pool * (1 - 1 / g)) if config.no_grad_passes <= 1 else 0.0
    if recompute == "group+layer":
        again += grad_blocks * block
    return Flops(model, model + again)
