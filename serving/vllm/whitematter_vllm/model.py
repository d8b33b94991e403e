"""WhiteMatter as vLLM loads it. Weights have the names of the export's files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from whitematter_vllm.attention import PagedAttention
from whitematter_vllm.layers import Block, Rotary, heads_of_rank
from whitematter_vllm.pool import Pool, parameter
from whitematter_vllm.prefill import run_step
from whitematter_vllm.stack import Stack
from whitematter_vllm.step import Step
from whitematter_vllm.sweeps import schedule_of


class WhiteMatterModel(nn.Module):
    """Embeddings, L blocks that share a pool of k channels, final norm."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.schedule = schedule_of(config)
        self.rotary = Rotary(config)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self._build(vllm_config, prefix)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def _build(self, vllm_config: VllmConfig, prefix: str) -> None:
        """The parts between the embedding and the final norm, and `self.stack`."""
        config, heads = self.config, heads_of_rank(self.config)
        self.layers = nn.ModuleList(
            Block(config, self.rotary, f"{prefix}.layers.{index}")
            for index in range(config.num_hidden_layers)
        )
        self.channels = nn.ModuleList(
            PagedAttention(heads, vllm_config, f"{prefix}.channels.{index}", exclusive_=True)
            for index in range(config.num_kv_channels)
        )
        self.pool = Pool(config, self.rotary)
        shape = (config.num_kv_channels, heads.kv, heads.dim)
        self.dummy_key, self.dummy_value = (parameter(*shape, share_of=1) for _ in range(2))
        dummies = self.dummy_key, self.dummy_value
        self.stack = Stack(self.layers, self.pool, self.channels, *dummies, mixer=self.pool)

    def forward(self, input_ids: Tensor, position_N: Tensor) -> Tensor:
        """The states [N, D] from which logits are made."""
        return self.norm(self.states(self.embed_tokens(input_ids), position_N))

    def states(self, x_ND: Tensor, position_N: Tensor) -> Tensor:
        """From embeddings to the output of the last layer."""
        return run_step(self.stack, self.schedule, self.step(), x_ND, position_N)

    def step(self) -> Step | None:
        """What the engine's step brings; None while vLLM measures memory."""
        described = get_forward_context().attn_metadata
        return described[self.channels[0].attention.layer_name].step if described else None


class WhiteMatterForCausalLM(nn.Module):
    """The model with its language-model head."""

    base_class: type[WhiteMatterModel] = WhiteMatterModel
    packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}  # noqa: RUF012 (vLLM wants a dict)
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={".gate_proj": (".gate_up_proj", 0), ".up_proj": (".gate_up_proj", 1)}
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.model = self.base_class(vllm_config, maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """vLLM's name for the embeddings [N, D]."""
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """The states [N, D] of a step's tokens; prompts of embeddings are refused (check.py)."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits [N, V], of ids without a token as well: what is scored is what the model says."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """vLLM's loader, by the names of the files; it refuses files that lack a weight."""
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
