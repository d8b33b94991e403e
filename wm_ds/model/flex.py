"""flex_attention under the pool's visibility rule: one block mask for each set of positions, for all layers.

Blocks of keys that no query of a block may see are skipped; documents and padding cost nothing more. The rule
is `attention.slots_of`'s, told to the kernel through tables, not constants: so that every group of a schedule
runs the same compiled kernel.

Shapes: B rows, n queries of a step, m = 1 + P + W slots, H query heads, G KV heads, d head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

EVERY = -2  # the document of the dummy: all documents see it
NOBODY = -3  # the document of slots without a token
ALONE = -4  # the document of a query without a token: it sees the dummy only


def block_mask(
    positions: range,
    past: int,
    width: int,
    past_BP: Tensor | None,
    document_BW: Tensor | None,
    device: torch.device,
) -> BlockMask:
    """The block mask of queries at `positions` over all slots; its arguments are fields of `Visibility`."""
    query_n = torch.arange(positions.start, positions.stop, positions.step, dtype=torch.int32, device=device)
    slot_m = torch.arange(-1 - past, width, dtype=torch.int32, device=device).clamp_min(-1)
    if past_BP is None and document_BW is None:

        def sees(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return slot_m[kv] < query_n[q]

        return create_block_mask(sees, None, None, len(query_n), len(slot_m), device=device)

    rows = (past_BP if document_BW is None else document_BW).shape[0]
    if document_BW is None:
        document_BW = torch.zeros(rows, width, dtype=torch.int32, device=device)
    document_BW = document_BW.to(torch.int32)
    first_B1 = torch.full((rows, 1), EVERY, dtype=torch.int32, device=device)
    cached_BP = torch.zeros(rows, past, dtype=torch.int32, device=device)
    if past_BP is not None:
        cached_BP = torch.where(past_BP, cached_BP, NOBODY)
    slot_Bm = torch.cat((first_B1, cached_BP, torch.where(document_BW >= 0, document_BW, NOBODY)), dim=1)
    document_Bn = document_BW[:, positions.start : positions.stop : positions.step]
    document_Bn = torch.where(document_Bn >= 0, document_Bn, ALONE).contiguous()

    def sees_own(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        mine = (slot_Bm[b, kv] == document_Bn[b, q]) | (slot_Bm[b, kv] == EVERY)
        return mine & (slot_m[kv] < query_n[q])

    return create_block_mask(sees_own, rows, None, len(query_n), len(slot_m), device=device)


def attend_in_blocks(q_BHnd: Tensor, key_BGmd: Tensor, value_BGmd: Tensor, mask: BlockMask) -> Tensor:
    """Softmax attention [B, H, n, d]; a compiled kernel on CUDA, flex_attention's eager form elsewhere."""
    kernel = _compiled() if q_BHnd.is_cuda else flex_attention
    grouped = q_BHnd.shape[1] != key_BGmd.shape[1]
    return kernel(q_BHnd, key_BGmd, value_BGmd, block_mask=mask, enable_gqa=grouped)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


__all__ = ["attend_in_blocks", "block_mask"]
