"""The layerwise start against the sweep done token by token, in float64: values, gradients, cache, errors."""

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

from tests.model.test_gradients import POLICIES, assert_equal_gradients, fast, labels_for
from tests.model.test_variants import ROUTINGS
from tests.support import reference
from tests.support.tiny import batch, build, hidden, parameters, settings, tokens
from wm_ds.model import Converged, LCKVConfig, Schedule, Start, WhiteMatterConfig
from wm_ds.model.cache import CACHE_FIELD

LENGTH = 13
NAMES = ("several", "filler", "one")
NEWEST, EMBEDDING = Start("layerwise"), Start("layerwise", "embedding")
GRADED = Start("layerwise", grad=True)


def theirs(start: Start) -> reference.Start:
    return reference.Start(start.missing, start.grad)


def oracle(lm, steps: list, start: Start, names: tuple, s=None) -> list[reference.Result]:
    input_ids, document_ids = batch(*names)
    p, s = parameters(lm), s or settings(lm)
    return [
        reference.passes(p, s, ids.tolist(), documents.tolist(), steps, start=theirs(start))
        for ids, documents in zip(input_ids, document_ids, strict=True)
    ]


def compare(lm, schedule: Schedule, steps: list, names: tuple = NAMES, s=None) -> None:
    with torch.no_grad():
        got = hidden(lm.eval(), *batch(*names), schedule)
    for row, want in enumerate(oracle(lm, steps, schedule.start, names, s)):
        assert (got[row] - want.hidden_TD).abs().max() < 1e-10, names[row]


# ------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("start", [NEWEST, EMBEDDING], ids=lambda start: start.missing)
@pytest.mark.parametrize(("k", "p", "layers"), [(1, 2, 4), (2, 3, 4), (3, 1, 5), (4, 2, 4)])
def test_one_pass_behind_the_sweep(k: int, p: int, layers: int, start: Start) -> None:
    """Channels below L, all of them, one; routers that read every layer, and few; Jacobi shows the start."""
    lm = build(k, p, layers)
    compare(lm, Schedule.jacobi(1, start=start), reference.cyclic(LENGTH, 1, 1))


