"""The learning rate, as a pure function of the step."""

from __future__ import annotations

import math


def learning_rate(
    step: int,
    *,
    peak: float,
    total: int,
    warmup: int,
    kind: str = "cosine",
    floor: float = 0.1,
    decay: int = 0,
) -> float:
    """The learning rate of step `step`, counted from 1 to `total`.

    Linear warm-up: step s <= warmup has peak * s / warmup, so step `warmup` is the first at the peak. Then
    cosine: half a cosine from the peak down to floor * peak, reached exactly at step `total`; wsd: constant
    at the peak, and over the last `decay` steps linearly to floor * peak, reached at step `total`; constant:
    the peak. `floor` is a fraction of the peak. Steps beyond `total` keep the last value.
    """
    if warmup > 0 and step <= warmup:
        return peak * step / warmup
    step = min(step, total)
    if kind == "constant":
        return peak
    if kind == "wsd":
        left = total - step
        return peak if left >= decay else peak * (floor + (1.0 - floor) * left / decay)
    progress = (step - warmup) / (total - warmup)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
