"""The stages of a run: what holds at which step, a pure function of the step.

`plan` turns a configuration into a list of stages, each with its first and last step (counted from 1) and a
whole configuration of its own: the run's, with the stage's fields in place. A run without `stages` is a run
with one. Everything that depends on the step asks here: data, batch, passes, learning rate, the dry run.

Tokens are those of the rows, filler included: global batch times row length a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wm_ds.config.durations import half_up, parse_duration, parse_tokens, to_steps
from wm_ds.config.schema import Config, ConfigError, Section, Stage

# Where stages that a run has been through ended: what each said of its end (`until`), and the step. A share
# that was turned into steps stays what it was when the run is made longer.
Past = Sequence[tuple[int | str | None, int]]


@dataclass(frozen=True)
class PlannedStage:
    """A stage in its place.

    Attributes:
        index: its number in `stages`.
        first, last: its steps; both belong to it.
        config: what holds in it; its `stages` are None.
        seq_len: tokens of a row.
        lr_factor: what the learning rate is multiplied with.
        until: what the configuration says of its end.
    """

    index: int
    first: int
    last: int
    config: Config
    seq_len: int
    lr_factor: float = 1.0
    until: int | str | None = None

    @property
    def steps(self) -> int:
        """How many."""
        return self.last - self.first + 1

    @property
    def positions(self) -> int:
        """Tokens of a step."""
        return self.config.batch.global_batch * self.seq_len

    @property
    def name(self) -> str:
        """As a message calls it."""
        return f"stages.{self.index}"


@dataclass(frozen=True)
class Plan:
    """The stages of a run, in order. `packed`: tokens of a row as the run's own data was packed."""

    config: Config
    packed: int
    stages: tuple[PlannedStage, ...]

    @property
    def total(self) -> int:
        """Length of the run in steps."""
        return self.stages[-1].last

    @property
    def tokens(self) -> int:
        """Length of the run in tokens."""
        return sum(stage.steps * stage.positions for stage in self.stages)

    @property
    def staged(self) -> bool:
        """Whether the configuration has stages."""
        return self.config.stages is not None

    def at(self, step: int) -> PlannedStage:
        """The stage of step `step`, 1 to `total`; beyond it, the last one."""
        return next((stage for stage in self.stages if step <= stage.last), self.stages[-1])

    def steps_of(self, field: str, duration: int | str, *, at_the_end: bool = False) -> int:
        """A duration from the run's beginning, or up to its end, as whole steps.

        A share is one of what the run's length is given in. Raises ConfigError where it cannot be read or
        exceeds the run.
        """
        stages = self.stages[::-1] if at_the_end else self.stages
        if self.config.tokens is not None and len({stage.positions for stage in stages}) > 1:
            unit, share = parse_duration(field, duration)
            if unit == "share":
                duration = half_up(_steps_of_tokens(stages, share * self.tokens))
        return to_steps(field, duration, self.total, lambda tokens: _steps_of_tokens(stages, tokens))


def plan(config: Config, seq_len: int, past: Past = ()) -> Plan:
    """The run's stages, for training data whose rows were packed with `seq_len` tokens.

    `past`: of the stages that are over. Raises ConfigError, naming the stage, where their ends are in no
    order, cannot be read, or lie beyond the run.
    """
    declared = config.stages or [Stage()]
    found: list[PlannedStage] = []
    for index, stage in enumerate(declared):
        own = effective(config, stage)
        length = own.data.seq_len or seq_len
        first = found[-1].last + 1 if found else 1
        here = PlannedStage(index, first, first, own, length, stage.lr_factor, stage.until)
        if index < len(past) and past[index][0] == stage.until and index + 1 < len(declared):
            last = past[index][1]
        else:
            last = _last_step(config, found, here, is_last=index + 1 == len(declared))
        if last < first:
            raise ConfigError(_too_early(here, last))
        found.append(PlannedStage(index, first, last, own, length, stage.lr_factor, stage.until))
    return Plan(config, seq_len, tuple(found))


