"""Norm, rotary embedding, feed-forward network and decoder block: Qwen3's, without K and V projections.

And the two blocks that have more than that: one with K and V of its own, one that mixes those of two others.

Shapes: B rows, n positions of a step, D width, I feed-forward width, H query heads, G KV heads, d head width,
m slots of the pool's buffer that the queries may reach.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Slots, attend
from .configuration import WhiteMatterConfig


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, computed in at least float32; the weight multiplies x's dtype."""
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    x_wide = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return weight * x_wide.to(x.dtype)


class RMSNorm(nn.Module):
    """RMSNorm with one weight vector [size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] over its RMS, times the weight."""
        return rms_norm(x, self.weight, self.eps)


def head_norm(config: WhiteMatterConfig) -> nn.Module:
    """The norm of a layer's query or key heads, if the model has any."""
    return RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else nn.Identity()


def rotary_table(
    position_BT: Tensor,
    head_dim: int,
    theta: float,
    dtype: torch.dtype,
    scaling: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, T, d] of the rotary angles, in at least float32 whatever the model's dtype.

    Computed for every forward instead of being kept in a buffer: nothing can cast it to bfloat16, and nothing
    is left uninitialised when a model is built on the meta device.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, dtype=dtype, device=position_BT.device) / head_dim
    angle = position_BT[..., None].to(dtype) * _scaled(1.0 / theta**exponent, scaling)
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def _scaled(frequency: Tensor, scaling: dict[str, Any] | None) -> Tensor:
    """Angles per position [d/2] with a configuration's `scaled_rope`.

    "llama3" divides the slow ones, which turn less than `low_freq_factor` times in the original length,
    leaves those that turn more than `high_freq_factor` times, and goes from one to the other linearly in the
    turns.
    """
    if scaling is None:
        return frequency
    slow = frequency / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slow
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return torch.lerp(slow, frequency, kept)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding to x [..., d], in the table's precision; returns x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU feed-forward network, no biases."""

    def __init__(self, config: WhiteMatterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PoolAttention(nn.Module):
    """Attention of a step's queries to one channel of the pool, without K and V of its own (§3.1, step 3)."""

    def __init__(self, config: WhiteMatterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = head_norm(config)

    def query(self, x_BnD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Normed (with qk_norm), rotated queries [B, H, n, d]."""
        q_BnHd = self.q_norm(self.q_proj(x_BnD).unflatten(-1, (-1, self.head_dim)))
        return rotate(q_BnHd, cos[:, :, None], sin[:, :, None]).transpose(1, 2)

    def output(self, out_BHnd: Tensor) -> Tensor:
        """What attention read, back in the width of the states: [B, n, D]."""
        return self.o_proj(out_BHnd.transpose(1, 2).flatten(2))


class WhiteMatterDecoderLayer(nn.Module):
    """`x + o(attention(norm x))`, then `x + mlp(norm x)`.

    What lies before attention and what lies after it are methods of their own: each is the same function in
    every step, so that it can be compiled once, while attention's sizes change from group to group.
    """

    def __init__(self, config: WhiteMatterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = PoolAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x_BnD: Tensor, slots: Slots, cos: Tensor, sin: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """The states [B, n, D] that leave the layer; keys and values as `attention.attend` takes them."""
        out_BHnd = attend(self.before(x_BnD, cos, sin), keys, values, slots)
        return self.after(x_BnD, out_BHnd)

    def before(self, x_BnD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The queries [B, H, n, d]."""
        return self.self_attn.query(self.input_layernorm(x_BnD), cos, sin)

    def after(self, x_BnD: Tensor, out_BHnd: Tensor) -> Tensor:
        """The layer's output [B, n, D] once attention has read."""
        x_BnD = x_BnD + self.self_attn.output(out_BHnd)
        return x_BnD + self.mlp(self.post_attention_layernorm(x_BnD))


class OwnKVAttention(PoolAttention):
    """PoolAttention with K and V projections and a key norm: all of Qwen3's attention."""

    def __init__(self, config: WhiteMatterConfig) -> None:
        super().__init__(config)
        width = config.num_key_value_heads * config.head_dim
        self.k_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, width, bias=config.qkv_bias)
        self.k_norm = head_norm(config)

    def entries(self, x_BnD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated, normed keys and raw values, each [B, G, n, d]."""
        key = self.k_norm(self.k_proj(x_BnD).unflatten(-1, (-1, self.head_dim)))
        value = self.v_proj(x_BnD).unflatten(-1, (-1, self.head_dim))
        return rotate(key, cos[:, :, None], sin[:, :, None]).transpose(1, 2), value.transpose(1, 2)


class OwnKVLayer(WhiteMatterDecoderLayer):
    """A Qwen3 block: it makes KV, for itself alone or for other layers, too."""

    def __init__(self, config: WhiteMatterConfig) -> None:
        super().__init__(config)
        self.self_attn = OwnKVAttention(config)


class Fusion(nn.Module):
    """Keys and values as a learned, static mixture of two layers' (FusedKV, Lin et al., 2026).

    A weight for every KV head and channel. Keys are mixed as they are cached, after the rotary embedding: so
    the two channels that it turns together have one weight, [G, d/2], without which a score would depend on
    more than the distance of query and key. Values have [G, d]. Fresh weights take the keys of the middle
    layer and the values of the bottom one, which is FusedKV-Lite.
    """

    def __init__(self, config: WhiteMatterConfig) -> None:
        super().__init__()
        heads, width = config.num_key_value_heads, config.head_dim
        self.key_bottom = nn.Parameter(torch.zeros(heads, width // 2))
        self.key_middle = nn.Parameter(torch.ones(heads, width // 2))
        self.value_bottom = nn.Parameter(torch.ones(heads, width))
        self.value_middle = nn.Parameter(torch.zeros(heads, width))

    def forward(self, bottom: tuple[Tensor, Tensor], middle: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, m, d] of both layers to those of this one, in their dtype."""
        key = self._turned(self.key_bottom) * bottom[0] + self._turned(self.key_middle) * middle[0]
        value = self.value_bottom[:, None] * bottom[1] + self.value_middle[:, None] * middle[1]
        return key.to(bottom[0].dtype), value.to(bottom[1].dtype)

    @staticmethod
    def _turned(weight: Tensor) -> Tensor:
        """[G, 1, d], as `rotate` pairs the channels."""
        return torch.cat((weight, weight), dim=-1)[:, None]


class FusedLayer(WhiteMatterDecoderLayer):
    """A block whose KV is the fusion of two layers' below it."""

    def __init__(self, config: WhiteMatterConfig) -> None:
        super().__init__(config)
        self.self_attn.fusion = Fusion(config)
