"""The learning rate, as a pure function of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class RateSchedule:
    """How the learning rate runs; lengths in optimizer steps."""

    peak: float
    total: int
    """Length of the run."""
    warmup: int
    """Steps of linear warm-up."""
    kind: str = "cosine"
    """cosine, wsd or constant."""
    floor: float = 0.1
    """The rate at the end, as a fraction of the peak."""
    decay: int = 0
    """Steps of wsd's final decay."""
    cap: float = 1.0
    """What the rate does not exceed again, as a fraction of the peak: a run that was made longer after its
    rate had begun to fall goes on from where it was."""


def learning_rate(step: int, schedule: RateSchedule) -> float:
    """The learning rate of step `step`, counted from 1 to `schedule.total`.

    Linear warm-up: step s <= warmup has peak * s / warmup, so step `warmup` is the first at the peak. Then
    cosine: half a cosine from the peak down to floor * peak, reached exactly at step `total`; wsd: constant
    at the peak, and over the last `decay` steps linearly to floor * peak, reached at step `total`; constant:
    the peak. Steps beyond `total` keep the last value.
    """
    return min(_planned(step, schedule), schedule.cap * schedule.peak)


def continued(
    before: RateSchedule, planned: RateSchedule, step: int, *, warmup_changed: bool = False
) -> RateSchedule:
    """The schedule of a run that is at `step` and is given another one: what has happened is fixed.

    `before` is the schedule so far, `planned` what the run would have from its beginning. The warm-up stays
    as many steps as it was, unless it is not over yet and the run now says another one (`warmup_changed`).
    Where the run is made longer and its rate has begun to fall, the rate does not rise again.
    """
    if step == 0:
        return planned
    warmup = planned.warmup if warmup_changed and step < before.warmup else before.warmup
    cap = before.cap
    if planned.total > before.total and step > warmup:
        cap = min(cap, learning_rate(step, before) / before.peak)
    return replace(planned, warmup=warmup, cap=cap)


def _planned(step: int, s: RateSchedule) -> float:
    if s.warmup > 0 and step <= s.warmup:
        return s.peak * step / s.warmup
    step = min(step, s.total)
    if s.kind == "constant":
        return s.peak
    if s.kind == "wsd":
        left = s.total - step
        return s.peak if left >= s.decay else s.peak * (s.floor + (1.0 - s.floor) * left / s.decay)
    progress = (step - s.warmup) / (s.total - s.warmup)
    return s.peak * (s.floor + (1.0 - s.floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