def check_ranks(config: Config, ranks: int) -> None:
    """Raise ConfigError, naming the stage and the choices, where its batch does not divide over the ranks."""
    for index, stage in enumerate(config.stages or [Stage()]):
        try:
            effective(config, stage).accumulation(ranks)
        except ConfigError as error:
            raise ConfigError(f"stages.{index}: {error}" if config.stages else str(error)) from None


def effective(config: Config, stage: Stage) -> Config:
    """The run's configuration with a stage's fields in place; it has no stages itself."""
    changes: dict[str, Any] = {"stages": None}
    if stage.passes is not None:
        changes["model"] = config.model.model_copy(update=_said(stage.passes))
    if stage.batch is not None:
        changes["batch"] = config.batch.model_copy(update=_said(stage.batch))
    if stage.freeze is not None:
        changes["freeze"] = stage.freeze
    data = {"train": stage.data, "seq_len": stage.seq_len}
    data = {name: value for name, value in data.items() if value is not None}
    if data:
        changes["data"] = config.data.model_copy(update=data)
    return config.model_copy(update=changes)


def rate_schedule(plan: Plan) -> dict[str, Any]:
    """Fields of optim's RateSchedule for a run: peak, total, warmup, kind, floor, decay."""
    o = plan.config.optim
    return {
        "peak": o.lr,
        "total": plan.total,
        "warmup": plan.steps_of("optim.warmup", o.warmup),
        "kind": o.schedule,
        "floor": o.floor,
        "decay": plan.steps_of("optim.decay", o.decay, at_the_end=True) if o.schedule == "wsd" else 0,
    }


def _said(section: Section) -> dict[str, Any]:
    return {name: value for name, value in section.model_dump().items() if value is not None}


def _last_step(config: Config, before: Sequence[PlannedStage], here: PlannedStage, *, is_last: bool) -> int:
    """The last step of a stage that begins at `here.first`."""
    consumed = sum(stage.steps * stage.positions for stage in before)
    left = math.inf if config.tokens is None else parse_tokens("tokens", config.tokens) - consumed
    if is_last:
        if config.steps is not None:
            return config.steps
        return here.first - 1 + max(0, math.ceil(left / here.positions))
    field = f"{here.name}.until"
    assert here.until is not None  # validate.py has looked
    unit, amount = parse_duration(field, here.until)
    if unit == "share" and config.steps is not None:
        unit, amount = "steps", amount * config.steps
    elif unit == "share":
        unit, amount = "tokens", amount * (left + consumed)
    if unit == "tokens":
        amount = here.first - 1 + (amount - consumed) / here.positions
    last = half_up(amount)
    steps = math.inf if config.steps is None else config.steps
    if last >= steps or (last - here.first + 1) * here.positions >= left:
        length = f"{config.tokens} tokens" if config.steps is None else f"{config.steps} steps"
        raise ConfigError(
            f"{field} = {here.until!r} is step {last}, which leaves nothing of the run's {length} for the "
            "stages after it; give an earlier one, or make the run longer"
        )
    return last


def _too_early(here: PlannedStage, last: int) -> str:
    if here.until is None:
        return (
            f"{here.name} would begin at step {here.first}, and the run ends at step {last}: make the run "
            "longer, or leave the stage out"
        )
    return (
        f"{here.name}.until = {here.until!r} is step {last}, and the stage begins at step {here.first} only: "
        "stages come in their order; give a later end, or leave the stage out"
    )


def _steps_of_tokens(stages: Sequence[PlannedStage], tokens: float) -> float:
    """How many steps so many tokens take, going through `stages` in this order."""
    steps = 0.0
    for stage in stages:
        here = stage.steps * stage.positions
        if tokens <= here:
            return steps + tokens / stage.positions
        steps, tokens = steps + stage.steps, tokens - here
    return steps + tokens / stages[-1].positions
