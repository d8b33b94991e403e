"""Which rank is slower than the others, by its own computing: not by what it waits for.

In a synchronous step everybody takes as long as the slowest, so the length of a step says nothing of a rank.
What does is the time in the parts of a step in which it waits for nobody (`Engine.own_parts`): forward, and
backward where gradients are reduced after it. On GPUs these are times between events on the device. At
ZeRO 3, and where ranks share rows, no part is free of waiting, and nobody is called slow.

Ranks exchange their times once per log interval, in the small host group that also agrees on stopping.
"""

from __future__ import annotations

import logging
import math
import socket
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

from wm_ds.distributed.host_group import Agreement

log = logging.getLogger(__name__)


class Told(NamedTuple):
    """What a rank says of an interval: seconds a step, and whether somebody asks all for a profile.

    `compute` is NaN where it is not known: a profiler was running, or no part of a step is the rank's own.
    """

    node: str
    compute: float
    data: float
    communication: float
    asks: bool


class Stragglers:
    """Compares ranks at the end of each log interval. The same calls on all ranks.

    Args:
        agreement: the host group of the training thread.
        parts: the parts of a step that are a rank's own computing.
        every: steps of an interval.
        factor: times the median from which a rank counts as slow; None: ranks are not compared.
        intervals: how many in a row it must be slow to be named.
    """

    def __init__(
        self, agreement: Agreement, parts: tuple[str, ...], every: int, factor: float | None, intervals: int
    ) -> None:
        self._agreement, self._parts, self._every = agreement, parts, every
        self._factor, self._intervals = factor, intervals
        self._node = socket.gethostname()
        self._slow: dict[int, int] = {}  # rank -> intervals in a row
        self._forget()

    def _forget(self) -> None:
        self._steps, self._compute, self._data, self._communication = 0, 0.0, 0.0, 0.0

    def after(
        self, step: int, seconds: dict[str, float], waited_s: float, asks: Callable[[], bool]
    ) -> tuple[dict[str, Any], bool]:
        """After each step: its row's entries, and whether a rank asks for a profile (at ends of intervals).

        `seconds`: the step's, by part, {} where a profiler was running. `waited_s`: for data.
        """
        self._steps += 1
        self._data += waited_s
        self._communication += seconds.get("communication", 0.0)
        own = sum(seconds.get(part, math.nan) for part in self._parts) if self._parts else math.nan
        self._compute += own
        if step % self._every:
            return {}, False
        if self._factor is None or self._agreement.world == 1:
            self._forget()
            return {}, bool(self._agreement.maximum(int(asks())))
        n = self._steps
        told = self._agreement.gather(
            Told(self._node, self._compute / n, self._data / n, self._communication / n, asks())
        )
        self._forget()
        told = [Told(*one) for one in told]
        return self._judge(told, step), any(one.asks for one in told)

    def _judge(self, told: list[Told], step: int) -> dict[str, Any]:
        """The interval's entries of the row; names a rank that has been slow for long, once."""
        waits = max(range(len(told)), key=lambda rank: told[rank].data)
        found: dict[str, Any] = {
            "data_rank": waits,
            "data_node": told[waits].node,
            "data_s": round(told[waits].data, 4),
        }
        known = {rank: one.compute for rank, one in enumerate(told) if not math.isnan(one.compute)}
        median = statistics.median(known.values()) if len(known) == len(told) else 0.0
        if median > 0:
            slowest = max(known, key=lambda rank: known[rank])
            one = told[slowest]
            found |= {
                "rank": slowest,
                "node": one.node,
                "ratio": round(one.compute / median, 3),
                "compute_s": round(one.compute, 4),
                "median_s": round(median, 4),
                "waits_s": round(one.data + one.communication, 4),
            }
            self._count({rank for rank, own in known.items() if own > (self._factor or math.inf) * median})
            self._say(told, median, step)
        return {"straggler": found}

    def _count(self, slow: set[int]) -> None:
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank in slow}

    def _say(self, told: list[Told], median: float, step: int) -> None:
        for rank, intervals in self._slow.items():
            if intervals == self._intervals and self._agreement.rank == 0:
                one = told[rank]
                log.warning(
                    "step %d: rank %d on %s has been slow for %d steps: it computes %.1f times as long as "
                    "the median rank (%.3g s against %.3g s a step, waits left out); look at that node",
                    *(step, rank, one.node, intervals * self._every),
                    *(one.compute / median, one.compute, median),
                )
