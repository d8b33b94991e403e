"""Paged attention: to all tokens up to the query's own, or to those *before* it and a learned dummy.

The second is what a pool is read with: a token's entries are made after its layers have run. A query at
position i sees the entries (k_j, v_j) of the tokens j < i and the dummy (k_d, v_d). A softmax does not change
when all of its logits move by -q·k_d; the dummy's logit is then 0, which is an attention sink. And values may
move by -v_d, if v_d is added to the result. So

    attend(q; (k_d, v_d), (k_j, v_j), …) = v_d + attend_with_sink_of_logit_0(q; (k_j - k_d, v_j - v_d), …)

and the cache stores the differences: every backend of vLLM that has sinks serves. "Before" is the backend's
own causal mask with every length one less.

Shapes: N tokens, R requests, H query heads and G KV heads of this rank, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    CommonAttentionMetadata,
    subclass_attention_backend,
)
from vllm.v1.attention.selector import get_attn_backend

from whitematter_vllm.step import Step

WIDEST_HEAD = 512


@dataclass(frozen=True)
class Heads:
    """A rank's heads: how many ask, how many KV heads they ask, and the width of each."""

    query: int
    kv: int
    dim: int


class ExclusiveBuilder:
    """Mixed into a backend's metadata builder: lengths are one less, and the metadata knows its step.

    The lengths lie in one buffer for the whole life of the engine, since a CUDA graph reads them where they
    were when it was captured.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prefix_caching = bool(self.vllm_config.cache_config.enable_prefix_caching)
        most = self.vllm_config.scheduler_config.max_num_seqs
        sizes = self.vllm_config.compilation_config.cudagraph_capture_sizes or [0]
        self.before_R = torch.zeros(max(most, *sizes, 1), dtype=torch.int32, device=self.device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: Any) -> AttentionCGSupport:
        """Graphs of steps that only decode: prompts are loops over data.

        With prefix caching none at all: a prompt of which one token is left looks like a token to decode, and
        may need entries of the same step, which only `Step.shared` finds out.
        """
        if vllm_config.cache_config.enable_prefix_caching:
            return AttentionCGSupport.NEVER
        own = super().get_cudagraph_support(vllm_config, kv_cache_spec)
        return min(own, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE, key=lambda level: level.value)

    def plain(self, common: CommonAttentionMetadata, passing: bool = False) -> Any:
        """The backend's metadata as it is; `passing`: it serves this step alone."""
        return super().build(0, common, fast_build=passing)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """The metadata of a whole step, with the step beside it."""
        common = common_attn_metadata
        before_R = self.before_R[: len(common.seq_lens)]
        before_R.copy_((common.seq_lens - 1).clamp_(min=0))
        known = common.seq_lens_cpu_upper_bound
        less = common.replace(
            seq_lens=before_R,
            seq_lens_cpu_upper_bound=None if known is None else (known - 1).clamp(min=0),
            max_seq_len=max(common.max_seq_len - 1, 1),
            _num_computed_tokens_cache=None,
        )
        metadata = super().build(common_prefix_len, less, fast_build)
        metadata.step = Step(self, common)
        return metadata


@cache
def exclusive(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """The backend whose queries see what lies before them."""
    builder = type(
        f"Exclusive{backend.get_builder_cls().__name__}", (ExclusiveBuilder, backend.get_builder_cls()), {}
    )
    return subclass_attention_backend("Exclusive", backend, builder)


class PagedAttention(nn.Module):
    """An attention layer of vLLM, which owns pages of the cache.

    Heads are as wide in the cache as the backend wants them, filled up with zeros.
    """

    def __init__(self, heads: Heads, vllm_config: VllmConfig, prefix: str, *, exclusive_: bool) -> None:
        super().__init__()
        dtype, cache_dtype = torch.get_default_dtype(), vllm_config.cache_config.cache_dtype
        backend, width = backend_for(heads.dim, dtype, cache_dtype, sinks=exclusive_)
        sinks = {"sinks": torch.zeros(heads.query, dtype=dtype)} if exclusive_ else {}
        self.attention = Attention(
            heads.query,
            width,
            heads.dim**-0.5,
            num_kv_heads=heads.kv,
            cache_config=vllm_config.cache_config,
            prefix=prefix,
            attn_backend=exclusive(backend) if exclusive_ else backend,
            **sinks,
        )
        self.heads, self.filling = heads, width - heads.dim

    def read(self, q_NHd: Tensor) -> Tensor:
        """What the queries read, [N, H, d]. Of a pool: the sum without v_d, and anything at position 0."""
        out = self.attention(self._filled(q_NHd), None, None)
        out = out.view(len(q_NHd), self.heads.query, -1)
        return out[..., : self.heads.dim] if self.filling else out

    def write(self, key_NGd: Tensor, value_NGd: Tensor) -> None:
        """The entries of the tokens at hand."""
        if self.attention.kv_cache.numel():  # not while vLLM measures memory
            unified_kv_cache_update(self._filled(key_NGd), self._filled(value_NGd), self.attention.layer_name)

    def _filled(self, x: Tensor) -> Tensor:
        return (F.pad(x, (0, self.filling)) if self.filling else x).contiguous()


def backend_for(
    head_dim: int, dtype: torch.dtype, cache_dtype: str, *, sinks: bool
) -> tuple[type[AttentionBackend], int]:
    """A backend and the head width, head_dim or the next one that it has.

    Raises ValueError where no backend of this platform has sinks.
    """
    reason = "none has heads so wide"
    for width in (head_dim, *range((head_dim // 16 + 1) * 16, WIDEST_HEAD + 1, 16)):
        try:
            backend = get_attn_backend(width, dtype, cache_dtype, has_sink=sinks)
        except ValueError as error:
            reason = str(error).splitlines()[0]
            continue
        if sinks and backend.forward_includes_kv_cache_update:
            reason = f"{backend.get_name()} writes the cache while it attends"
        elif backend.supports_head_size(width):
            return backend, width
    raise ValueError(
        f"no attention backend here reads a pool with heads of {head_dim} numbers in {dtype} ({reason}); "
        "on a GPU, try --attention-backend TRITON_ATTN"
    )
