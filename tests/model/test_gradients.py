"""Gradients of the fast passes, under every recomputation policy, against autograd through the formulas."""

import pytest
import torch

from tests.support import reference
from tests.support.tiny import VOCABULARY, batch, build, hidden, parameters, settings, tokens
from wm_ds.model import Schedule

POLICIES = ["none", "layer", "group", "group+layer"]


def labels_for(input_ids: torch.Tensor, document_ids: torch.Tensor) -> torch.Tensor:
    """The next token of the same document, none at a document's end and on filler, a few left out."""
    labels = torch.full_like(input_ids, -100)
    for row in range(input_ids.shape[0]):
        for i in range(input_ids.shape[1] - 1):
            if document_ids[row, i] >= 0 and document_ids[row, i] == document_ids[row, i + 1] and i % 5 != 3:
                labels[row, i] = input_ids[row, i + 1]
    return labels


def fast(
    lm: torch.nn.Module, schedule: Schedule | None, names: tuple[str, ...], policy: str
) -> tuple[float, dict]:
    input_ids, document_ids = batch(*names)
    lm.train()
    lm.zero_grad(set_to_none=True)
    lm.model.recompute = policy
    h = hidden(lm, input_ids, document_ids, schedule)
    labels = labels_for(input_ids, document_ids)
    logits = h @ lm.lm_head.weight.T
    loss = torch.nn.functional.cross_entropy(
        logits.reshape(-1, VOCABULARY), labels.reshape(-1), ignore_index=-100, reduction="sum"
    )
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in lm.named_parameters()}


def slow(lm: torch.nn.Module, steps: list, no_grad: int, names: tuple[str, ...]) -> tuple[float, dict]:
    input_ids, document_ids = batch(*names)
    labels = labels_for(input_ids, document_ids)
    p, s = parameters(lm, requires_grad=True), settings(lm)
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(len(names)):
        result = reference.passes(
            p, s, input_ids[row].tolist(), document_ids[row].tolist(), steps, no_grad=no_grad
        )
        loss = loss + reference.cross_entropy(p, result.hidden_TD, labels[row].tolist())
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in p.items()}


def assert_equal_gradients(got: dict, want: dict) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        assert got[name] is not None, f"{name} has no gradient"
        assert torch.isfinite(got[name]).all(), f"{name} has a gradient that is not finite"
        scale = expected.abs().max()
        assert scale > 0, f"{name}: the reference's gradient is zero, so this compares nothing"
        error = (got[name] - expected).abs().max() / scale
        assert error < 1e-9, f"{name}: relative error {error:.2e}"


# groups, detached passes, gradient passes, k, p, layers
CASES = [
    (3, 1, 2, 3, 2, 4),  # the usual training step
    (1, 2, 2, 4, 1, 4),  # Jacobi, k = L, two detached passes
    (4, 0, 1, 1, 3, 3),  # no detached pass: the gradient phase begins with the embeddings
    (5, 0, 2, 2, 2, 3),
    (2, 1, 1, 3, 1, 5),  # the smallest truncated step; k does not divide L
    (13, 0, 1, 2, 2, 4),  # g = T: training by exact evaluation
]


@pytest.fixture(scope="module")
def wanted() -> dict:
    """The reference's gradients, computed once for all policies."""
    return {}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_equal_plain_autograd_through_the_formulas(case: tuple, policy: str, wanted: dict) -> None:
    groups, no_grad, grad, k, p, layers = case
    lm = build(k, p, layers, seed=groups)
    names = ("several", "filler")
    if case not in wanted:
        wanted[case] = slow(lm, reference.cyclic(13, groups, no_grad + grad), no_grad, names)
    want_loss, want = wanted[case]
    loss, got = fast(lm, Schedule.cyclic(groups, no_grad + grad, no_grad=no_grad), names, policy)
    assert abs(loss - want_loss) < 1e-9
    assert_equal_gradients(got, want)


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_with_a_tied_head(policy: str) -> None:
    lm = build(2, 2, 3, tie_word_embeddings=True)
    assert "lm_head.weight" not in parameters(lm)
    _, want = slow(lm, reference.cyclic(13, 4, 2), 1, ("one",))
    _, got = fast(lm, Schedule.cyclic(4, 2, no_grad=1), ("one",), policy)
    assert_equal_gradients(got, want)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_training_default_is_the_configured_schedule(policy: str) -> None:
    lm = build(3, 2, 4, num_groups=3, no_grad_passes=1, grad_passes=2)
    _, want = fast(lm, Schedule.cyclic(3, 3, no_grad=1), ("several",), "none")
    _, got = fast(lm, None, ("several",), policy)
    assert_equal_gradients(got, want)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("no_grad", [0, 1, 2])
