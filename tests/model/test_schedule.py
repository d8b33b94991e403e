"""Schedules as data, and every kind of schedule run by the fast passes against the formulas."""

import pytest
import torch

from tests.model.test_gradients import POLICIES, assert_equal_gradients, fast, labels_for
from tests.support import reference
from tests.support.tiny import batch, build, hidden, parameters, settings, tokens
from wm_ds.model import Converged, Schedule, WhiteMatterConfig

LENGTH = 13
NAMES = ("several", "filler", "one")


def as_lists(schedule: Schedule, length: int) -> list[reference.Step]:
    """The fast model's steps in the reference's form, sorted by position."""
    return [
        sorted((i, part.pass_index) for part in step for i in part.positions)
        for step in schedule.steps(length)
    ]


def by_hand(schedule: Schedule, length: int) -> list[reference.Step]:
    if schedule.kind == "exact":
        return reference.one_by_one(length)
    if schedule.kind == "chunked":
        return reference.chunked(length, schedule.chunk, schedule.groups, schedule.passes)
    if schedule.kind == "wavefront":
        return reference.wavefront(length, schedule.chunk, schedule.groups, schedule.passes)
    return reference.cyclic(length, schedule.groups, schedule.passes)


SCHEDULES = {
    "exact": Schedule.exact(),
    "jacobi": Schedule.jacobi(3, no_grad=1),
    "cyclic": Schedule.cyclic(3, 3, no_grad=1),
    "cyclic, more groups than tokens": Schedule.cyclic(20, 2, no_grad=1),
    "chunked": Schedule.chunked(6, 3, 2, no_grad=1),
    "chunked, ragged": Schedule.chunked(5, 2, 3, no_grad=1),
    "chunked, one chunk": Schedule.chunked(40, 3, 2),
    "wavefront": Schedule.wavefront(6, 3, 2, no_grad=1),
    "wavefront, no detached pass": Schedule.wavefront(4, 2, 2),
    "wavefront, ragged": Schedule.wavefront(5, 3, 3, no_grad=2),
    "wavefront, chunks of one group": Schedule.wavefront(3, 3, 2, no_grad=1),
    "relaxed jacobi": Schedule.jacobi(3, no_grad=1, relaxation=0.8),
    "relaxed cyclic": Schedule.cyclic(3, 3, no_grad=1, relaxation=0.8),
    "relaxed cyclic, two detached passes": Schedule.cyclic(4, 4, no_grad=2, relaxation=0.7),
    "relaxed cyclic, no detached pass": Schedule.cyclic(3, 2, relaxation=1.3),
    "relaxed chunked": Schedule.chunked(5, 2, 3, no_grad=1, relaxation=0.8),
    "relaxed chunked, two detached passes": Schedule.chunked(5, 2, 4, no_grad=2, relaxation=0.8),
    # Steps of one position: the last of a chunk is read by no step of its own chunk, yet lives on in the next
    # entry of its position, which is blended with it.
    "relaxed cyclic, single positions": Schedule.cyclic(20, 3, no_grad=1, relaxation=0.8),
    "relaxed chunked, single positions": Schedule.chunked(4, 4, 3, no_grad=1, relaxation=0.8),
    "relaxed wavefront, single positions": Schedule.wavefront(4, 4, 3, no_grad=1, relaxation=0.8),
    "a factor for each pass": Schedule.cyclic(3, 4, no_grad=1, relaxation=(0.8, 1.0, 1.2)),
    "fewer factors than passes": Schedule.cyclic(3, 4, no_grad=2, relaxation=(1.0, 0.7)),
    "a factor for each pass, wavefront": Schedule.wavefront(4, 4, 3, no_grad=1, relaxation=(1.0, 0.8)),
    "relaxed wavefront": Schedule.wavefront(5, 2, 3, no_grad=1, relaxation=0.8),
}


def relaxations(schedule: Schedule) -> dict[int, float]:
    given = schedule.relaxation
    if not isinstance(given, tuple):
        return dict.fromkeys(range(1, schedule.passes), given)
    return {turn: given[turn - 1] if turn <= len(given) else given[-1] for turn in range(1, schedule.passes)}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("length", [1, 2, 12, 13, 40])
