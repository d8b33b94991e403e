"""Several documents in a row: nothing leaks, nothing is NaN, filler is nobody's business."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.support import reference
from tests.support.tiny import VOCABULARY, batch, build, hidden, parameters, settings, tokens
from wm_ds.model import Schedule

POLICIES = ["none", "layer", "group", "group+layer"]
SCHEDULES = {
    "exact": Schedule.exact(),
    "cyclic": Schedule.cyclic(3, 3, no_grad=1),
    "jacobi": Schedule.jacobi(3, no_grad=1),
}


def same_bits(one, two) -> bool:
    """Whether two evaluations, of states [n, D], agree in every bit.

    Where memory happens to lie may decide which kernel BLAS picks, hence the last bit; so up to three tries.
    What leaks through a mask differs in all of them.
    """
    return any(torch.equal(one(), two()) for _ in range(3))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_another_document_changes_no_bit(name: str, mode: str) -> None:
    lm = build(dtype=torch.float32).train(mode == "train")
    document_ids = torch.tensor([[0] * 5 + [1] * 8], dtype=torch.int32)
    before = tokens(1, 13, seed=1)
    after = before.clone()
    after[:, :5] = (after[:, :5] + 7) % VOCABULARY
    assert (before[:, :5] != after[:, :5]).all()

    def run(ids: torch.Tensor) -> torch.Tensor:
        return hidden(lm, ids, document_ids, SCHEDULES[name]).detach()[0]

    assert same_bits(lambda: run(before)[5:], lambda: run(after)[5:])
    assert (run(before)[:5] - run(after)[:5]).abs().max() > 1e-3


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_later_document_changes_no_bit(name: str) -> None:
    lm = build(dtype=torch.float32).eval()
    document_ids = torch.tensor([[0] * 5 + [1] * 8], dtype=torch.int32)
    before = tokens(1, 13, seed=1)
    after = before.clone()
    after[:, 5:] = (after[:, 5:] + 7) % VOCABULARY

    def run(ids: torch.Tensor) -> torch.Tensor:
        return hidden(lm, ids, document_ids, SCHEDULES[name]).detach()[0]

    assert same_bits(lambda: run(before)[:5], lambda: run(after)[:5])


@pytest.mark.parametrize("name", SCHEDULES)
def test_later_tokens_change_no_bit(name: str) -> None:
    """Causality inside one document."""
    lm = build(dtype=torch.float32).eval()
    before = tokens(1, 13, seed=1)
    after = before.clone()
    after[:, 6:] = (after[:, 6:] + 7) % VOCABULARY

    def run(ids: torch.Tensor) -> torch.Tensor:
        return lm.model(input_ids=ids, schedule=SCHEDULES[name]).last_hidden_state.detach()[0]

    assert same_bits(lambda: run(before)[:6], lambda: run(after)[:6])
    assert (run(before)[7:] - run(after)[7:]).abs().max() > 1e-3


@pytest.mark.parametrize("policy", POLICIES)
def test_loss_on_one_document_has_no_gradient_in_another(policy: str) -> None:
    lm = build(dtype=torch.float32).train()
    lm.model.recompute = policy
    row = torch.arange(1, 14)[None]  # every token once, so that embedding rows tell the documents apart
    document_ids = torch.tensor([[0] * 5 + [1] * 8], dtype=torch.int32)
    hidden(lm, row, document_ids, None)[:, 5:].square().sum().backward()
    gradient_VD = lm.model.embed_tokens.weight.grad
    assert (gradient_VD[1:6] == 0).all()
    assert (gradient_VD[6:14].abs().amax(dim=1) > 0).all()


def test_a_document_alone_and_packed_agree_in_exact_mode() -> None:
    lm = build().eval()
    input_ids, document_ids = batch("several")
    packed = hidden(lm, input_ids, document_ids, Schedule.exact())[0]
    for document in document_ids[0].unique().tolist():
        at = (document_ids[0] == document).nonzero()[:, 0]
        alone = lm.model(input_ids=input_ids[:, at], schedule=Schedule.exact()).last_hidden_state[0]
        assert (packed[at] - alone).abs().max() < 1e-10


def test_aligned_documents_agree_with_themselves_alone_at_every_pass_count() -> None:
    """Starts at multiples of g, filler between: packed and alone are the same numbers, converged or not."""
    lm = build().eval()
    document_ids = torch.tensor([[0] * 4 + [-1] * 2 + [1] * 6 + [2] * 1 + [-1] * 2 + [3] * 4])
    input_ids = tokens(1, document_ids.shape[1])
    for passes in (1, 2, 3):
        packed = hidden(lm, input_ids, document_ids, Schedule.cyclic(3, passes))[0]
        for document in range(4):
            at = (document_ids[0] == document).nonzero()[:, 0]
            alone = lm.model(
                input_ids=input_ids[:, at], schedule=Schedule.cyclic(3, passes)
            ).last_hidden_state[0]
            assert (packed[at] - alone).abs().max() < 1e-11, f"document {document}, {passes} passes"


def test_first_tokens_see_the_dummy_alone() -> None:
    """Documents of 1, 4, 1, 1, 5 tokens that all begin with the same token: five equal first states."""
    lm = build().eval()
    document_ids = torch.tensor([[0] + [1] * 4 + [2] + [3] + [4] * 5])
    starts = torch.tensor([0, 1, 5, 6, 7])
    input_ids = tokens(1, 12)
    input_ids[:, starts] = 3
    for schedule in (Schedule.exact(), Schedule.cyclic(3, 2), Schedule.jacobi(1)):
        first = hidden(lm, input_ids, document_ids, schedule)[0, starts]
        assert (first - first[0]).abs().max() < 1e-12


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_nan_and_the_dummy_learns(policy: str, dtype: torch.dtype) -> None:
    """Several one-token documents, and a row that is nothing but filler."""
    lm = build(dtype=dtype).train()
    lm.model.recompute = policy
    document_ids = torch.tensor([[0] + [1] * 4 + [2] + [3] + [4] * 5, [-1] * 12, [0] * 3 + [-1] * 9])
    input_ids = tokens(3, 12)
    h = hidden(lm, input_ids, document_ids, None)
    assert torch.isfinite(h).all()
    (h.float().square() * (document_ids >= 0)[:, :, None]).sum().backward()
    for name, weight in lm.model.named_parameters():
        assert torch.isfinite(weight.grad).all(), name
    assert (lm.model.dummy_key.grad != 0).any()
    assert (lm.model.dummy_value.grad != 0).any()


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=["math", "fused"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_first_tokens_are_finite_in_every_kernel(kernel: SDPBackend, mode: str) -> None:
    """Documents of 1, 4, 1, 1, 5 tokens: rows that see the dummy alone, in the kernels that CPUs have."""
    lm = build().train(mode == "train")
    document_ids = torch.tensor([[0] + [1] * 4 + [2] + [3] + [4] * 5, [-1] * 12])
    input_ids = tokens(2, 12)
    want = hidden(lm, input_ids, document_ids, None).detach()
    lm.zero_grad()
    with sdpa_kernel(kernel):
        h = hidden(lm, input_ids, document_ids, None)
        h[0].square().sum().backward()
    assert (h - want).abs().max() < 1e-10
    assert all(torch.isfinite(weight.grad).all() for weight in lm.model.parameters())
    assert (lm.model.dummy_value.grad != 0).any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_padding_masks_of_any_type(dtype: torch.dtype) -> None:
    lm = build().eval()
    input_ids = tokens(2, 9)
    mask = torch.tensor([[0] * 3 + [1] * 6, [1] * 9])
    with torch.no_grad():
        want = lm.model(input_ids=input_ids[:1, 3:]).last_hidden_state
        got = lm.model(input_ids=input_ids, attention_mask=mask.to(dtype)).last_hidden_state
    assert (got[:1, 3:] - want).abs().max() < 1e-12


def test_a_row_of_filler_only_in_eval() -> None:
    lm = build().eval()
    input_ids = tokens(2, 9)
    document_ids = torch.tensor([[-1] * 9, [0] * 9])
    for schedule in SCHEDULES.values():
        got = hidden(lm, input_ids, document_ids, schedule)
        want = reference.exact(parameters(lm), settings(lm), input_ids[0].tolist(), [-1] * 9)
        assert (got[0] - want).abs().max() < 1e-10


def test_what_the_filler_is_does_not_matter() -> None:
    lm = build(dtype=torch.float32).eval()
    input_ids, document_ids = batch("filler")
    other = input_ids.clone()
    other[document_ids < 0] = 0
    assert not torch.equal(other, input_ids)
    for schedule in SCHEDULES.values():

        def run(ids: torch.Tensor, schedule: Schedule = schedule) -> torch.Tensor:
            return hidden(lm, ids, document_ids, schedule)[document_ids >= 0]

        assert same_bits(lambda run=run: run(input_ids), lambda run=run: run(other))


def test_rotation_starts_anew_in_each_document() -> None:
    """The same document at two places of a row gives the same states."""
    lm = build().eval()
    document = tokens(1, 5)
    input_ids = torch.cat([document, tokens(1, 3, seed=9), document], dim=1)
    document_ids = torch.tensor([[0] * 5 + [1] * 3 + [2] * 5])
    h = hidden(lm, input_ids, document_ids, Schedule.exact())[0]
    assert (h[:5] - h[8:]).abs().max() < 1e-12


def test_position_in_the_document_matters() -> None:
    """Guards the test above: swapping two earlier tokens changes what a third one becomes."""
    lm = build().eval()
    ids = torch.tensor([[3, 5, 7], [5, 3, 7]])
    h = lm.model(input_ids=ids, schedule=Schedule.exact()).last_hidden_state
    assert (h[0, 2] - h[1, 2]).abs().max() > 1e-6