def test_entries_that_wait_on_the_host_give_the_same_gradients(policy: str, no_grad: int) -> None:
    lm = build(3, 2, 4)
    schedule = Schedule.cyclic(3, 3, no_grad=no_grad)
    _, want = fast(lm, schedule, ("several", "filler"), policy)
    lm.model.entries_on_host = True
    copies = []
    pack = torch.autograd.graph.save_on_cpu.__init__

    def counting(self: object, *args: object, **kwargs: object) -> None:
        copies.append(1)
        pack(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.graph.save_on_cpu, "__init__", counting)
        _, got = fast(lm, schedule, ("several", "filler"), policy)
    assert copies, "nothing went to the host"
    assert_equal_gradients(got, want)


def test_truncation_is_not_the_full_gradient() -> None:
    """The detached passes really are detached: with gradient through all passes the numbers differ."""
    lm = build(3, 2, 4)
    _, truncated = fast(lm, Schedule.cyclic(3, 3, no_grad=1), ("one",), "none")
    _, whole = fast(lm, Schedule.cyclic(3, 3, no_grad=0), ("one",), "none")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (truncated[name] - whole[name]).abs().max() > 1e-6


def test_policies_agree_in_the_forward_pass() -> None:
    """To a rounding: BLAS may pick another kernel where memory happens to lie differently."""
    lm = build(3, 2, 4).train()
    input_ids, document_ids = batch("several", "filler")
    outputs = []
    for policy in POLICIES:
        lm.model.recompute = policy
        outputs.append(hidden(lm, input_ids, document_ids, None).detach())
    for policy, output in zip(POLICIES, outputs, strict=True):
        assert (output - outputs[0]).abs().max() < 1e-12, policy


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_accumulate_over_micro_batches(policy: str) -> None:
    """Two backward passes without zeroing add up: nothing of the first survives in a buffer."""
    lm = build(3, 2, 4).train()
    lm.model.recompute = policy
    single = []
    for seed in (1, 2):
        lm.zero_grad(set_to_none=True)
        lm.model(input_ids=tokens(1, 11, seed=seed)).last_hidden_state.square().sum().backward()
        single.append({name: weight.grad.clone() for name, weight in lm.model.named_parameters()})
    lm.zero_grad(set_to_none=True)
    for seed in (1, 2):
        lm.model(input_ids=tokens(1, 11, seed=seed)).last_hidden_state.square().sum().backward()
    for name, weight in lm.model.named_parameters():
        want = single[0][name] + single[1][name]
        assert torch.allclose(weight.grad, want, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("policy", POLICIES)
def test_two_forward_passes_before_their_backward_passes(policy: str) -> None:
    lm = build(3, 2, 4).train()
    lm.model.recompute = policy
    lm.zero_grad(set_to_none=True)
    losses = [
        lm.model(input_ids=tokens(1, 11, seed=seed)).last_hidden_state.square().sum() for seed in (1, 2)
    ]
    (losses[0] + losses[1]).backward()
    got = {name: weight.grad.clone() for name, weight in lm.model.named_parameters()}
    lm.zero_grad(set_to_none=True)
    for seed in (1, 2):
        lm.model(input_ids=tokens(1, 11, seed=seed)).last_hidden_state.square().sum().backward()
    for name, weight in lm.model.named_parameters():
        assert torch.allclose(got[name], weight.grad, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("policy", POLICIES)
def test_fp32_gradients(policy: str) -> None:
    """In the precision that training uses, the same gradients to rounding."""
    lm = build(3, 2, 4)
    _, want = fast(lm, Schedule.cyclic(3, 3, no_grad=1), ("several", "filler"), "none")
    lm32 = build(3, 2, 4, dtype=torch.float32)
    _, got = fast(lm32, Schedule.cyclic(3, 3, no_grad=1), ("several", "filler"), policy)
    for name, expected in want.items():
        error = (got[name].double() - expected).abs().max() / expected.abs().max()
        assert error < 2e-4, f"{name}: relative error {error:.2e}"


@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_parameters_receive_none(policy: str) -> None:
    """Frozen embeddings (the passes start from inputs without gradient) change nobody else's gradient."""
    lm = build(3, 2, 4)
    _, want = fast(lm, Schedule.cyclic(3, 3, no_grad=1), ("one",), "none")
    lm.model.embed_tokens.weight.requires_grad_(False)
    _, got = fast(lm, Schedule.cyclic(3, 3, no_grad=1), ("one",), policy)
    assert got.pop("model.embed_tokens.weight") is None
    want.pop("model.embed_tokens.weight")
    assert_equal_gradients(got, want)