def test_steps_are_those_of_the_definition(name: str, length: int) -> None:
    schedule = SCHEDULES[name]
    assert as_lists(schedule, length) == [sorted(step) for step in by_hand(schedule, length)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("length", [1, 5, 13])
def test_every_position_is_in_every_pass_once_and_in_order(name: str, length: int) -> None:
    schedule = SCHEDULES[name]
    turns: dict[int, list[int]] = {i: [] for i in range(length)}
    for step in schedule.steps(length):
        seen = [i for part in step for i in part.positions]
        assert len(seen) == len(set(seen)), "a step updates a position once"
        for part in step:
            for i in part.positions:
                turns[i].append(part.pass_index)
    assert all(turn == list(range(schedule.passes)) for turn in turns.values())


@pytest.mark.parametrize("name", SCHEDULES)
def test_values_equal_the_schedule_done_by_hand(name: str) -> None:
    schedule = SCHEDULES[name]
    lm = build(3, 2, 4).eval()
    input_ids, document_ids = batch(*NAMES)
    with torch.no_grad():
        got = hidden(lm, input_ids, document_ids, schedule)
    p, s = parameters(lm), settings(lm)
    for row in range(len(NAMES)):
        want = reference.passes(
            p,
            s,
            input_ids[row].tolist(),
            document_ids[row].tolist(),
            by_hand(schedule, LENGTH),
            relaxation=relaxations(schedule),
        )
        assert (got[row] - want.hidden_TD).abs().max() < 1e-10, NAMES[row]


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_cache_is_the_pool_of_the_last_states(name: str) -> None:
    """What a prefill leaves behind, entry by entry: also those that no later step of the schedule reads."""
    schedule = SCHEDULES[name]
    lm = build(3, 2, 4).eval()
    input_ids = tokens(2, LENGTH)
    with torch.no_grad():
        cache = lm(input_ids, schedule=schedule, use_cache=True).past_key_values
    p, s = parameters(lm), settings(lm)
    for row in range(2):
        want = reference.passes(
            p,
            s,
            input_ids[row].tolist(),
            [0] * LENGTH,
            by_hand(schedule, LENGTH),
            relaxation=relaxations(schedule),
        )
        for j in range(3):
            assert (cache.layers[j].keys[row].transpose(0, 1) - want.keys_TkHd[:, j]).abs().max() < 1e-10
            assert (cache.layers[j].values[row].transpose(0, 1) - want.values_TkHd[:, j]).abs().max() < 1e-10


@pytest.fixture(scope="module")
def wanted() -> dict:
    return {}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("exact", "jacobi", "cyclic")])
def test_gradients_of_every_schedule(name: str, policy: str, wanted: dict) -> None:
    schedule = SCHEDULES[name]
    lm = build(2, 2, 3, seed=5)
    names = ("several", "filler")
    if name not in wanted:
        input_ids, document_ids = batch(*names)
        labels = labels_for(input_ids, document_ids)
        p, s = parameters(lm, requires_grad=True), settings(lm)
        loss = torch.zeros((), dtype=torch.float64)
        for row in range(len(names)):
            result = reference.passes(
                p,
                s,
                input_ids[row].tolist(),
                document_ids[row].tolist(),
                by_hand(schedule, LENGTH),
                no_grad=schedule.no_grad,
                relaxation=relaxations(schedule),
            )
            loss = loss + reference.cross_entropy(p, result.hidden_TD, labels[row].tolist())
        loss.backward()
        wanted[name] = (loss.item(), {key: weight.grad for key, weight in p.items()})
    want_loss, want = wanted[name]
    loss, got = fast(lm, schedule, names, policy)
    assert abs(loss - want_loss) < 1e-9
    assert_equal_gradients(got, want)


