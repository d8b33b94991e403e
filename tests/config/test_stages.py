"""Stages of a run as a pure function of the step: ends, merged fields, durations, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.config.test_load import changed, refusal
from wm_ds.config import load as configuration
from wm_ds.config.schema import PASSES, Config, ConfigError, Model
from wm_ds.config.stages import check_ranks, plan, rate_schedule
from wm_ds.families import model_config
from wm_ds.optim.learning_rate import RateSchedule, learning_rate

LENGTH = 32  # tokens of a row as packed; BASE has 16 sequences a step and 100 steps


def staged(*stages: dict[str, Any], **changes: Any) -> Config:
    return configuration.parse(changed(stages=list(stages), **changes))


def ends(config: Config, *past: tuple[Any, int]) -> list[tuple[int, int]]:
    return [(stage.first, stage.last) for stage in plan(config, LENGTH, past).stages]


def test_a_run_without_stages_has_one() -> None:
    config = configuration.parse(changed())
    (stage,) = plan(config, LENGTH).stages
    assert (stage.first, stage.last, stage.seq_len, stage.positions) == (1, 100, LENGTH, 16 * LENGTH)
    assert stage.config == config
    assert not plan(config, LENGTH).staged


def test_every_field_of_a_stage_takes_the_place_of_the_runs() -> None:
    config = staged(
        {"until": 10, "passes": {"no_grad_passes": 0, "grad_passes": 1, "relaxation": [0.5, 1.0]}},
        {"until": 20, "data": [{"path": "b", "weight": 3.0}], "seq_len": 16, "batch": {"global_batch": 64}},
        {"freeze": ["*.mlp.*"], "lr_factor": 0.5, "batch": {"micro_batch": 2}},
        model__num_groups=4,
    )
    first, second, third = plan(config, LENGTH).stages
    assert [s.config.stages for s in (first, second, third)] == [None] * 3
    assert (first.config.model.no_grad_passes, first.config.model.grad_passes) == (0, 1)
    assert (first.config.model.relaxation, first.config.model.num_groups) == ([0.5, 1.0], 4)
    assert first.config.data == config.data
    assert (second.config.data.sources()[0].path, second.seq_len, second.positions) == ("b", 16, 64 * 16)
    assert (second.config.batch.global_batch, second.config.batch.micro_batch) == (64, 4)
    assert second.config.model == config.model
    assert (third.config.batch.global_batch, third.config.batch.micro_batch) == (16, 2)
    assert (third.config.freeze, third.lr_factor, second.lr_factor) == (["*.mlp.*"], 0.5, 1.0)
    assert third.seq_len == LENGTH
    assert set(PASSES) <= set(Model.model_fields)


def test_a_stage_ends_at_a_step_a_share_or_a_number_of_tokens() -> None:
    batch = {"batch": {"global_batch": 32}}
    tokens = 30 * 16 * LENGTH + 20 * 32 * LENGTH  # thirty steps of the run's batch, twenty of twice as much
    config = staged({"until": "30%"}, {"until": f"{tokens} tokens", **batch}, {"until": 77}, {})
    assert ends(config) == [(1, 30), (31, 50), (51, 77), (78, 100)]
    assert [plan(config, LENGTH).at(step).index for step in (1, 30, 31, 50, 51, 77, 78, 100, 101)] == [
        *(0, 0, 1, 1, 2, 2, 3, 3, 3)
    ]


def test_a_run_in_tokens_ends_when_its_stages_have_consumed_them() -> None:
    """Half of the tokens at 16 sequences of 32, the rest at 64 of 16: twice as many tokens a step."""
    second = {"batch": {"global_batch": 64}, "seq_len": 16}
    config = staged({"until": "50%"}, second, steps=None, tokens=100 * 16 * LENGTH)
    assert ends(config) == [(1, 50), (51, 75)]
    found = plan(config, LENGTH)
    assert found.tokens == 100 * 16 * LENGTH
    one_more = staged({"until": "50%"}, second, steps=None, tokens=100 * 16 * LENGTH + 1)
    assert ends(one_more)[-1][1] == 76, "rounded up"
    equal = staged({"until": "50%"}, {"until": "70%"}, {}, steps=None, tokens=12345 * LENGTH)
    alone = configuration.parse(changed(steps=None, tokens=12345 * LENGTH))
    assert plan(equal, LENGTH).total == plan(alone, LENGTH).total == 772


def test_durations_of_the_learning_rate_count_what_stages_consume() -> None:
    """Warm-up and decay in tokens, over a border: 10 steps at 16 x 32, the rest at twice that."""
    batch = {"batch": {"global_batch": 32}}
    step = 16 * LENGTH
    config = staged(
        {"until": 10},
        {"until": 95, **batch},
        {},
        optim__schedule="wsd",
        optim__warmup=f"{10 * step + 5 * 2 * step} tokens",
        optim__decay=f"{5 * step + 3 * 2 * step} tokens",
    )
    fields = rate_schedule(plan(config, LENGTH))
    assert (fields["warmup"], fields["decay"], fields["total"]) == (15, 8, 100)
    by_share = staged({"until": "50%"}, batch, steps=None, tokens=80 * step, optim__warmup="75%")
    assert plan(by_share, LENGTH).total == 60
    assert rate_schedule(plan(by_share, LENGTH))["warmup"] == 50, "75% of the tokens, not of the steps"


def test_equal_stages_have_the_rate_of_the_run_without_them() -> None:
    alone = configuration.parse(changed(optim__warmup="7%"))
    equal = staged({"until": "31%"}, {"until": 60}, {}, optim__warmup="7%")
    one, other = (RateSchedule(**rate_schedule(plan(c, LENGTH))) for c in (alone, equal))
    assert [learning_rate(s, one) for s in range(1, 101)] == [learning_rate(s, other) for s in range(1, 101)]


def test_ends_of_stages_that_are_over_stay_where_they_were() -> None:
    """70% of 100 steps were 70; of 200 they would be 140."""
    stages = ({"until": "70%"}, {"until": "90%"}, {})
    longer = staged(*stages, steps=200)
    assert ends(longer) == [(1, 140), (141, 180), (181, 200)]
    assert ends(longer, ("70%", 70)) == [(1, 70), (71, 180), (181, 200)]
    edited = staged({"until": 60}, *stages[1:], steps=200)
    assert ends(edited, ("70%", 70))[0] == (1, 60), "what says otherwise now is not what was"


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([{}, {}], "stages.0.until is required: only the last stage ends with the run"),
        ([{"until": 5}], "stages.0.until = 5: the last stage ends with the run and has none"),
        ([], "stages = []"),
        ([{"until": "70 %%"}, {}], "stages.0.until = '70 %%' is no percentage"),
        ([{"until": "70"}, {}], "stages.0.until = '70': write steps (200), a share (2%) or tokens"),
        ([{"model": {"hidden_size": 8}}], "stages.0.model: it holds for the whole run and cannot change"),
        ([{"seed": 3}], "stages.0.seed: it holds for the whole run"),
        ([{"tokenizer": "x"}], "stages.0.tokenizer: it holds for the whole run"),
        ([{"optim": {"lr": 1.0}}], "stages.0.optim: it holds for the whole run"),
        ([{"passes": {"num_hidden_layers": 8}}], "never the shape of the model"),
        ([{"passes": {"grad_pases": 8}}], "did you mean stages.0.passes.grad_passes?"),
        ([{"untill": 5}, {}], "did you mean stages.0.until?"),
        ([{"passes": {"grad_passes": 0}}], "stages.0.passes.grad_passes = 0"),
        ([{"batch": {"global_batch": 0}}], "stages.0.batch.global_batch = 0"),
        ([{"data": [{"path": "a", "wieght": 1.0}]}], "did you mean stages.0.data"),
        ([{"lr_factor": 0.0}], "stages.0.lr_factor = 0.0"),
    ],
)
def test_what_no_stage_may_say_is_refused_by_name(stages, said) -> None:
    assert said in refusal(changed(stages=stages))


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (
            [{"until": 50}, {"until": 50}, {}],
            "stages.1.until = 50 is step 50, and the stage begins at step 51",
        ),
        ([{"until": 50}, {"until": "40%"}, {}], "stages.1.until = '40%' is step 40"),
        (
            [{"until": 100}, {}],
            "stages.0.until = 100 is step 100, which leaves nothing of the run's 100 steps",
        ),
        ([{"until": "120%"}, {}], "leaves nothing"),
        ([{"until": 0}, {}], "stages.0.until = 0 is step 0, and the stage begins at step 1"),
    ],
)
def test_ends_in_no_order_are_refused_naming_both_steps(stages, said) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(staged(*stages), LENGTH)
    assert said in str(caught.value)


def test_contradictions_of_one_stage_name_it() -> None:
    shared = {"sequence_parallel": 2, "model__num_key_value_heads": 2}
    wave = {"passes": {"schedule": "wavefront", "chunk_size": 8}}
    said = refusal(changed(stages=[{"until": 5}, wave], **shared))
    assert "stages.1: sequence_parallel = 2 needs steps that are spread" in said
    vanilla = {"model__family": "vanilla", "stages": [{"passes": {"grad_passes": 1}}]}
    assert "stages.0.passes.grad_passes = 1: model.family = vanilla has no passes" in refusal(
        changed(**vanilla)
    )


def test_a_key_that_no_stage_reads_is_refused_and_one_that_a_stage_reads_is_not(tmp_path) -> None:
    def written(**changes: Any) -> Config:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(changed(**changes)))
        return configuration.load(tmp_path / "run.yaml")

    wave = {"passes": {"schedule": "wavefront"}}
    assert written(model__chunk_size=8, stages=[{"until": 5}, wave]).model.chunk_size == 8
    with pytest.raises(ConfigError, match=r"model\.chunk_size = 8 has no effect"):
        written(model__chunk_size=8, stages=[{"until": 5}, {"passes": {"grad_passes": 1}}])
    with pytest.raises(ConfigError, match=r"stages\.0\.passes\.chunk_size = 8 has no effect with model"):
        written(stages=[{"until": 5, "passes": {"chunk_size": 8}}, {}])


def test_a_cyclic_stage_of_a_chunked_run_has_no_chunks() -> None:
    config = staged(
        {"until": 5, "passes": {"schedule": "cyclic"}}, {}, model__schedule="chunked", model__chunk_size=8
    )
    first, second = (
        model_config(stage.config.model, vocab_size=9, seq_len=LENGTH, eos_id=0).training_schedule()
        for stage in plan(config, LENGTH).stages
    )
    assert (first.kind, first.chunk, second.kind, second.chunk) == ("cyclic", 0, "chunked", 8)


def test_a_ramp_that_does_not_divide_is_refused_with_choices_for_its_stage() -> None:
    config = staged(
        {"until": 5}, {"until": 10, "batch": {"global_batch": 36}}, {"batch": {"global_batch": 48}}
    )
    check_ranks(config, 1)
    with pytest.raises(ConfigError) as caught:
        check_ranks(config, 4)
    assert str(caught.value).startswith(
        "stages.1: global_batch 36 does not divide over 4 ranks x micro_batch 4"
    )
    assert "micro_batch in {1, 3, 9}" in str(caught.value)
    check_ranks(staged({"until": 5}, {"batch": {"global_batch": 36, "micro_batch": 3}}), 4)  # a choice
    with pytest.raises(ConfigError, match=r"^global_batch 16 does not divide"):
        check_ranks(configuration.parse(changed()), 3)


def test_stages_read_back_equal(tmp_path) -> None:
    config = staged({"until": "50%", "passes": {"grad_passes": 1}, "data": "b"}, {"freeze": []})
    (tmp_path / "run.yaml").write_text(configuration.dump(config))
    assert configuration.load(tmp_path / "run.yaml") == config
    written = configuration.load(tmp_path / "run.yaml", ["stages=[{until: 7}, {seq_len: 16}]"])
    assert ends(written) == [(1, 7), (8, 100)]
