"""Next-token loss, normalised by tokens, that never holds T x V fp32 logits.

Legend: B rows, T tokens a row, N = B*T, D width, V vocabulary.

`TokenLoss` is the module that DeepSpeed wraps. Its forward returns the *sum* of the cross-entropies of the
valid labels; the engine divides by the number of valid labels in the whole global batch, so micro-batches and
ranks with few or no valid labels weigh exactly what they hold (mean of means is wrong).

The product with the head, the softmax and their gradients are computed chunk by chunk of rows, and the
gradients of hidden states and head are kept instead of the logits. So the head's weight is needed in forward
only, which also fits ZeRO-3: it is gathered once. `torch.nn.functional.linear_cross_entropy` (torch 2.13)
works the same way and equals this one in fp32 and fp64, but in bf16 it returns the summed loss in bf16, off
by 0.2% for 500 tokens; a logged loss has to be better than that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wm_ds.families import family_of
from wm_ds.model.layout import document_positions
from wm_ds.model.spans import span

IGNORE = -100  # the label of a position without a target, as in transformers and torch
CHUNK_LOGITS = 1 << 26  # logits in hand at a time: 256 MiB in fp32, 441 rows at Qwen3's vocabulary of 151,936


class _ChunkedCrossEntropy(torch.autograd.Function):
    """hidden [N, D], weight [V, D], labels [N] -> summed cross-entropy; gradients are made in forward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        dtype: torch.dtype,
        rows: int,
        training: bool,
    ) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        need_h, need_w = (training and needed for needed in ctx.needs_input_grad[:2])
        w_VD = weight_VD.detach().to(dtype)
        valid_N = labels_N != IGNORE
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        dh_ND = torch.empty_like(hidden_ND) if need_h else None
        dw_VD = torch.zeros_like(weight_VD, dtype=wide) if need_w else None
        for start in range(0, hidden_ND.shape[0], rows):
            part = slice(start, start + rows)
            h_CD = hidden_ND[part].to(dtype)
            target_C1 = labels_N[part].clamp(min=0).unsqueeze(1)
            weight_C1 = valid_N[part].to(wide).unsqueeze(1)
            logits_CV = (h_CD @ w_VD.T).to(wide)
            lse_C1 = logits_CV.logsumexp(dim=1, keepdim=True)
            # where, not a product: an ignored row must add 0 whatever its logits are
            total += torch.where(weight_C1 > 0, lse_C1 - logits_CV.gather(1, target_C1), 0.0).sum()
            if need_h or need_w:
                logits_CV.sub_(lse_C1).exp_()
                logits_CV.scatter_add_(1, target_C1, torch.full_like(weight_C1, -1.0)).mul_(weight_C1)
                d_CV = logits_CV.to(dtype)
                del logits_CV
                if dh_ND is not None:
                    dh_ND[part] = d_CV @ w_VD
                if dw_VD is not None:
                    dw_VD += d_CV.T @ h_CD
        ctx.gradients = (dh_ND, None if dw_VD is None else dw_VD.to(weight_VD.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the loss was already backpropagated: its gradients are scaled in place, once")
        dh_ND, dw_VD = ctx.gradients
        ctx.gradients = None
        scaled = [None if g is None else g.mul_(grad.to(g.dtype)) for g in (dh_ND, dw_VD)]
        return scaled[0], scaled[1], None, None, None, None


def cross_entropy_sum(
    hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk_logits: int = CHUNK_LOGITS
) -> Tensor:
    """Sum over the valid labels of -log softmax(hidden @ weight.T)[label]: a scalar, fp32 (fp64 for fp64
    inputs).

    The products run in the autocast dtype where autocast is on, as a Linear's would, else in the hidden
    states' dtype; softmax and sum are fp32. With no valid label the value is 0 and so are the gradients. The
    gradients are made for one backward; a second raises RuntimeError.
    """
    kind = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_ND.dtype
    rows = max(1, chunk_logits // weight_VD.shape[0])
    with torch.autocast(kind, enabled=False):
        return _ChunkedCrossEntropy.apply(
            hidden_ND, weight_VD, labels_N, dtype, rows, torch.is_grad_enabled()
        )


class HeadLoss(nn.Module):
    """cross_entropy_sum with the language model's head, which it does not own.

    Under ZeRO-3 the engine registers `head.weight` as an external parameter of this module, so that DeepSpeed
    gathers it around this call; with tied embeddings it is the embedding's weight.
    """

    def forward(self, hidden_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor | None) -> Tensor:
        """Sum of the cross-entropies of hidden states [B, T, D] under the head [V, D]; without labels the
        last position's logits [B, V]."""
        if labels_BT is None:
            return hidden_BTD[:, -1].float() @ weight_VD.float().T
        with span("head"):
            return cross_entropy_sum(hidden_BTD.flatten(0, 1), weight_VD, labels_BT.flatten())


class TokenLoss(nn.Module):
    """A Hugging Face causal language model together with its training loss.

    `forward(input_ids, labels, document_ids)`: int [B, T] each, labels already shifted (IGNORE = no target),
    document ids counting 0, 1, 2 … inside a row and -1 for filler. Returns the summed cross-entropy (scalar).
    Further keyword arguments go to the model (for example `schedule` for WhiteMatter).
    """

    def __init__(self, lm: nn.Module) -> None:
        super().__init__()
        self.lm = lm
        self.head_loss = HeadLoss()

    def forward(
        self, input_ids: Tensor, labels: Tensor | None, document_ids: Tensor, **model_arguments: Any
    ) -> Tensor:
        """Sum of the cross-entropies over all valid labels; arguments [B, T]. Without labels: the logits
        behind each row's last position, [B, V]."""
        hidden_BTD = self.hidden(input_ids, document_ids, **model_arguments)
        return self.head_loss(hidden_BTD, self.lm.get_output_embeddings().weight, labels)

    def hidden(self, input_ids: Tensor, document_ids: Tensor, **model_arguments: Any) -> Tensor:
        """Final hidden states [B, T, D]."""
        if family_of(self.lm.config).takes_documents:
            return self.lm.model(
                input_ids=input_ids, document_ids=document_ids, **model_arguments
            ).last_hidden_state
        return self.lm.model(
            input_ids=input_ids,
            attention_mask=document_mask(document_ids, self.lm.dtype),
            position_ids=document_positions(document_ids),
            use_cache=False,
            **model_arguments,
        ).last_hidden_state


def document_mask(document_ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Additive causal mask [B, 1, T, T] that keeps attention inside a document; filler sees filler, never
    text."""
    T = document_ids_BT.shape[1]
    same_BTT = document_ids_BT[:, :, None] == document_ids_BT[:, None, :]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=document_ids_BT.device).tril()
    mask = torch.zeros(same_BTT.shape, dtype=dtype, device=document_ids_BT.device)
    return mask.masked_fill_(~(same_BTT & causal_TT), torch.finfo(dtype).min)[:, None]
