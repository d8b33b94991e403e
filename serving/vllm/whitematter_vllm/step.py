"""One step of the engine: which request brings how many tokens, and batches of some of these tokens.

vLLM describes a step by requests with consecutive new tokens each. Passes evaluate other sets, which
`Step.batch` describes in the same terms. What a query may see is always "the tokens before its own"
(attention.py). All bookkeeping is on the host, from numbers that are there; only `shared` may have to ask the
device, and never in a step that only decodes.

Shapes: R requests, N tokens of the step, n tokens of a batch, b blocks that a request may have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, override_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

if TYPE_CHECKING:
    from whitematter_vllm.attention import ExclusiveBuilder


@dataclass(frozen=True)
class Batch:
    """Some tokens of a step (`token_n`, on the device) and what attention and the cache must know of them."""

    token_n: Tensor
    metadata: Any
    slot_n: Tensor
    layers: list[str]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, vLLM's attention layers of the pool work on these tokens."""
        context = get_forward_context()
        metadata = dict.fromkeys(self.layers, self.metadata)
        slots = dict.fromkeys(self.layers, self.slot_n)
        with override_forward_context(
            replace(
                context,
                attn_metadata={**context.attn_metadata, **metadata},
                slot_mapping={**context.slot_mapping, **slots},
            )
        ):
            yield


class Step:
    """What one step of the engine brings."""

    def __init__(self, builder: ExclusiveBuilder, common: CommonAttentionMetadata) -> None:
        self.builder, self.common = builder, common

    @cached_property
    def single(self) -> bool:
        """Whether one evaluation of every token is all there is to do."""
        return self.common.max_query_len <= 1 and not self.shared

    @cached_property
    def new_R(self) -> Tensor:
        """New tokens of each request."""
        return self.common.query_start_loc_cpu[: self.common.num_reqs + 1].long().diff()

    @cached_property
    def computed_R(self) -> Tensor:
        """Tokens of each request whose entries are in the cache already."""
        known = self.common.seq_lens_cpu_upper_bound  # exact but for speculative decoding, which is refused
        lengths = self.common.seq_lens.cpu() if known is None else known
        return lengths[: self.common.num_reqs].long() - self.new_R

    @cached_property
    def request_N(self) -> Tensor:
        """The request of each token."""
        return torch.repeat_interleave(torch.arange(self.common.num_reqs), self.new_R)

    @cached_property
    def position_N(self) -> Tensor:
        """The position of each token in its request."""
        starts_R = self.new_R.cumsum(0) - self.new_R
        return (self.computed_R - starts_R)[self.request_N] + torch.arange(len(self.request_N))

    @cached_property
    def shared(self) -> bool:
        """Whether a request counts as computed what another one computes in this very step.

        With prefix caching the scheduler does that: a model that runs its layers once writes a layer's keys
        before it reads them.
        """
        common = self.common
        if not self.builder.prefix_caching or common.num_reqs == 1:
            return False
        if common.is_prefilling is None:
            reads_R = self.computed_R > 0
        else:
            reads_R = common.is_prefilling[: common.num_reqs].cpu() & (self.computed_R > 0)
        reads_R &= self.new_R > 0
        if not bool(reads_R.any()):
            return False
        size, device = self.builder.kv_cache_spec.block_size, common.block_table_tensor.device
        rows = reads_R.nonzero()[:, 0]
        full_R = self.computed_R[rows] // size
        table_Rb = common.block_table_tensor[rows.to(device), : max(1, int(full_R.max()))]
        read_Rb = torch.arange(table_Rb.shape[1], device=device) < full_R.to(device)[:, None]
        written_N = common.slot_mapping[: len(self.request_N)] // size
        return bool((torch.isin(table_Rb, written_N.to(table_Rb.dtype)) & read_Rb).any())

    def batch(self, token_n: Tensor) -> Batch:
        """A batch of these tokens (ascending indices, on the host).

        A request of which they are consecutive tokens stays one request, and the backend's causal mask does
        the rest. Where that is not so for all requests, each token becomes one of its own.
        """
        position_n = self.position_N[token_n]
        row_r, queries_r = self.request_N[token_n].unique_consecutive(return_counts=True)
        last_r = queries_r.cumsum(0) - 1
        seen_r = position_n[last_r]
        consecutive = seen_r - position_n[last_r - queries_r + 1] + 1 == queries_r
        if bool(consecutive.all()):
            return self._batch(token_n, queries_r, seen_r, row_r)
        return self._batch(token_n, torch.ones_like(token_n), position_n, self.request_N[token_n])

    def _batch(self, token_n: Tensor, queries_r: Tensor, seen_r: Tensor, row_r: Tensor) -> Batch:
        """r requests with so many queries each, whose last query sees `seen_r` tokens, in these rows."""
        common = self.common
        device, size = common.seq_lens.device, self.builder.kv_cache_spec.block_size
        start_r1 = torch.zeros(len(row_r) + 1, dtype=torch.int32)
        start_r1[1:] = queries_r.cumsum(0)
        seen_r = seen_r.to(torch.int32)
        longest = int(seen_r.max())
        blocks = max(1, -(-longest // size))
        token_n = token_n.to(device, non_blocking=True)
        slot_n = common.slot_mapping[token_n]
        described = common.replace(
            query_start_loc=start_r1.to(device, non_blocking=True),
            query_start_loc_cpu=start_r1,
            seq_lens=seen_r.to(device, non_blocking=True),
            seq_lens_cpu_upper_bound=seen_r,
            num_reqs=len(row_r),
            num_actual_tokens=len(token_n),
            max_query_len=int(queries_r.max()),
            max_seq_len=longest,
            block_table_tensor=common.block_table_tensor[row_r.to(device, non_blocking=True), :blocks],
            slot_mapping=slot_n,
            positions=None,
            is_prefilling=None,
            req_idx=None,
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
        metadata = self.builder.plain(described, passing=True)
        return Batch(token_n, metadata, slot_n, self.builder.layer_names)