SCHEDULES = {
    "cyclic": (Schedule.cyclic(3, 2, start=NEWEST), reference.cyclic(LENGTH, 3, 2)),
    "chunked": (Schedule.chunked(5, 2, 2, start=EMBEDDING), reference.chunked(LENGTH, 5, 2, 2)),
    "wavefront": (Schedule.wavefront(6, 3, 2, start=NEWEST), reference.wavefront(LENGTH, 6, 3, 2)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_begins_there(name: str) -> None:
    schedule, steps = SCHEDULES[name]
    compare(build(3, 2, 4), schedule, steps)


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_routing(name: str) -> None:
    fields, changes = ROUTINGS[name]
    lm = build(**fields)
    s = settings(lm, **changes)
    compare(lm, Schedule.jacobi(1, start=NEWEST), reference.cyclic(LENGTH, 1, 1), ("several",), s)


def test_the_start_matters_until_it_is_forgotten() -> None:
    """Three starts, three results; after enough passes one."""
    lm = build(3, 2, 4).eval()
    starts = (Start(), NEWEST, EMBEDDING)
    with torch.no_grad():
        once = [hidden(lm, *batch("one"), Schedule.jacobi(1, start=start)) for start in starts]
        often = [hidden(lm, *batch("one"), Schedule.jacobi(LENGTH, start=start)) for start in starts]
    for other in (1, 2):
        assert (once[0] - once[other]).abs().max() > 1e-3
        assert (often[0] - often[other]).abs().max() < 1e-10
    assert (once[1] - once[2]).abs().max() > 1e-3


def test_documents_padding_and_neighbours_change_nothing() -> None:
    """The sweep has no groups, so a document's phase is the schedule's alone."""
    lm = build(3, 2, 4, start="layerwise", prefill_groups=2, prefill_passes=1).eval()
    documents = torch.tensor([[0] * 4 + [1] * 6 + [2] * 3])
    row = tokens(1, LENGTH)
    with torch.no_grad():
        packed = lm(row, document_ids=documents).logits
        for first, stop in ((0, 4), (4, 10), (10, 13)):
            alone = lm(row[:, first:stop]).logits
            assert (packed[:, first:stop] - alone).abs().max() < 1e-10
        padded = torch.cat((torch.zeros(1, 3, dtype=torch.long), row[:, :4]), 1)
        left = lm(padded, attention_mask=torch.tensor([[0] * 3 + [1] * 4])).logits[:, 3:]
    assert (left - packed[:, :4]).abs().max() < 1e-10


@pytest.mark.parametrize("start", [NEWEST, EMBEDDING], ids=lambda start: start.missing)
def test_the_cache_and_what_continues_it(start: Start) -> None:
    """Entry by entry, then a second part whose sweep reads the cached tokens."""
    lm = build(3, 2, 4).eval()
    row, schedule, steps = tokens(1, LENGTH), Schedule.jacobi(1, start=start), reference.cyclic
    p, s = parameters(lm), settings(lm)
    with torch.no_grad():
        first = lm(row[:, :8], schedule=schedule, use_cache=True)
        cache = getattr(first, CACHE_FIELD)
        want = reference.passes(p, s, row[0, :8].tolist(), [0] * 8, steps(8, 1, 1), start=theirs(start))
        for j in range(3):
            assert (cache.layers[j].keys[0].transpose(0, 1) - want.keys_TkHd[:, j]).abs().max() < 1e-10
            assert (cache.layers[j].values[0].transpose(0, 1) - want.values_TkHd[:, j]).abs().max() < 1e-10
        second = lm.model(row[:, 8:], schedule=schedule, use_cache=True, **{CACHE_FIELD: cache})
    entries = [
        ([[*heads] for heads in keys], [[*heads] for heads in values])
        for keys, values in zip(want.keys_TkHd, want.values_TkHd, strict=True)
    ]
    later = [[(i, 0) for i in range(8, LENGTH)]]
    hidden_TD, _ = reference.continue_document(p, s, entries, row[0, 8:].tolist(), later, theirs(start))
    assert (second.last_hidden_state[0] - hidden_TD).abs().max() < 1e-10


# ---------------------------------------------------------------------------------------------- gradients

TRAINING = {
    "detached sweep, no detached pass": (
        Schedule.cyclic(3, 1, start=NEWEST),
        reference.cyclic(LENGTH, 3, 1),
    ),
    "detached sweep, two passes": (Schedule.cyclic(4, 2, start=EMBEDDING), reference.cyclic(LENGTH, 4, 2)),
    "a detached pass between": (
        Schedule.cyclic(3, 2, no_grad=1, start=NEWEST),
        reference.cyclic(LENGTH, 3, 2),
    ),
    "two detached passes": (
        Schedule.cyclic(3, 3, no_grad=2, start=NEWEST),
        reference.cyclic(LENGTH, 3, 3),
    ),
    "gradient through the sweep": (Schedule.cyclic(3, 1, start=GRADED), reference.cyclic(LENGTH, 3, 1)),
    "gradient through the sweep, Jacobi": (
        Schedule.jacobi(2, start=Start("layerwise", "embedding", True)),
        reference.cyclic(LENGTH, 1, 2),
    ),
    "wavefront": (Schedule.wavefront(5, 2, 2, start=NEWEST), reference.wavefront(LENGTH, 5, 2, 2)),
    "relaxed": (Schedule.cyclic(3, 2, relaxation=0.8, start=NEWEST), reference.cyclic(LENGTH, 3, 2)),
}


@pytest.fixture(scope="module")
def wanted() -> dict:
    """The reference's gradients, computed once for all policies."""
    return {}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", TRAINING)
def test_gradients_equal_plain_autograd_through_the_formulas(name: str, policy: str, wanted: dict) -> None:
    schedule, steps = TRAINING[name]
    lm = build(2, 2, 3, seed=3)
    names = ("several", "filler")
    if name not in wanted:
        wanted[name] = slow(lm, schedule, steps, names)
    want_loss, want = wanted[name]
    loss, got = fast(lm, schedule, names, policy)
    assert abs(loss - want_loss) < 1e-9
    assert_equal_gradients(got, want)


def slow(lm, schedule: Schedule, steps: list, names: tuple) -> tuple[float, dict]:
    input_ids, document_ids = batch(*names)
    labels = labels_for(input_ids, document_ids)
    p, s = parameters(lm, requires_grad=True), settings(lm)
    factors = {number: schedule.factor(number) for number in range(schedule.passes)}
    loss = torch.zeros((), dtype=torch.float64)
    for row in range(len(names)):
        result = reference.passes(
            p,
            s,
            input_ids[row].tolist(),
            document_ids[row].tolist(),
            steps,
            schedule.no_grad,
            factors,
            theirs(schedule.start),
        )
        loss = loss + reference.cross_entropy(p, result.hidden_TD, labels[row].tolist())
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in p.items()}


def test_gradient_flows_through_the_sweep_only_where_it_is_told_to() -> None:
    lm = build(2, 2, 3)
    _, without = fast(lm, Schedule.cyclic(3, 1, start=NEWEST), ("one",), "none")
    _, through = fast(lm, Schedule.cyclic(3, 1, start=GRADED), ("one",), "none")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (without[name] - through[name]).abs().max() > 1e-6


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("start", [NEWEST, GRADED], ids=["detached", "graded"])
def test_long_rows_are_pooled_in_pieces(start: Start, policy: str, wanted: dict) -> None:
    """70 positions: the sweep's pool is cut into two pieces, its attention into two runs of queries."""
    lm = build(2, 2, 2).train()
    lm.model.recompute = policy
    input_ids = tokens(1, 70)
    document_ids = torch.tensor([[0] * 3 + [1] + [2] * 46 + [3] * 15 + [-1] * 5])
    h = hidden(lm, input_ids, document_ids, Schedule.cyclic(2, 1, start=start))
    h[:, 40:].square().sum().backward()
    if start not in wanted:
        p = parameters(lm, requires_grad=True)
        ids, documents = input_ids[0].tolist(), document_ids[0].tolist()
        steps = reference.cyclic(70, 2, 1)
        result = reference.passes(p, settings(lm), ids, documents, steps, start=theirs(start))
        result.hidden_TD[40:].square().sum().backward()
        names = [name for name, _ in lm.named_parameters() if "lm_head" not in name]
        wanted[start] = result.hidden_TD.detach(), {name: p[name].grad for name in names}
    want_hidden, want = wanted[start]
    assert (h[0] - want_hidden).abs().max() < 1e-10
    got = {name: weight.grad for name, weight in lm.named_parameters() if "lm_head" not in name}
    assert_equal_gradients(got, want)


@pytest.mark.parametrize("start", [NEWEST, GRADED], ids=["detached", "graded"])
def test_flex_attention(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)
    names, schedule = ("several", "filler"), Schedule.cyclic(2, 1, start=start)
    want_loss, want = fast(build(2, 2, 3), schedule, names, "none")
    loss, got = fast(build(2, 2, 3, attention="flex"), schedule, names, "group+layer")
    assert loss == pytest.approx(want_loss, abs=1e-9)
    assert_equal_gradients(got, want)


def test_gradient_through_a_cache_reaches_its_tokens() -> None:
    """The sweep's layers read the cached entries: two parts have the gradients of finite differences."""
    lm = build(2, 2, 3, start="layerwise", start_grad=True, no_grad_passes=0, grad_passes=1).train()
    row = tokens(1, 9)
    prefix = [torch.randn(2, 1, 2, 3, 8, dtype=torch.float64) for _ in range(2)]

    def loss(entries: list[torch.Tensor]) -> torch.Tensor:
        cache = type(getattr(lm(row[:, :1], use_cache=True), CACHE_FIELD))()
        for channel in range(2):
            cache.update(entries[channel][0], entries[channel][1], channel)
        return lm(row, **{CACHE_FIELD: cache}).logits.square().mean()

    leaves = [x.clone().requires_grad_() for x in prefix]
    loss(leaves).backward()
    direction = [torch.randn_like(x) for x in prefix]
    with torch.no_grad():
        ends = [
            loss([x + step * d for x, d in zip(prefix, direction, strict=True)]) for step in (1e-5, -1e-5)
        ]
    want = (ends[0] - ends[1]).item() / 2e-5
    got = sum((leaf.grad * d).sum().item() for leaf, d in zip(leaves, direction, strict=True))
    assert got == pytest.approx(want, rel=1e-6)


# ------------------------------------------------------------------------------------------ configuration


def test_the_configuration_s_start_is_the_default_and_generate_takes_another() -> None:
    lm = build(start="layerwise", start_missing="embedding", prefill_passes=1).eval()
    row = tokens(2, 9)
    assert lm.config.training_schedule().start == EMBEDDING
    assert lm.config.prefill_schedule() == Schedule.cyclic(3, 1, start=EMBEDDING)
    assert lm.config.prefill_schedule("converged").start == EMBEDDING
    assert lm.config.prefill_schedule("exact") == Schedule.exact()
    assert build(prefill_start="layerwise").config.prefill_schedule().start == NEWEST
    assert build(prefill_start="layerwise").config.training_schedule().start == Start()
    with torch.no_grad():
        want = lm(row, schedule=Schedule.cyclic(3, 1)).logits
        assert torch.equal(lm(row, prefill_start="embedding").logits, want)
        assert not torch.equal(lm(row).logits, want)
    out = {}
    for begin in ("embedding", "layerwise"):
        found = lm.generate(
            row,
            max_new_tokens=2,
            do_sample=False,
            prefill_start=begin,
            output_logits=True,
            return_dict_in_generate=True,
        )
        out[begin] = found.logits[0]
        with torch.no_grad():
            want = lm(row, prefill_start=begin).logits[:, -1]
        assert (out[begin] - want).abs().max() < 1e-5
    assert (out["embedding"] - out["layerwise"]).abs().max() > 1e-4


def test_a_prefill_to_a_tolerance_begins_there_too() -> None:
    lm = build().eval()
    row = tokens(3, LENGTH)
    with torch.no_grad():
        exact = lm(row, prefill="exact").logits
        loose = [lm(row, schedule=Converged(3, 1e9, start=start)).logits for start in (Start(), NEWEST)]
        once = lm(row, schedule=Schedule.cyclic(3, 1, start=NEWEST)).logits
        tight = lm(row, schedule=Converged(3, 1e-12, start=NEWEST)).logits
    assert (loose[1] - once).abs().max() < 1e-10
    assert (loose[0] - once).abs().max() > 1e-4
    assert (tight - exact).abs().max() < 1e-9


def test_a_row_that_one_pass_solves_needs_no_sweep() -> None:
    lm = build().eval()
    ran = []
    lm.model.layers[0].register_forward_pre_hook(lambda _, arguments: ran.append(arguments[0].shape[1]))
    with torch.no_grad():
        lm(tokens(1, 3), schedule=Schedule.cyclic(3, 2, start=NEWEST), use_cache=False)
    assert ran == [1, 1, 1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"start": "warm"}, "start is 'warm'; choose one of embedding, layerwise"),
        ({"start": "layerwise", "start_missing": "zero"}, "start_missing is 'zero'"),
        ({"start_grad": True}, "start_grad = true has no effect on start 'embedding'"),
        ({"start": "layerwise", "start_grad": True}, "no effect where no_grad_passes is 1"),
        ({"start": "layerwise", "schedule": "exact"}, "no effect on schedule 'exact'"),
        ({"start": "layerwise", "feedback": False, "k": 4}, "feedback: false has no passes to start"),
        ({"prefill_start": "cold"}, "start is 'cold'"),
    ],
    ids=str,
)
def test_contradictions_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**fields)


def test_the_sandwich_has_no_layerwise_start() -> None:
    with pytest.raises(ValueError, match="start is 'layerwise', but an LCKV sandwich has no choice there"):
        LCKVConfig(start="layerwise")


def test_it_is_saved_and_old_files_have_the_papers_start(tmp_path) -> None:
    config = build(start="layerwise", start_missing="embedding", prefill_start="embedding").config
    config.save_pretrained(tmp_path)
    again = WhiteMatterConfig.from_pretrained(tmp_path)
    assert again.training_schedule() == config.training_schedule()
    old = {name: value for name, value in config.to_dict().items() if "start" not in name}
    assert WhiteMatterConfig.from_dict(old).training_schedule().start == Start()
