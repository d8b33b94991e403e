"""Sweeps are wm_ds's own schedules, token by token."""

import pytest
import torch
from whitematter_vllm.configuration import LCKVConfig, WhiteMatterConfig, refuse_unknown
from whitematter_vllm.sweeps import Schedule, schedule_of

from wm_ds.model import LCKVConfig as TrainedLCKVConfig
from wm_ds.model import WhiteMatterConfig as TrainedConfig
from wm_ds.model.schedule import Schedule as TrainedSchedule

LENGTHS = [1, 2, 5, 16, 23, 40]
SCHEDULES = [
    (Schedule("exact"), TrainedSchedule.exact()),
    (Schedule("cyclic", 4, 3), TrainedSchedule.cyclic(4, 3)),
    (Schedule("cyclic", 1, 2), TrainedSchedule.jacobi(2)),
    (Schedule("chunked", 4, 2, 8), TrainedSchedule.chunked(8, 4, 2)),
    (Schedule("wavefront", 2, 3, 6), TrainedSchedule.wavefront(6, 2, 3)),
]


def theirs(schedule, length):
    return [
        sorted((position, part.pass_index) for part in step for position in part.positions)
        for step in schedule.capped(length).steps(length)
    ]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("pair", SCHEDULES, ids=lambda pair: f"{pair[0].kind}{pair[0].groups}")
def test_one_request(pair, length):
    mine = pair[0].capped(length).sweeps(torch.arange(length))
    found = [list(zip(sweep.token_n.tolist(), sweep.pass_n.tolist())) for sweep in mine]
    assert found == theirs(pair[1], length)
    assert pair[0].period == pair[1].period


@pytest.mark.parametrize("pair", SCHEDULES, ids=lambda pair: f"{pair[0].kind}{pair[0].groups}")
def test_requests_side_by_side_each_run_their_own(pair):
    columns = torch.cat([torch.arange(length) for length in LENGTHS])
    first = 0
    found = list(pair[0].capped(max(LENGTHS)).sweeps(columns))
    for length in LENGTHS:
        own = [
            [
                (token - first, index)
                for token, index in zip(sweep.token_n.tolist(), sweep.pass_n.tolist())
                if first <= token < first + length
            ]
            for sweep in found
        ]
        # Passes beyond those that make a short row exact change nothing: only the others are compared.
        expected = theirs(pair[1], length)
        assert [step for step in own if step][: len(expected)] == expected
        first += length


def test_relaxation_factors():
    schedule = Schedule("cyclic", 4, 5, relaxation=(0.5, 0.8))
    assert schedule.factor(torch.arange(5)).tolist() == pytest.approx([1.0, 0.5, 0.8, 0.8, 0.8])
    assert schedule.capped(4).passes == 5  # fewer would not be the same


@pytest.mark.parametrize(
    ("ours", "trained"), [(WhiteMatterConfig, TrainedConfig), (LCKVConfig, TrainedLCKVConfig)]
)
def test_every_field_of_a_configuration_is_known_with_its_default(ours, trained):
    mine = ours()
    entry = trained().to_dict()
    refuse_unknown(ours(**entry))
    for name, value in entry.items():
        if name not in ("transformers_version", "num_kv_channels", "warmup_layers"):
            assert getattr(mine, name, value) == value, name


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prefill": "exact"},
        {"prefill_passes": 1, "prefill_groups": 2},
        {"schedule": "chunked", "chunk_size": 16},
        {"prefill": "wavefront", "chunk_size": 32, "relaxation": 0.5},
        {"prefill": "converged", "prefill_tolerance": 0.25},
    ],
)
def test_a_configuration_names_the_same_schedule(fields):
    mine, named = schedule_of(WhiteMatterConfig(**fields)), TrainedConfig(**fields).prefill_schedule()
    if mine.kind == "converged":
        assert (mine.groups, mine.tolerance) == (named.groups, named.tolerance)
        return
    assert (mine.kind, mine.groups, mine.passes, mine.chunk) == (
        named.kind, named.groups, named.passes, named.chunk,
    )  # fmt: skip
    assert mine.factor(torch.tensor([3])).item() == pytest.approx(named.factor(3))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prefill": "jacobi"}, "prefill 'jacobi'"),
        ({"schedule": "newton"}, "prefill 'newton'"),
        ({"start": "random"}, "start 'random'"),
        ({"start_missing": "mean"}, "start_missing 'mean'"),
        ({"prefill": "chunked"}, "chunk_size 0"),
        ({"relaxation": 0.0}, "relaxation"),
    ],
)
def test_what_is_not_known_is_refused_by_name(fields, said):
    with pytest.raises(ValueError, match=said):
        schedule_of(WhiteMatterConfig(**fields))
