"""What a run has been trained with: the past is compared, the future may change and is told."""

from __future__ import annotations

from typing import Any

import pytest

from tests.config.test_load import changed
from wm_ds.config import load as configuration
from wm_ds.config.stages import plan
from wm_ds.run.trained_with import Record, changes, over, record, refusals

CONTENTS = {"data/x": "x", "moved/x": "x", "b": "b", "again/x": "other"}


def recorded(*stages: dict[str, Any], past=(), **others: Any) -> Record:
    config = configuration.parse(changed(**others, **({"stages": list(stages)} if stages else {})))
    return record(plan(config, 32, past), CONTENTS.get)


def test_equal_stages_are_the_run_without_them() -> None:
    assert refusals(recorded(), recorded({"until": 30}, {"until": "50%"}, {}), 100) == []
    assert refusals(recorded({"until": 30}, {}), recorded({"until": 80}, {"data": "moved/x"}), 100) == []


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ({"passes": {"grad_passes": 1}}, "model.grad_passes is None there and 1 here"),
        ({"batch": {"global_batch": 32}}, "batch.global_batch is 16 there and 32 here"),
        ({"seq_len": 16}, "data.seq_len is 32 there and 16 here"),
        ({"freeze": ["*"]}, "freeze is [] there and ['*'] here"),
        ({"lr_factor": 2.0}, "lr_factor is 1.0 there and 2.0 here"),
        ({"data": "b"}, "data.train: b holds other rows than the run was trained on so far (from data/x)"),
        ({"data": [{"path": "data/x", "weight": 2.0}]}, "data.train is data/x x 1 there and data/x x 2 here"),
    ],
)
def test_a_step_that_was_taken_stays_what_it_was(stage, said) -> None:
    before = recorded({"until": 40}, {"until": 60}, {})
    now = recorded({"until": 40}, {"until": 60, **stage}, {})
    assert refusals(before, now, 41) == [f"steps 41 to 41: {said}"]
    assert refusals(before, now, 100) == [f"steps 41 to 60: {said}"]
    assert refusals(before, now, 40) == [], "the stage has not begun"
    assert [line.split(": ")[0] for line in changes(before, now, 40)] == ["steps 41 to 60"]
    assert changes(before, now, 60) == []


def test_without_stages_no_steps_are_named() -> None:
    said = refusals(recorded(), recorded(batch__global_batch=32), 1)
    assert said == ["batch.global_batch is 16 there and 32 here"]


def test_a_stage_in_progress_may_end_elsewhere_but_not_in_the_past() -> None:
    before = recorded({"until": 40}, {"passes": {"grad_passes": 1}})
    later, earlier = (recorded({"until": n}, {"passes": {"grad_passes": 1}}) for n in (60, 30))
    assert refusals(before, later, 35) == []
    assert changes(before, later, 35) == ["steps 41 to 60: model.grad_passes: 1 -> None"]
    assert refusals(before, earlier, 35) == ["steps 31 to 35: model.grad_passes is None there and 1 here"]
    assert refusals(before, earlier, 30) == []


def test_stages_are_added_and_removed_in_the_future() -> None:
    long, annealed = recorded(), recorded({"until": 80}, {"data": "b", "lr_factor": 0.1}, steps=120)
    assert refusals(long, annealed, 80) == []
    assert changes(long, annealed, 80) == [
        "steps 81 to 100: lr_factor: 1.0 -> 0.1",
        "steps 81 to 100: data.train: data/x -> b",
        "steps of the run: 100 -> 120",
    ]
    assert refusals(annealed, long, 80) == []
    assert refusals(annealed, long, 81) != []


def test_data_packed_again_is_other_data_under_the_same_name() -> None:
    before = recorded()
    CONTENTS["data/x"] = "repacked"
    try:
        (said,) = refusals(before, recorded(), 1)
    finally:
        CONTENTS["data/x"] = "x"
    assert said.endswith("(it was packed again since)")


def test_a_share_of_a_stage_that_is_over_is_kept_in_steps() -> None:
    before = recorded({"until": "70%"}, {"data": "b"})
    past = over(before, 80)
    assert past == [("70%", 70)]
    assert over(before, 69) == []
    longer = recorded({"until": "70%"}, {"data": "b"}, past=past, steps=200)
    assert refusals(before, longer, 80) == []
    assert refusals(before, recorded({"until": "70%"}, {"data": "b"}, steps=200), 80) != []
