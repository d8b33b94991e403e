"""Candidates of a benchmark take turns, so that a machine that slows down slows down all."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def take_turns(
    calls: dict[str, Callable[[], object]], repeats: int, *, cpu_time: bool = False
) -> dict[str, list[float]]:
    """Seconds of each call in `repeats` rounds after a warm-up, what it started on a GPU included.

    `cpu_time`: the seconds that this process was computing, for a machine that other programs use.
    """
    clock = time.process_time if cpu_time else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            _wait_for_gpu()
            start = clock()
            call()
            _wait_for_gpu()
            if turn:
                seconds[name].append(clock() - start)
    return seconds


def _wait_for_gpu() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
