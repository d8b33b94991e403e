"""Ablations, related designs and the LCKV baseline against the formulas, in float64."""

import pytest
import torch

from tests.model.test_gradients import POLICIES, assert_equal_gradients, fast, labels_for
from tests.support import reference
from tests.support.tiny import VOCABULARY, batch, build, hidden, parameters, scramble, settings, tokens
from wm_ds.model import LCKVConfig, LCKVForCausalLM, Schedule

LENGTH = 13
NAMES = ("one", "several", "filler")


def compare(lm: torch.nn.Module, schedule: Schedule | None, evaluate, names: tuple = NAMES) -> None:
    """Real positions equal `evaluate(parameters, tokens, documents)`, the others are finite."""
    input_ids, document_ids = batch(*names)
    with torch.no_grad():
        got = hidden(lm.eval(), input_ids, document_ids, schedule)
        p = parameters(lm)
        for row in range(len(names)):
            want = evaluate(p, input_ids[row].tolist(), document_ids[row].tolist())
            real = document_ids[row] >= 0
            assert torch.isfinite(got[row]).all()
            assert (got[row] - want)[real].abs().max() < 1e-10, names[row]


def compare_gradients(lm: torch.nn.Module, schedule: Schedule, evaluate, policy: str) -> None:
    names = ("several", "filler")
    input_ids, document_ids = batch(*names)
    labels = labels_for(input_ids, document_ids)
    p = parameters(lm, requires_grad=True)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(names)):
        h = evaluate(p, input_ids[row].tolist(), document_ids[row].tolist())
        total = total + reference.cross_entropy(p, h, labels[row].tolist())
    total.backward()
    loss, got = fast(lm, schedule, names, policy)
    assert abs(loss - total.item()) < 1e-9
    assert_equal_gradients(got, {name: weight.grad for name, weight in p.items()})


# ------------------------------------------------------------------------------------------------- routing

ROUTINGS = {
    "static": ({"routing": "static", "k": 3}, {"router": "static"}),
    "static, one channel": ({"routing": "static", "k": 1}, {"router": "static"}),
    "softmax": ({"routing": "softmax", "k": 2}, {"router": "softmax"}),
    "Feedback Transformer": ({"routing": "softmax", "k": 1}, {"router": "softmax"}),
    "Recurrent Transformer": (
        {"routing": "fixed", "k": 4, "router_init": "shifted"},
        {
            "router": "fixed",
            "pattern": ((0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 1)),
        },
    ),
    "top state": (
        {"routing": "fixed", "k": 1, "router_init": "top"},
        {"router": "fixed", "pattern": ((0, 0, 0, 1),)},
    ),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("schedule", [Schedule.exact(), Schedule.cyclic(3, 2)], ids=["exact", "cyclic"])
def test_routing(name: str, schedule: Schedule) -> None:
    fields, changes = ROUTINGS[name]
    lm = build(**fields)
    s = settings(lm, **changes)
    steps = reference.one_by_one(LENGTH) if schedule.kind == "exact" else reference.cyclic(LENGTH, 3, 2)
    compare(lm, schedule, lambda p, ids, documents: reference.passes(p, s, ids, documents, steps).hidden_TD)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["static", "Feedback Transformer", "Recurrent Transformer"])
def test_gradients_of_routing(name: str, policy: str) -> None:
    fields, changes = ROUTINGS[name]
    lm = build(**fields)
    s = settings(lm, **changes)
    steps = reference.cyclic(LENGTH, 4, 2)

    def evaluate(p: dict, ids: list, documents: list) -> torch.Tensor:
        return reference.passes(p, s, ids, documents, steps, no_grad=1).hidden_TD

    compare_gradients(lm, Schedule.cyclic(4, 2, no_grad=1), evaluate, policy)
    if name == "Recurrent Transformer":  # the embedding is nobody's source
        assert (lm.model.pool.key.source_norm.grad[0] == 0).all()


def test_static_routing_has_no_router_matrix() -> None:
    names = {name for name, _ in build(routing="static").named_parameters()}
    assert "model.pool.key.router_bias" in names
    assert not any("router_weight" in name for name in names)
    names = {name for name, _ in build(4, routing="fixed", router_init="shifted").named_parameters()}
    assert not any("router" in name for name in names)


# ---------------------------------------------------------------------------------------------- no feedback


@pytest.mark.parametrize("routing", ["dynamic", "static", "softmax"])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_no_feedback(routing: str, p: int) -> None:
    lm = build(4, p, 4, feedback=False, routing=routing)
    s = settings(lm, router=routing)
    compare(lm, None, lambda q, ids, documents: reference.no_feedback(q, s, ids, documents))


