"""Decoder blocks: Qwen3's, without K and V projections or with them.

Shapes: N tokens, D width, H query heads and G KV heads of this rank, d head width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.models.qwen2 import Qwen2MLP

from whitematter_vllm.attention import Heads
from whitematter_vllm.configuration import WhiteMatterConfig


def heads_of_rank(config: WhiteMatterConfig) -> Heads:
    """This rank's share of the heads."""
    ranks = get_tensor_model_parallel_world_size()
    return Heads(config.num_attention_heads // ranks, config.num_key_value_heads // ranks, config.head_dim)


class Rotary(nn.Module):
    """The rotary embedding of queries and of keys."""

    def __init__(self, config: WhiteMatterConfig) -> None:
        super().__init__()
        # transformers moves a file's rope_theta into rope_parameters where its base class knows them.
        theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta") or config.rope_theta
        self.rope = get_rope(
            config.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
        )

    def forward(self, x_NHd: Tensor, position_N: Tensor) -> Tensor:
        """x, rotated by its token's position."""
        rotated, _ = self.rope(position_N, x_NHd.flatten(1).contiguous(), None)
        return rotated.view(x_NHd.shape)


class Queries(nn.Module):
    """The query side of attention: projection, norm of each head, rotation; and the way back.

    `own_kv`: keys and values of its own as well (`entries`).
    """

    def __init__(
        self, config: WhiteMatterConfig, rotary: Rotary, prefix: str, *, own_kv: bool = False
    ) -> None:
        super().__init__()
        width, kv_width = (
            heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        self.head_dim, self._rotary = config.head_dim, [rotary]  # in a list: it is not this module's
        self.q_proj = ColumnParallelLinear(config.hidden_size, width, bias=False, prefix=f"{prefix}.q_proj")
        self.o_proj = RowParallelLinear(width, config.hidden_size, bias=False, prefix=f"{prefix}.o_proj")
        self.q_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        if own_kv:
            self.k_proj, self.v_proj = (
                ColumnParallelLinear(config.hidden_size, kv_width, bias=False, prefix=f"{prefix}.{name}")
                for name in ("k_proj", "v_proj")
            )
            self.k_norm = RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def queries(self, x_ND: Tensor, position_N: Tensor) -> Tensor:
        """Normed, rotated queries [N, H, d]."""
        return self._rotary[0](self.q_norm(self._heads(self.q_proj, x_ND)), position_N)

    def entries(self, x_ND: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """Normed, rotated keys and raw values, each [N, G, d]."""
        key_NGd = self._rotary[0](self.k_norm(self._heads(self.k_proj, x_ND)), position_N)
        return key_NGd, self._heads(self.v_proj, x_ND)

    def output(self, out_NHd: Tensor) -> Tensor:
        """What was read, back in the width of the states."""
        return self.o_proj(out_NHd.flatten(1))[0]

    def _heads(self, projection: nn.Module, x_ND: Tensor) -> Tensor:
        return projection(x_ND)[0].unflatten(-1, (-1, self.head_dim)).contiguous()


class Block(nn.Module):
    """`x + o(attention(norm x))`, then `x + mlp(norm x)`.

    Written as vLLM does: a sum is made by the norm behind it, in place.
    """

    def __init__(
        self, config: WhiteMatterConfig, rotary: Rotary, prefix: str, *, own_kv: bool = False
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Queries(config, rotary, f"{prefix}.self_attn", own_kv=own_kv)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Qwen2MLP(config.hidden_size, config.intermediate_size, "silu", prefix=f"{prefix}.mlp")

    def enter(self, change_ND: Tensor, state_ND: Tensor | None) -> tuple[Tensor, Tensor]:
        """The normed input and the state that enters, from what the layer before changed in its state."""
        if state_ND is None:
            return self.input_layernorm(change_ND), change_ND
        return self.input_layernorm(change_ND, state_ND)

    def leave(self, out_NHd: Tensor, state_ND: Tensor) -> tuple[Tensor, Tensor]:
        """The last change and the state that it is to be added to, once attention has read."""
        normed_ND, state_ND = self.post_attention_layernorm(self.self_attn.output(out_NHd), state_ND)
        return self.mlp(normed_ND), state_ND


class OwnKVBlock(Block):
    """A Qwen3 block with its own pages: attention is ordinary and causal."""

    def __init__(self, config: WhiteMatterConfig, rotary: Rotary, prefix: str, paged: Any) -> None:
        super().__init__(config, rotary, prefix, own_kv=True)
        self.paged = paged

    def forward(
        self, change_ND: Tensor, state_ND: Tensor | None, position_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The layer, once, for all tokens of a step."""
        normed_ND, state_ND = self.enter(change_ND, state_ND)
        self.paged.write(*self.self_attn.entries(normed_ND, position_N))
        return self.leave(self.paged.read(self.self_attn.queries(normed_ND, position_N)), state_ND)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, for weights that broadcast (the pool's); computed in float32."""
    return weight * unit(x, eps)


def unit(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)
