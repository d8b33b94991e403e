"""Durations and numbers of tokens, as a person writes them.

A duration is a number of steps (`200`), a share of the run (`2%`) or tokens (`50M tokens`). It becomes an
integer number of steps, rounded half up (2% of 30,518 steps is 610). How many steps some tokens take depends
on the run's stages (stages.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from wm_ds.config.schema import ConfigError

_SUFFIX = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def parse_tokens(field: str, value: int | str | None) -> int:
    """A number of tokens: an integer, `2e9`, `500M` or `500M tokens`. Raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"([\d.]+(?:[eE][-+]?\d+)?)\s*([kKmMbBgGtT]?)(?:\s*tokens?)?", str(value).strip())
    try:
        tokens = float(match[1]) * _SUFFIX[match[2].lower()] if match else 0.0
    except ValueError:
        tokens = 0.0
    if tokens < 1:
        raise ConfigError(f"{field} = {value!r} is no number of tokens; write 2e9 or 500M tokens")
    return round(tokens)


def parse_duration(field: str, duration: int | str) -> tuple[str, float]:
    """("steps", n), ("share", 0 to 1) or ("tokens", n). Raises ConfigError where it cannot be read."""
    if not isinstance(duration, str):
        return "steps", float(duration)
    if duration.strip().endswith("%"):
        try:
            return "share", float(duration.strip()[:-1]) / 100.0
        except ValueError:
            raise ConfigError(f"{field} = {duration!r} is no percentage; write 2%") from None
    if not duration.strip().endswith(("token", "tokens")):
        raise ConfigError(f"{field} = {duration!r}: write steps (200), a share (2%) or tokens (50M tokens)")
    return "tokens", parse_tokens(field, duration)


def to_steps(
    field: str, duration: int | str, total_steps: int, steps_of_tokens: Callable[[float], float]
) -> int:
    """A duration as whole steps; `steps_of_tokens`: how many steps so many tokens take.

    Raises ConfigError where it cannot be read or exceeds the run.
    """
    unit, amount = parse_duration(field, duration)
    if unit == "tokens":
        amount = steps_of_tokens(amount)
    elif unit == "share":
        amount *= total_steps
    steps = half_up(amount)
    if not 0 <= steps <= total_steps:
        raise ConfigError(f"{field} = {duration!r} is {steps} steps of a run of {total_steps}")
    return steps


def half_up(exact: float) -> int:
    """The nearest integer, the larger one of two."""
    return math.floor(exact + 0.5)
