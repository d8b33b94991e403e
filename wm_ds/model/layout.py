"""Where the tokens of a batch lie while the passes run.

Groups go by position, and two things must not change a document's numbers: where its row begins, and how much
padding stands before it. So padded rows are moved to the left edge of a workspace, and rows that continue a
cache begin at the column that their position in the text has within a period of the schedule.

Shapes: B rows, T columns of the batch, P cached columns, W workspace columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .visibility import Visibility


@dataclass(frozen=True)
class Layout:
    """The way from batch columns to workspace columns and back.

    Attributes:
        width: W.
        visibility: who exists and who may see whom, in workspace columns.
        position_BW: rotary positions, [B or 1, W].
        column_BT: workspace column of each token; None when it is the token's own column.
        real_BT: False for padding; None when there is none.
    """

    width: int
    visibility: Visibility
    position_BW: Tensor
    column_BT: Tensor | None = None
    real_BT: Tensor | None = None

    def to_workspace(self, x: Tensor) -> Tensor:
        """[B, T, …] to [B, W, …]; columns without a token are zero."""
        if self.column_BT is None:
            return x
        column = torch.where(self.real_BT, self.column_BT, self.width)
        out = x.new_zeros(x.shape[0], self.width + 1, *x.shape[2:])
        index = column.reshape(*column.shape, *[1] * (x.dim() - 2)).expand_as(x)
        return out.scatter(1, index, x)[:, : self.width]

    def to_batch(self, x: Tensor, dim: int = 1) -> Tensor:
        """[B, W, …] to [B, T, …] (rows at dim - 1 … or 0, columns at `dim`); padding is zero."""
        if self.column_BT is None or self.real_BT is None:
            return x
        shape = [1] * x.dim()
        rows_at = 0 if dim == 1 else 1
        shape[rows_at], shape[dim] = self.column_BT.shape
        size = list(x.shape)
        size[dim] = self.column_BT.shape[1]
        out = x.gather(dim, self.column_BT.view(shape).expand(size))
        return out * self.real_BT.view(shape).to(x.dtype)


def lay_out(
    shape: tuple[int, int],
    past: int,
    period: int,
    device: torch.device,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> Layout:
    """
    Args:
        shape: B, T.
        past: P.
        period: columns by which a row may be shifted without changing the schedule's effect on it.
        attention_mask: [B, P+T], nonzero for tokens; None when there is no padding.
        position_ids: rotary positions [B or 1, T]; by default the count of tokens before, within the document
            where documents are given. Where they start again within a row without document_ids, a new
            document starts: this is how transformers packs rows.
        document_ids: [B, T], the document of every token, -1 for filler; only without a cache.

    Raises:
        ValueError: a mask of another shape, or several documents together with a cache.
    """
    if document_ids is not None and past:
        raise ValueError("document_ids describe whole rows and cannot be combined with cached tokens")
    rows, length = shape
    mask_BM = _padding_mask(attention_mask, (rows, past + length), past)
    if position_ids is not None and document_ids is None and length > 1:
        document_ids = _documents_of(position_ids, None if mask_BM is None else mask_BM[:, past:])
        if document_ids is not None and past:
            raise ValueError(
                "position_ids start again within a row: several documents cannot be combined with cached "
                "tokens"
            )
    if mask_BM is None and (length == 1 or past % period == 0):
        if position_ids is None and document_ids is None:
            position_ids = torch.arange(past, past + length, device=device)[None]
        elif position_ids is None:
            position_ids = document_positions(document_ids)
        if document_ids is not None:
            document_ids = document_ids.expand(rows, -1)
        return Layout(length, Visibility(past, None, document_ids), position_ids)
    if mask_BM is None:
        mask_BM = torch.ones(rows, past + length, dtype=torch.bool, device=device)
    return _moved(mask_BM, past, period, position_ids, document_ids)


def _padding_mask(attention_mask: Tensor | None, shape: tuple[int, int], past: int) -> Tensor | None:
    """True for tokens, [B, P+T]; None where there is no padding."""
    if attention_mask is None:
        return None
    if tuple(attention_mask.shape) != shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}; it must be {shape}: a column for each "
            f"of {past} cached and {shape[1] - past} new tokens"
        )
    if attention_mask.is_floating_point() and bool((attention_mask < 0).any()):
        raise ValueError(
            "attention_mask has negative values, as an additive mask has; it must be 1 for tokens and 0 for "
            "padding"
        )
    mask_BM = attention_mask.bool()
    return None if bool(mask_BM.all()) else mask_BM


def _moved(
    mask_BM: Tensor, past: int, period: int, position_ids: Tensor | None, document_ids: Tensor | None
) -> Layout:
    """Rows moved to the left edge, or to the column that their position has within a period."""
    past_BP, real_BT = mask_BM[:, :past], mask_BM[:, past:]
    rows, length = real_BT.shape
    before_B1 = past_BP.sum(1, keepdim=True)
    start_B1 = torch.zeros_like(before_B1) if length == 1 else before_B1 % period
    order_BT = real_BT.cumsum(1) - 1
    column_BT = torch.where(real_BT, start_B1 + order_BT, 0)
    width = max(1, int((column_BT * real_BT).max()) + 1)
    layout = Layout(width, Visibility(past, past_BP, None), order_BT, column_BT, real_BT)
    if document_ids is None:
        document_ids = torch.zeros_like(order_BT)
        if position_ids is None:
            position_ids = before_B1 + order_BT
    # Documents travel as id + 1, so that the zeros of empty columns become -1.
    document_BW = layout.to_workspace(document_ids.expand(rows, -1) + 1) - 1
    if position_ids is None:
        position_BW = document_positions(document_BW)
    else:
        position_BW = layout.to_workspace(position_ids.expand(rows, -1))
    visibility = Visibility(past, past_BP if past else None, document_BW)
    return Layout(width, visibility, position_BW, column_BT, real_BT)


def _documents_of(position_BT: Tensor, real_BT: Tensor | None) -> Tensor | None:
    """Documents told apart by rotary positions that do not rise; None where they rise through every row."""
    rows = position_BT.shape[0] if real_BT is None else real_BT.shape[0]
    position_BT = position_BT.expand(rows, -1)
    index_BT = torch.arange(position_BT.shape[1], device=position_BT.device).expand_as(position_BT)
    last_BT = index_BT if real_BT is None else torch.where(real_BT, index_BT, -1).cummax(1).values
    before_BT = torch.cat((torch.full_like(last_BT[:, :1], -1), last_BT[:, :-1]), dim=1)
    starts_BT = (before_BT >= 0) & (position_BT <= position_BT.gather(1, before_BT.clamp_min(0)))
    if real_BT is not None:
        starts_BT = starts_BT & real_BT
    return starts_BT.cumsum(1) if bool(starts_BT.any()) else None


def document_positions(document_BW: Tensor) -> Tensor:
    """Position of every token inside its document: starts at 0 with every run of equal ids, int64 [B, W]."""
    index = torch.arange(document_BW.shape[1], device=document_BW.device).expand_as(document_BW)
    starts = torch.ones_like(document_BW, dtype=torch.bool)
    starts[:, 1:] = document_BW[:, 1:] != document_BW[:, :-1]
    return index - torch.where(starts, index, 0).cummax(1).values
