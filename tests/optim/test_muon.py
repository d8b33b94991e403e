"""Muon's and AdamW's updates against torch's, weight decay, skipped steps."""

from __future__ import annotations

import pytest
import torch

from tests.support.optimizers import optimizer, whitematter
from wm_ds.optim.muon import orthogonalize
from wm_ds.optim.param_rules import muon_scale


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (31, 31), (3, 16, 24)])
def test_orthogonalized_singular_values_are_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    values = torch.linalg.svdvals(orthogonalize(matrix, dtype=torch.float32))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_a_stack_is_orthogonalized_matrix_by_matrix():
    stack = torch.randn(3, 16, 24, generator=torch.Generator().manual_seed(1))
    alone = torch.stack([orthogonalize(m, dtype=torch.float32) for m in stack])
    torch.testing.assert_close(orthogonalize(stack, dtype=torch.float32), alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(24, 40), (40, 24)])
@pytest.mark.parametrize(("scale", "name"), [("rms", "match_rms_adamw"), ("spectral", "original")])
def test_one_update_equals_torchs_muon(shape, scale, name):
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(shape, generator=generator) for _ in range(2))
    theirs = torch.nn.Parameter(start.clone())
    reference = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, momentum=0.95, adjust_lr_fn=name)
    theirs.grad = grad.clone()
    reference.step()
    update = grad * 0.05
    update = orthogonalize(grad * 0.05 + update * 0.95, dtype=torch.bfloat16) * muon_scale(*shape, scale)
    ours = start * (1 - 0.01 * 0.1) - 0.01 * update
    # Both iterate in bf16, with their products in another order.
    assert (ours - theirs).norm() < 0.05 * (start - theirs).norm()


def test_adamw_equals_torchs():
    torch.manual_seed(0)
    lm, twin = whitematter(), whitematter()
    twin.load_state_dict(lm.state_dict())
    ours = optimizer(lm, 1e-2, optimizer="adamw")
    decayed = {r.name: r.decay for r in ours.table.values()}
    groups = [
        {"params": [p for n, p in twin.named_parameters() if decayed[n] == d], "weight_decay": d}
        for d in (0.1, 0.0)
    ]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for _ in range(3):
        for p, q in zip(lm.parameters(), twin.parameters()):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        ours.step()
        ours.count_update()
        theirs.step()
    for (name, p), q in zip(lm.named_parameters(), twin.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7, msg=name)


def test_decay_shrinks_what_is_decayed_and_nothing_else():
    torch.manual_seed(0)
    lm = whitematter()
    with torch.no_grad():
        for p in lm.parameters():
            p.add_(torch.rand_like(p))
    before = {n: p.detach().clone() for n, p in lm.named_parameters()}
    rule = optimizer(lm, 0.1)
    for p in lm.parameters():
        p.grad = torch.zeros_like(p)
    rule.step()
    for name, p in lm.named_parameters():
        if rule.table[name].decay:
            torch.testing.assert_close(p.detach(), before[name] * (1 - 0.1 * 0.1), rtol=1e-6, atol=0)
        else:
            assert torch.equal(p.detach(), before[name]), name


def test_a_skipped_step_changes_nothing():
    lm = whitematter()
    rule = optimizer(lm, 0.1)
    before = {n: p.detach().clone() for n, p in lm.named_parameters()}
    for p in lm.parameters():
        p.grad = torch.full_like(p, float("nan"))
    rule.skip = True
    rule.step()
    assert all(torch.equal(p, before[n]) for n, p in lm.named_parameters())
    assert all(t.abs().max() == 0 for state in rule.state.values() for t in state.values())
