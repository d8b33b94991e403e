"""Exact left-to-right evaluation against the formulas, token by token, in float64."""

import pytest
import torch

from tests.support import reference
from tests.support.tiny import batch, build, hidden, parameters, settings, tokens
from wm_ds.model import Schedule

# k = 1, 1 < k < L dividing L, not dividing L (also at an odd depth), k = L; every router stride, and one
# that reads a single layer.
SHAPES = [(1, 1, 4), (1, 2, 4), (2, 3, 4), (3, 1, 4), (3, 2, 5), (4, 2, 4), (4, 3, 4), (5, 1, 5), (2, 7, 3)]


@pytest.mark.parametrize(("k", "p", "layers"), SHAPES)
def test_exact_evaluation_equals_the_formulas(k: int, p: int, layers: int) -> None:
    lm = build(k, p, layers, seed=k + 10 * p).eval()
    input_ids, document_ids = batch("one", "several", "filler", seed=p)
    with torch.no_grad():
        got = hidden(lm, input_ids, document_ids, Schedule.exact())
    assert got.dtype == torch.float64
    for row in range(3):
        want = reference.exact(
            parameters(lm), settings(lm), input_ids[row].tolist(), document_ids[row].tolist()
        )
        assert (got[row] - want).abs().max() < 1e-10, f"row {row}"


def test_logits_of_the_causal_model_equal_the_formulas() -> None:
    lm = build().eval()
    input_ids, document_ids = batch("several", "one")
    with torch.no_grad():
        got = lm(input_ids, document_ids=document_ids, schedule=Schedule.exact(), use_cache=False).logits
    for row in range(2):
        p = parameters(lm)
        want = reference.logits(
            p, reference.exact(p, settings(lm), input_ids[row].tolist(), document_ids[row].tolist())
        )
        assert (got[row] - want).abs().max() < 1e-10


def test_no_document_ids_means_one_document_a_row() -> None:
    lm = build().eval()
    input_ids = tokens(2, 7)
    with torch.no_grad():
        got = lm.model(input_ids=input_ids, schedule=Schedule.exact()).last_hidden_state
    for row in range(2):
        want = reference.exact(parameters(lm), settings(lm), input_ids[row].tolist(), [0] * 7)
        assert (got[row] - want).abs().max() < 1e-10


def test_tied_head() -> None:
    lm = build(tie_word_embeddings=True).eval()
    input_ids = tokens(1, 6)
    with torch.no_grad():
        got = lm(input_ids, schedule=Schedule.exact(), use_cache=False).logits[0]
    p = parameters(lm)
    assert "lm_head.weight" not in p
    want = reference.logits(p, reference.exact(p, settings(lm), input_ids[0].tolist(), [0] * 6))
    assert (got - want).abs().max() < 1e-10


@pytest.mark.parametrize("length", [1, 2])
def test_shortest_rows(length: int) -> None:
    lm = build().eval()
    input_ids = tokens(1, length)
    for schedule in (Schedule.exact(), Schedule.cyclic(3, 2), Schedule.jacobi(2)):
        with torch.no_grad():
            got = lm.model(input_ids=input_ids, schedule=schedule).last_hidden_state[0]
        want = reference.exact(parameters(lm), settings(lm), input_ids[0].tolist(), [0] * length)
        assert (got - want).abs().max() < 1e-10
