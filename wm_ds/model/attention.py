"""Softmax attention of a step's queries to the slots of one channel that they may see (visibility.py).

Shapes: B rows, W workspace positions, P cached tokens, n queries of a step, m slots, H query heads, G KV
heads, d head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from .flex import attend_in_blocks, block_mask
from .shard import ALL, Shard
from .visibility import Visibility, additive_mask

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


def slots_of(
    positions: range,
    visibility: Visibility,
    dtype: torch.dtype,
    device: torch.device,
    max_runs: int = MAX_RUNS,
) -> Slots:
    """The runs of queries, key prefixes and masks for a step at `positions` (workspace indices)."""
    if takes_flex(visibility.kernel, device, len(positions)):
        mask = block_mask(positions, visibility, device)
        return Slots([len(positions)], [mask.shape[-1]], [mask])
    runs = max(1, min(max_runs, len(positions) // MIN_QUERIES_PER_RUN))
    cuts = [len(positions) * i // runs for i in range(runs + 1)]
    sizes: list[int] = []
    lengths: list[int] = []
    masks: list[Tensor | BlockMask] = []
    for first, last in pairwise(cuts):
        run = positions[first:last]
        sizes.append(len(run))
        lengths.append(1 + visibility.past + run[-1])
        masks.append(additive_mask(visibility, run, dtype, device))
    return Slots(sizes, lengths, masks)


def takes_flex(kernel: str, device: torch.device, queries: int) -> bool:
    """Whether a step of so many queries is flex_attention's; a single query never is."""
    if kernel == "auto":
        return device.type == "cuda" and queries >= MIN_FLEX_QUERIES
    return kernel == "flex" and queries > 1


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