@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_without_feedback(policy: str) -> None:
    """Router weights of sources above a channel's own layer have no gradient; the rest equals autograd."""
    lm = build(3, 2, 3, feedback=False)
    s = settings(lm)
    compare_gradients(lm, None, lambda p, ids, documents: reference.no_feedback(p, s, ids, documents), policy)


def test_without_feedback_there_is_no_dummy_and_one_pass_is_exact() -> None:
    lm = build(4, 2, 4, feedback=False).eval()
    assert not any("dummy" in name for name, _ in lm.named_parameters())
    input_ids, document_ids = batch("several")
    with torch.no_grad():
        one = hidden(lm, input_ids, document_ids, None)
        many = hidden(lm, input_ids, document_ids, Schedule.cyclic(3, 4))
    assert (one - many).abs().max() < 1e-12


# ----------------------------------------------------------------------------------------------------- LCKV


def sandwich(w: int, layers: int, **fields: object) -> LCKVForCausalLM:
    sizes: dict = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "eos_token_id": 0,
        "warmup_layers": w,
    }
    torch.manual_seed(0)
    lm = LCKVForCausalLM(LCKVConfig(**(sizes | fields))).double()
    scramble(lm)
    return lm


# warm-up layers, layers, condensed layers by hand
SANDWICHES = [
    (2, 4, range(1, 3)),
    (3, 5, range(1, 3)),
    (0, 2, range(2)),
    (1, 3, range(2)),
    (4, 7, range(2, 5)),
]


@pytest.mark.parametrize(("w", "layers", "condensed"), SANDWICHES)
@pytest.mark.parametrize("passes", [1, 3])
def test_lckv_passes(w: int, layers: int, condensed: range, passes: int) -> None:
    lm = sandwich(w, layers)
    s = settings(lm)
    steps = reference.cyclic(LENGTH, 1, passes)
    compare(
        lm,
        Schedule.jacobi(passes),
        lambda p, ids, documents: reference.lckv(p, s, ids, documents, condensed, steps),
    )


@pytest.mark.parametrize(("w", "layers", "condensed"), SANDWICHES)
def test_lckv_exact(w: int, layers: int, condensed: range) -> None:
    lm = sandwich(w, layers)
    s = settings(lm)
    steps = reference.one_by_one(LENGTH)
    compare(
        lm,
        Schedule.exact(),
        lambda p, ids, documents: reference.lckv(p, s, ids, documents, condensed, steps),
    )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("w", "layers", "condensed"), [(3, 5, range(1, 3)), (2, 5, range(1, 4))])
def test_lckv_gradients(w: int, layers: int, condensed: range, policy: str) -> None:
    """Detached Jacobi passes, then two with gradient, as the baseline is trained."""
    lm = sandwich(w, layers)
    s = settings(lm)
    steps = reference.cyclic(LENGTH, 1, 4)
    compare_gradients(
        lm,
        Schedule.jacobi(4, no_grad=2),
        lambda p, ids, documents: reference.lckv(p, s, ids, documents, condensed, steps, no_grad=2),
        policy,
    )


@pytest.mark.parametrize("w", [2, 3, 0])
def test_lckv_decoding_equals_its_converged_passes(w: int) -> None:
    """Token by token through the cache, from the second token on or from the first; none is dropped."""
    lm = sandwich(w, 5).eval()
    ids = tokens(2, 9)
    with torch.no_grad():
        want = lm(ids, schedule=Schedule.jacobi(9), use_cache=False).logits
        exact = lm(ids, schedule=Schedule.exact(), use_cache=False).logits
        assert (want - exact).abs().max() < 1e-10
        for first in (1, 4):
            out = lm(ids[:, :first], schedule=Schedule.exact(), use_cache=True)
            logits = [out.logits]
            for i in range(first, 9):
                out = lm(ids[:, i : i + 1], past_key_values=out.past_key_values, use_cache=True)
                logits.append(out.logits)
            assert (torch.cat(logits, dim=1) - want).abs().max() < 1e-10
            assert out.past_key_values.get_seq_length() == 9


@pytest.mark.parametrize(("w", "want"), [(4, 48_679_392), (7, 49_564_416)])
def test_lckv_parameter_count(w: int, want: int) -> None:
    with torch.device("meta"):
        lm = LCKVForCausalLM(LCKVConfig(vocab_size=151_936, warmup_layers=w))
    outside = ("embed_tokens", "lm_head")
    assert sum(x.numel() for n, x in lm.named_parameters() if not any(o in n for o in outside)) == want


def test_lckv_sandwich_splits_as_the_paper_does() -> None:
    """w = 4: two and two; w = 7: three at the bottom, four at the top."""
    assert LCKVConfig(warmup_layers=4).condensed == range(2, 14)
    assert LCKVConfig(warmup_layers=7).condensed == range(3, 12)
