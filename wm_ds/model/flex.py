"""flex_attention under the pool's visibility rule: one block mask for each set of positions, for all layers.

Blocks of keys that no query of a block may see are skipped; documents and padding cost nothing more. The
rule is `visibility.sees`, which the kernel evaluates on tables, not on constants: so that every group of a
schedule runs the same compiled kernel.

Shapes: B rows, n queries of a step, M = 1 + P + W slots, H query heads, G KV heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from .visibility import Visibility, sees


def block_mask(positions: range, visibility: Visibility, device: torch.device) -> BlockMask:
    """The block mask of queries at `positions` over all slots, [B or 1, 1, n, M]."""
    width = visibility.width
    if width is None:
        raise ValueError("flex_attention's masks need Visibility.width")
    query_n = torch.arange(positions.start, positions.stop, positions.step, dtype=torch.int32, device=device)
    slot_m = visibility.slot_positions(width, device)
    documents_Bn, documents_Bm = visibility.query_documents(positions), visibility.slot_documents(width)
    if documents_Bn is None or documents_Bm is None:

        def seen(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return sees(query_n[q], slot_m[kv])

        return create_block_mask(seen, None, None, len(query_n), len(slot_m), device=device)
    rows = documents_Bm.shape[0]
    mine_Bn = documents_Bn.expand(rows, -1).contiguous()

    def seen_in_documents(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return sees(query_n[q], slot_m[kv], mine_Bn[b, q], documents_Bm[b, kv])

    return create_block_mask(seen_in_documents, rows, None, len(query_n), len(slot_m), device=device)


def attend_in_blocks(q_BHnd: Tensor, key_BGmd: Tensor, value_BGmd: Tensor, mask: BlockMask) -> Tensor:
    """Softmax attention [B, H, n, d]; a compiled kernel on CUDA, flex_attention's eager form elsewhere."""
    kernel = _compiled() if q_BHnd.is_cuda else flex_attention
    grouped = q_BHnd.shape[1] != key_BGmd.shape[1]
    return kernel(q_BHnd, key_BGmd, value_BGmd, block_mask=mask, enable_gqa=grouped)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


__all__ = ["attend_in_blocks", "block_mask"]
