"""What a run is trained with at each step: written down at a start, compared at the next.

A record is a list of stages in JSON types, each with its steps and with all that decides what a step trains
on. Stages may be cut, added or renamed: what counts is what holds at a step. Steps that have been taken must
stay what they were; whatever lies in the future may change, and is told step by step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from wm_ds.config.schema import PASSES
from wm_ds.config.stages import Past, Plan

# The content of the packed data at a path, as a checksum; None where there is none.
Content = Callable[[str], str | None]
Record = list[dict[str, Any]]
OF_DATA = ("data.train", "data.seq_len", "batch.global_batch")  # what the place in the data follows from


@dataclass(frozen=True)
class Difference:
    """What two records say differently of steps `first` to `last`: the key, as a refusal, as a change."""

    first: int
    last: int
    key: str
    refusal: str
    change: str


def record(plan: Plan, content: Content, contents: Sequence[str | None] | None = None) -> Record:
    """What a plan trains with. `contents`: of the run's own sources, where they are known already."""
    found = []
    own = plan.config.data.sources()
    for stage in plan.stages:
        config, sources = stage.config, stage.config.data.sources()
        known = contents if contents and [s.path for s in sources] == [s.path for s in own] else None
        found.append(
            {
                "first": stage.first,
                "last": stage.last,
                "until": stage.until,
                "data": [
                    {
                        "path": source.path,
                        "weight": source.weight,
                        "content": content(source.path) if known is None else known[i],
                    }
                    for i, source in enumerate(sources)
                ],
                "with": {
                    **{f"model.{name}": getattr(config.model, name) for name in PASSES},
                    "data.seq_len": stage.seq_len,
                    "batch.global_batch": config.batch.global_batch,
                    "freeze": config.freeze,
                    "lr_factor": stage.lr_factor,
                },
            }
        )
    return found


def over(known: Record, step: int) -> Past:
    """The ends of the stages that are over at `step`."""
    return [(stage["until"], stage["last"]) for stage in known if stage["last"] <= step]


def differences(before: Record, now: Record) -> Iterator[Difference]:
    """What differs of the steps that both have, in their order."""
    for there in before:
        for here in now:
            first = max(there["first"], here["first"])
            last = min(there["last"], here["last"])
            if first > last:
                continue
            for key in {**there["with"], **here["with"]}:
                old, new = there["with"].get(key), here["with"].get(key)
                if old != new:
                    yield Difference(
                        first,
                        last,
                        key,
                        f"{key} is {old!r} there and {new!r} here",
                        f"{key}: {old!r} -> {new!r}",
                    )
            for refusal, change in _of_data(there["data"], here["data"]):
                yield Difference(first, last, "data.train", refusal, change)


def _of_data(old: list[dict], new: list[dict]) -> Iterator[tuple[str, str]]:
    """By content: the same rows are the same data under any path."""
    if [source["weight"] for source in old] != [source["weight"] for source in new]:
        there, here = (", ".join(f"{s['path']} x {s['weight']:g}" for s in sources) for sources in (old, new))
        yield f"data.train is {there} there and {here} here", f"data.train: {there} -> {here}"
        return
    for source, other in zip(old, new, strict=True):
        path, same_place = other["path"], os.path.realpath(source["path"]) == os.path.realpath(other["path"])
        if source["content"] == other["content"] or (source["content"] is None and same_place):
            continue
        again = "it was packed again since" if path == source["path"] else f"from {source['path']}"
        yield (
            f"data.train: {path} holds other rows than the run was trained on so far ({again})",
            f"data.train: {source['path']} -> {path}",
        )


def refusals(before: Record, now: Record, step: int, keys: Sequence[str] | None = None) -> list[str]:
    """What a plan says differently of steps up to `step`, which have been taken; a line each. `keys`: only of
    these."""
    several = len(before) > 1 or len(now) > 1
    return [
        (f"steps {found.first} to {min(found.last, step)}: " if several else "") + found.refusal
        for found in differences(before, now)
        if found.first <= step and (keys is None or found.key in keys)
    ]


def changes(before: Record, now: Record, step: int) -> list[str]:
    """What a plan says differently of the steps after `step`, and of the run's length; a line each."""
    lines = [
        f"steps {max(found.first, step + 1)} to {found.last}: {found.change}"
        for found in differences(before, now)
        if found.last > step
    ]
    old, new = before[-1]["last"], now[-1]["last"]
    if old != new:
        lines.append(f"steps of the run: {old} -> {new}")
    return lines