@pytest.mark.parametrize("policy", POLICIES)
def test_long_rows_are_cut_into_several_runs_of_queries(policy: str, wanted: dict) -> None:
    """140 positions in one step: attention works run by run, each against its own key prefix."""
    lm = build(2, 2, 2).train()
    lm.model.recompute = policy
    input_ids = tokens(1, 140)
    document_ids = torch.tensor([[0] * 3 + [1] + [2] * 96 + [3] * 35 + [-1] * 5])
    h = hidden(lm, input_ids, document_ids, Schedule.jacobi(1))
    h[:, 60:].square().sum().backward()
    if "want" not in wanted:
        p = parameters(lm, requires_grad=True)
        steps = reference.cyclic(140, 1, 1)
        result = reference.passes(p, settings(lm), input_ids[0].tolist(), document_ids[0].tolist(), steps)
        result.hidden_TD[60:].square().sum().backward()
        wanted["hidden"] = result.hidden_TD.detach()
        wanted["want"] = {name: p[name].grad for name, _ in lm.named_parameters() if "lm_head" not in name}
    assert (h[0] - wanted["hidden"]).abs().max() < 1e-10
    got = {name: weight.grad for name, weight in lm.named_parameters() if "lm_head" not in name}
    assert_equal_gradients(got, wanted["want"])


def test_a_prefill_stops_where_more_passes_change_nothing() -> None:
    lm = build(3, 2, 4).eval()
    input_ids = tokens(2, 7)
    with torch.no_grad():
        many = lm.model(input_ids=input_ids, schedule=Schedule.cyclic(3, 50)).last_hidden_state
        exact = lm.model(input_ids=input_ids, schedule=Schedule.exact()).last_hidden_state
    assert (many - exact).abs().max() < 1e-10


@pytest.mark.parametrize(
    "make",
    [
        lambda: Schedule.cyclic(0, 1),
        lambda: Schedule.cyclic(8, 0),
        lambda: Schedule.cyclic(8, 2, no_grad=2),
        lambda: Schedule.cyclic(8, 2, no_grad=-1),
        lambda: Schedule.chunked(4, 8, 1),
        lambda: Schedule.wavefront(0, 1, 1),
        lambda: Schedule("spiral", 1, 1),
    ],
)
def test_impossible_schedules_are_refused(make) -> None:
    with pytest.raises(ValueError):
        make()


def test_the_configuration_names_its_schedules() -> None:
    config = WhiteMatterConfig(num_groups=4, no_grad_passes=1, grad_passes=2)
    assert config.training_schedule() == Schedule.cyclic(4, 3, no_grad=1)
    assert config.prefill_schedule() == Schedule.cyclic(4, 3)
    assert config.prefill_schedule("exact") == Schedule.exact()
    assert config.prefill_schedule("converged", tolerance=0.1) == Converged(4, 0.1)
    assert config.prefill_schedule(passes=5, groups=16) == Schedule.cyclic(16, 5)
    config = WhiteMatterConfig(
        schedule="wavefront", chunk_size=64, num_groups=8, relaxation=0.8, prefill="exact"
    )
    assert config.training_schedule() == Schedule.wavefront(64, 8, 3, no_grad=1, relaxation=0.8)
    assert config.prefill_schedule() == Schedule.exact()
    assert config.prefill_schedule("chunked") == Schedule.chunked(64, 8, 3, relaxation=0.8)
    config = WhiteMatterConfig(num_groups=4, relaxation=[0.9, 0.8])
    assert config.training_schedule() == Schedule.cyclic(4, 3, no_grad=1, relaxation=(0.9, 0.8))
    assert [config.training_schedule().factor(turn) for turn in range(-1, 4)] == [1, 1, 0.9, 0.8, 0.8]
    assert WhiteMatterConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert WhiteMatterConfig(schedule="exact").training_schedule() == Schedule.exact()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "spiral"}, "spiral"),
        ({"schedule": "chunked"}, "chunk"),
        ({"prefill": "wavefront", "chunk_size": 4, "num_groups": 8}, "chunk of 4"),
        ({"prefill": "converged", "prefill_tolerance": -1.0}, "-1.0"),
        ({"relaxation": [0.8, 0.0]}, r"relaxation is \[0.8, 0.0\]"),
        ({"relaxation": []}, r"relaxation is \[\]"),
        ({"prefill_passes": 0}, "prefill_passes is 0"),
        ({"tokenizer_size": 200_000}, "tokenizer_size is 200000"),
    ],
)
def test_configurations_that_contradict_themselves_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WhiteMatterConfig(**fields)
