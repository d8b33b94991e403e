"""Who may see which slot of the pool, and attention under that rule.

The pool's buffer has a slot for the learned dummy, one for every cached token and one for every token of the
row at hand: slot 0 is the dummy, slots 1..P the cache, slot 1+P+w workspace position w. A query at w reads
the dummy, the cached tokens of its row and the tokens of its own document *before* it: a token's own KV
exists only after its pass (paper §3.2). The dummy is visible to every query, so no softmax row is ever empty.

Shapes: B rows, W workspace positions, P cached tokens, n queries of a step, m slots, H query heads, G KV
heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .flex import attend_in_blocks, block_mask
from .shard import ALL, Shard

# A step's queries are cut into this many runs, each against its own key prefix: that skips most of the masked
# half of causal attention. More runs mean smaller products; of 4 and 8, 8 was 2% faster on a CPU. With
# gradient there are fewer: each run's gradient of its prefix waits for those of the layer's other runs.
MAX_RUNS = 8
MAX_RUNS_WITH_GRAD = 4
MIN_QUERIES_PER_RUN = 32
# Below one block of queries flex_attention has nothing to skip; building its mask costs more than it saves.
MIN_FLEX_QUERIES = 128


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products of x run in: autocast's where it is on."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


@dataclass(frozen=True)
class Slots:
    """What one step's queries see: for each run of queries its size, its key prefix and its mask.

    A mask is additive, for sdpa, or a BlockMask, for flex_attention; that knows one run and all slots.
    `shard` says which of the queries and heads are at hand.
    """

    sizes: list[int]
    lengths: list[int]
    masks: list[Tensor | BlockMask]
    shard: Shard = ALL


@dataclass(frozen=True)
class Visibility:
    """Which tokens exist in each row and which document they belong to.

    Attributes:
        past: cached tokens, P.
        past_BP: True where a cached slot holds a token of the row; None when all do.
        document_BW: the document of every workspace position, -1 where there is no token (padding, filler);
            None when each row is one document without padding.
        width: W; needed for flex_attention.
        kernel: "sdpa", "flex", or "auto": flex for long steps on CUDA.
    """

    past: int
    past_BP: Tensor | None
    document_BW: Tensor | None
    width: int | None = None
    kernel: str = "sdpa"

    def rows(self, index: Tensor) -> Visibility:
        """The same for some of the rows."""
        past_BP, document_BW = (
            None if rows is None else rows.expand(len(index), -1)[index]
            for rows in (self.past_BP, self.document_BW)
        )
        return replace(self, past_BP=past_BP, document_BW=document_BW)


def slots_of(
    positions: range,
    visibility: Visibility,
    dtype: torch.dtype,
    device: torch.device,
    max_runs: int = MAX_RUNS,
) -> Slots:
    """The runs of queries, key prefixes and masks for a step at `positions` (workspace indices)."""
    if takes_flex(visibility.kernel, device, len(positions)):
        seen = visibility
        mask = block_mask(positions, seen.past, seen.width, seen.past_BP, seen.document_BW, device)
        return Slots([len(positions)], [1 + seen.past + seen.width], [mask])
    runs = max(1, min(max_runs, len(positions) // MIN_QUERIES_PER_RUN))
    cuts = [len(positions) * i // runs for i in range(runs + 1)]
    sizes, lengths, masks = [], [], []
    for first, last in pairwise(cuts):
        run = positions[first:last]
        sizes.append(len(run))
        lengths.append(1 + visibility.past + run[-1])
        masks.append(_mask(run, visibility, dtype, device))
    return Slots(sizes, lengths, masks)


def takes_flex(kernel: str, device: torch.device, queries: int) -> bool:
    """Whether a step of so many queries is flex_attention's; a single query never is."""
    if kernel == "auto":
        return device.type == "cuda" and queries >= MIN_FLEX_QUERIES
    return kernel == "flex" and queries > 1


def _mask(run: range, visibility: Visibility, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Additive mask [B or 1, 1, n, m]: 0 where visible, -inf elsewhere. The one place that knows the rule."""
    reach = run[-1]
    query_n1 = torch.arange(run.start, run.stop, run.step, device=device)[:, None]
    seen_Bnw = (torch.arange(reach, device=device) < query_n1)[None]
    if visibility.document_BW is not None:
        document_BW = visibility.document_BW
        query_Bn1 = document_BW[:, run.start : run.stop : run.step, None]
        seen_Bnw = seen_Bnw & (document_BW[:, None, :reach] == query_Bn1) & (query_Bn1 >= 0)
    rows, queries = seen_Bnw.shape[:2]
    parts = [seen_Bnw.new_ones(rows, queries, 1), seen_Bnw]
    if visibility.past:
        past_B1P = seen_Bnw.new_ones(1, 1, visibility.past)
        if visibility.past_BP is not None:
            past_B1P = visibility.past_BP[:, None]
        if visibility.document_BW is not None:
            past_B1P = past_B1P & (visibility.document_BW[:, run.start : run.stop : run.step, None] >= 0)
        rows = max(rows, past_B1P.shape[0])
        parts.insert(1, past_B1P.expand(rows, queries, -1))
        parts = [part.expand(rows, -1, -1) for part in parts]
    seen_Bnm = torch.cat(parts, dim=-1)
    mask = torch.zeros(seen_Bnm.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~seen_Bnm, float("-inf"))[:, None]


def attend(q_BHnd: Tensor, keys: list[Tensor], values: list[Tensor], slots: Slots) -> Tensor:
    """Softmax attention of the queries, run by run, in the keys' dtype.

    keys[r] and values[r] are [B, G, m_r, d], with G dividing H. Returns [B, H, n, d]. Of a shard, q and the
    result are its positions, keys and values its heads.
    """
    q_BHnd = slots.shard.to_heads(q_BHnd.to(keys[0].dtype))
    if isinstance(slots.masks[0], BlockMask):
        out_BHnd = attend_in_blocks(q_BHnd, keys[0], values[0], slots.masks[0])
        return slots.shard.to_positions(out_BHnd)
    grouped = q_BHnd.shape[1] != keys[0].shape[1]
    out = [
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        for q, k, v, mask in zip(q_BHnd.split(slots.sizes, dim=2), keys, values, slots.masks)
    ]
    return slots.shard.to_positions(out[0] if len(out) == 1 else torch.cat(out, dim=2))
