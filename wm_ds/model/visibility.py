"""Who may see which slot of the pool: one rule, evaluated densely here and block by block in flex.py.

The pool's buffer has a slot for the learned dummy, one for every cached token and one for every token of the
row at hand: slot 0 is the dummy, slots 1..P the cache, slot 1+P+w workspace position w. A query at w reads
the dummy, the cached tokens of its row and the tokens of its own document *before* it: a token's own KV
exists only after its pass (paper §3.2). The dummy is visible to every query, so no softmax row is ever empty.

Layers that make their own KV before they attend (`own`) see the token itself as well, and there is no dummy.

Shapes: B rows, W workspace positions, P cached tokens, n queries of a step, m slots, M = 1 + P + W.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

BEFORE = -1  # the position of the dummy and of cached tokens: before the row
CACHED = 0  # the document of cached tokens, and of a row that is one document
EVERY = -1  # the document of the dummy: all documents see it
NOBODY = -2  # the document of cached slots without a token
ALONE = -3  # and less, one for each: documents of workspace positions without a token


def sees(
    query_position: Tensor,
    slot_position: Tensor,
    query_document: Tensor | None = None,
    slot_document: Tensor | None = None,
) -> Tensor:
    """The rule: a query sees what lies before it in its own document, and what belongs to every document.

    Any shapes that broadcast. Without documents, all is one.
    """
    before = slot_position < query_position
    if query_document is None or slot_document is None:
        return before
    return before & ((slot_document == query_document) | (slot_document == EVERY))


@dataclass(frozen=True)
class Visibility:
    """Which tokens exist in each row and which document they belong to.

    Attributes:
        past: cached tokens, P.
        past_BP: True where a cached slot holds a token of the row; None when all do.
        document_BW: the document of every workspace position, -1 where there is no token (padding, filler);
            None when each row is one document without padding. Behind a cache, the only document is 0.
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

    @cached_property
    def documents_BW(self) -> Tensor | None:
        """`document_BW`, where each position without a token is a document of its own."""
        if self.document_BW is None:
            return None
        width = self.document_BW.shape[1]
        alone_W = ALONE - torch.arange(width, dtype=torch.int32, device=self.document_BW.device)
        return torch.where(self.document_BW >= 0, self.document_BW.to(torch.int32), alone_W)

    def slot_positions(self, reach: int, device: torch.device) -> Tensor:
        """[1 + P + reach]: dummy, cached tokens, the first `reach` workspace positions."""
        position_m = torch.arange(-1 - self.past, reach, dtype=torch.int32, device=device)
        return position_m.clamp_min(BEFORE)

    def slot_documents(self, reach: int) -> Tensor | None:
        """[B, 1 + P + reach], as `slot_positions`; None where there is one document."""
        known = self.document_BW if self.past_BP is None else self.past_BP
        if known is None:
            return None
        rows, options = known.shape[0], {"dtype": torch.int32, "device": known.device}
        every_B1 = torch.full((rows, 1), EVERY, **options)
        cached_BP = torch.full((rows, self.past), CACHED, **options)
        if self.past_BP is not None:
            cached_BP = torch.where(self.past_BP, cached_BP, NOBODY)
        row_BW = self.documents_BW
        row_BW = torch.full((rows, reach), CACHED, **options) if row_BW is None else row_BW[:, :reach]
        return torch.cat((every_B1, cached_BP, row_BW), dim=1)

    def query_documents(self, positions: range) -> Tensor | None:
        """[B, n] of queries at `positions`; [1, n] where rows are one document, None where slots are, too."""
        if self.documents_BW is not None:
            return self.documents_BW[:, positions.start : positions.stop : positions.step]
        if self.past_BP is None:
            return None
        return torch.full((1, len(positions)), CACHED, dtype=torch.int32, device=self.past_BP.device)


def seen_slots(visibility: Visibility, positions: range, device: torch.device, own: bool = False) -> Tensor:
    """Whether queries see slots, bool [B or 1, n, m].

    Slots are those up to the last query's position; with `own` that position's, too, and not the dummy.
    """
    reach = positions[-1] + own
    query_n = torch.arange(positions.start, positions.stop, positions.step, dtype=torch.int32, device=device)
    slot_m = visibility.slot_positions(reach, device)
    documents_Bn, documents_Bm = visibility.query_documents(positions), visibility.slot_documents(reach)
    if own:
        query_n, slot_m = query_n + 1, slot_m[1:]
        documents_Bm = None if documents_Bm is None else documents_Bm[:, 1:]
    if documents_Bn is None or documents_Bm is None:
        return sees(query_n[:, None], slot_m)[None]
    return sees(query_n[:, None], slot_m, documents_Bn[:, :, None], documents_Bm[:, None])


def additive_mask(
    visibility: Visibility, positions: range, dtype: torch.dtype, device: torch.device, own: bool = False
) -> Tensor:
    """`seen_slots` for sdpa: [B or 1, 1, n, m], 0 where visible, -inf elsewhere."""
    seen_Bnm = seen_slots(visibility, positions, device, own)
    mask = torch.zeros(seen_Bnm.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~seen_Bnm, float("-inf"))[:, None]


__all__ = ["Visibility", "additive_mask", "seen_slots", "sees"]
