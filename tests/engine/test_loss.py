"""The chunked cross-entropy against torch's, and what it must not hold."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from wm_ds.engine.loss import IGNORE, cross_entropy_sum, document_mask
from wm_ds.model.layout import document_positions


def inputs(dtype: torch.dtype, rows: int = 101, width: int = 24, vocabulary: int = 57) -> tuple:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = (
        torch.randn(vocabulary, width, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    )
    labels = torch.randint(0, vocabulary, (rows,), generator=generator)
    labels[::5] = IGNORE
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [57, 57 * 7, 1 << 20])  # one row, seven rows, all rows at a time
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)])
def test_equals_the_two_step_form(dtype, tolerance, chunk):
    hidden, weight, labels = inputs(dtype)
    loss = cross_entropy_sum(hidden, weight, labels, chunk)
    (loss / 81).backward()
    h, w = (x.detach().double().requires_grad_() for x in (hidden, weight))
    expected = cross_entropy(h @ w.T, labels, ignore_index=IGNORE, reduction="sum")
    (expected / 81).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=tolerance)
    for found, wanted in ((hidden.grad, h.grad), (weight.grad, w.grad)):
        assert (found - wanted).norm() < tolerance * wanted.norm()


def test_the_sum_of_bf16_inputs_is_not_rounded_to_bf16():
    hidden, weight, labels = inputs(torch.bfloat16)
    loss = cross_entropy_sum(hidden, weight, labels)
    expected = cross_entropy(
        hidden.double() @ weight.double().T, labels, ignore_index=IGNORE, reduction="sum"
    )
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
    loss.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_autocast_computes_in_bf16_and_keeps_fp32_gradients():
    hidden, weight, labels = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = cross_entropy_sum(hidden, weight, labels)
    loss.backward()
    exact = inputs(torch.float32)
    full = cross_entropy_sum(*exact)
    assert loss.item() != full.item()
    assert loss.item() == pytest.approx(full.item(), rel=5e-3)
    assert weight.grad.dtype == torch.float32


def test_no_valid_label_gives_zero_and_no_gradient():
    hidden, weight, labels = inputs(torch.float32)
    loss = cross_entropy_sum(hidden, weight, torch.full_like(labels, IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.abs().max() == 0
    assert weight.grad.abs().max() == 0


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_what_needs_a_gradient_gets_one(frozen):
    hidden, weight, labels = inputs(torch.float32)
    fixed = hidden if frozen == "hidden" else weight
    fixed.requires_grad_(False)
    cross_entropy_sum(hidden, weight, labels).backward()
    assert fixed.grad is None
    assert (weight if frozen == "hidden" else hidden).grad is not None


def test_a_second_backward_says_why_it_fails():
    hidden, weight, labels = inputs(torch.float32)
    loss = cross_entropy_sum(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already backpropagated"):
        loss.backward()


def test_logits_never_exist_at_once():
    """The largest storage made in forward and backward stays far below rows x vocabulary."""
    from wm_ds.plan.storage_tracker import StorageTracker

    hidden, weight, labels = inputs(torch.float32, rows=4096, width=16, vocabulary=512)
    with StorageTracker() as tracker:
        cross_entropy_sum(hidden, weight, labels, chunk_logits=512 * 64).backward()
    assert tracker.peak < 4096 * 512 * 4 / 4


def test_positions_restart_and_attention_stays_inside_documents():
    documents = torch.tensor([[0, 0, 1, 2, 2, 2, -1, -1]], dtype=torch.int32)
    assert document_positions(documents).tolist() == [[0, 1, 0, 0, 1, 2, 0, 1]]
    seen = document_mask(documents, torch.float32)[0, 0] == 0
    for query in range(8):
        for key in range(8):
            assert seen[query, key] == (key <= query and documents[0, key] == documents[0, query])
