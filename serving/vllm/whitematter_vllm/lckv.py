"""The LCKV sandwich: warm-up layers with pages of their own around layers that share one KV.

Shapes: N tokens, L layers that share, D width, G KV heads of this rank, d head width.
"""

from __future__ import annotations

from torch import Tensor, nn
from vllm.config import VllmConfig

from whitematter_vllm.attention import PagedAttention
from whitematter_vllm.layers import Block, OwnKVBlock, heads_of_rank
from whitematter_vllm.model import WhiteMatterForCausalLM, WhiteMatterModel
from whitematter_vllm.prefill import run_step
from whitematter_vllm.stack import Stack


class LCKVModel(WhiteMatterModel):
    """Embeddings, bottom warm-up layers, the condensed layers' fixed point, top warm-up layers, norm."""

    def _build(self, vllm_config: VllmConfig, prefix: str) -> None:
        config, heads = self.config, heads_of_rank(self.config)
        condensed = config.condensed

        def layer(index: int) -> Block:
            name = f"{prefix}.layers.{index}"
            if index in condensed:
                return Block(config, self.rotary, name, own_kv=index == condensed[-1])
            paged = PagedAttention(heads, vllm_config, f"{name}.paged", exclusive_=False)
            return OwnKVBlock(config, self.rotary, name, paged)

        self.layers = nn.ModuleList(layer(index) for index in range(config.num_hidden_layers))
        self.channels = nn.ModuleList(
            [PagedAttention(heads, vllm_config, f"{prefix}.channels.0", exclusive_=True)]
        )
        middle = list(self.layers[condensed.start : condensed.stop])
        self.stack = Stack(middle, self._condensed_kv, self.channels)

    def _condensed_kv(self, state_NLD: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [1, N, G, d]: the top condensed layer's, from the state that enters it."""
        layer = self.stack.layers[-1]
        normed_ND = layer.input_layernorm(state_NLD[:, -1].contiguous())
        key_NGd, value_NGd = layer.self_attn.entries(normed_ND, position_N)
        return key_NGd[None], value_NGd[None]

    def states(self, x_ND: Tensor, position_N: Tensor) -> Tensor:
        """From embeddings to the output of the last layer."""
        condensed = self.config.condensed
        x_ND = _once(self.layers[: condensed.start], x_ND, position_N)
        x_ND = run_step(self.stack, self.schedule, self.step(), x_ND, position_N)
        return _once(self.layers[condensed.stop :], x_ND, position_N)


def _once(layers: nn.ModuleList, x_ND: Tensor, position_N: Tensor) -> Tensor:
    """Warm-up layers, once for all tokens of a step."""
    if not len(layers):
        return x_ND
    change_ND, state_ND = x_ND, None
    for layer in layers:
        change_ND, state_ND = layer(change_ND, state_ND, position_N)
    return change_ND + state_ND


class LCKVForCausalLM(WhiteMatterForCausalLM):
    """The LCKV sandwich with its language-model head."""

    base_class = LCKVModel
