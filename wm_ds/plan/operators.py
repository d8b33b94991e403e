"""Where a profiled step's time went: by part of the step, and the most expensive operators in these parts.

`python -m wm_ds.plan.operators TRACE.json[.gz]` prints both tables of a trace that a run has left in
RUN/profiles. Runs start it as a process of its own, at low priority: a trace holds hundreds of thousands of
events. Standard library only.

The trace has operators, and the names that the step gives to its parts (model/spans.py). Backward runs
without these names; an operator there belongs to the part whose forward made its node of autograd's graph:
both carry one number. With a GPU, an operator's time is that of the kernels that it has started.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wm_ds.errors import WmError, run_cli
from wm_ds.files import write_atomically

MOST = 20  # operators in the table
_PART = re.compile(r"(start|pass|group|layer|pool|head|forward|backward|optimizer|communication)( \d+)?")
_NODE = "autograd::engine::evaluate_function: "
_PHASES = ("optimizer", "communication", "backward", "forward")
_HOST = ("cpu_op", "user_annotation")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class TraceError(WmError):
    """The file is no trace of a profiler; the text names it."""


class Place(NamedTuple):
    """Where an operator ran; "" for what does not apply. Groups of a pass are taken together."""

    phase: str  # forward, backward, recompute, optimizer, communication, other
    turn: str  # start, pass 1, …
    part: str  # layer 0, pool, head

    def __str__(self) -> str:
        return f"{self.phase:<14}{self.turn:<9}{self.part:<10}"


Spent = dict[tuple[Place, str], tuple[float, int]]


@dataclass(eq=False)
class Call:
    """One event on the host; `own` microseconds are those of no event inside it."""

    name: str
    start: float
    end: float
    sequence: int
    external: int
    outer: Call | None
    own: float


def table(spent: Spent, *, steps: int) -> str:
    """Text of two tables, seconds a step; `spent` as `measure` gives it, of so many steps."""
    whole = sum(seconds for seconds, _ in spent.values()) or 1.0
    parts: dict[Place, float] = defaultdict(float)
    for (place, _), (seconds, _) in spent.items():
        parts[place] += seconds
    lines = [f"{whole / steps:.4g} s a step in operators, by part:", ""]
    lines += [f"{'share':>7}{'seconds':>11}  {'phase':<14}{'pass':<9}where"]
    for place, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        lines.append(f"{seconds / whole:>7.1%}{seconds / steps:>11.5f}  {place}".rstrip())
    lines += ["", f"the {MOST} most expensive operators, by pass and layer:", ""]
    lines += [f"{'share':>7}{'seconds':>11}{'calls':>8}  {'phase':<14}{'pass':<9}{'where':<10}operator"]
    ranked = sorted(spent.items(), key=lambda item: -item[1][0])
    for (place, name), (seconds, calls) in ranked[:MOST]:
        lines.append(f"{seconds / whole:>7.1%}{seconds / steps:>11.5f}{calls / steps:>8.0f}  {place}{name}")
    return "\n".join(lines) + "\n"


def measure(events: Iterable[dict[str, Any]]) -> Spent:
    """(place, operator) -> (seconds of its own, calls). `events`: those of a trace."""
    events = [event for event in events if event.get("ph") == "X"]
    calls = list(_calls(events))
    kernels = _kernel_times(events)
    origin = _forward_places(calls)
    spent: Spent = {}
    for call in calls:
        own = kernels.get(call.external, 0.0) if kernels else call.own
        if _PART.fullmatch(call.name) or own <= 0:
            continue
        key = (_place(call, origin), call.name.removeprefix(_NODE))
        seconds, count = spent.get(key, (0.0, 0))
        spent[key] = (seconds + own / 1e6, count + 1)
    return spent


def _calls(events: list[dict[str, Any]]) -> Iterator[Call]:
    """The host's events of all threads, each with the one that it lies in."""
    threads: dict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _HOST:
            threads[event["pid"], event["tid"]].append(event)
    for of_thread in threads.values():
        of_thread.sort(key=lambda event: (event["ts"], -event["dur"]))
        outer: Call | None = None
        for event in of_thread:
            start, end, more = event["ts"], event["ts"] + event["dur"], event.get("args", {})
            while outer is not None and outer.end <= start:
                outer = outer.outer
            numbers = (int(more.get("Sequence number", -1)), int(more.get("External id", -1)))
            call = Call(event["name"], start, end, *numbers, outer, event["dur"])
            if outer is not None:
                outer.own -= event["dur"]
            yield call
            outer = call


def _kernel_times(events: list[dict[str, Any]]) -> dict[int, float]:
    """Microseconds on the device by the operator that has started them; {} without a device."""
    times: dict[int, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in _DEVICE:
            times[int(event.get("args", {}).get("External id", -1))] += event["dur"]
    return times


def _forward_places(calls: list[Call]) -> dict[int, tuple[str, str]]:
    """Autograd's number of a node -> (pass, part) of the operator that made it: the last with this number."""
    places: dict[int, tuple[str, str]] = {}
    for call in sorted(calls, key=lambda call: call.start):
        if call.sequence >= 0 and not call.name.startswith(_NODE):
            names, node = _names(call)
            if node is None and "forward" in names:
                places[call.sequence] = _turn_and_part(names)
    return places


def _names(call: Call) -> tuple[list[str], Call | None]:
    """The parts that a call lies in, from the inside out, and the node of backward that runs it."""
    names: list[str] = []
    node, at = None, call
    while at is not None:
        if node is None and at.name.startswith(_NODE):
            node = at
        elif _PART.fullmatch(at.name):
            names.append(at.name)
        at = at.outer  # type: ignore[assignment]
    return names, node


def _turn_and_part(names: list[str]) -> tuple[str, str]:
    turn = next((n for n in names if n == "start" or n.startswith("pass ")), "")
    part = next((n for n in names if n.startswith("layer ") or n in ("pool", "head")), "")
    return turn, part


def _place(call: Call, origin: dict[int, tuple[str, str]]) -> Place:
    names, node = _names(call)
    phase = next((name for name in names if name in _PHASES), "other")
    turn, part = _turn_and_part(names)
    if phase != "backward" and node is None:
        return Place(phase, turn, part)
    if turn or part:  # named inside of backward: run again
        return Place("recompute", turn, part)
    return Place("backward", *origin.get(-1 if node is None else node.sequence, ("", "")))


def read(path: Path) -> list[dict[str, Any]]:
    """The events of a trace. Raises TraceError."""
    if path.is_fifo():
        raise TraceError(f"{path} is a pipe; give the trace's file")
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    except (ValueError, EOFError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is no trace of a profiler ({type(error).__name__})") from None


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(command, arguments)


def command(arguments: list[str] | None = None) -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m wm_ds.plan.operators", description="Where the time of a profiled step went."
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--steps", type=int, default=1, help="steps in the trace (default 1)")
    parser.add_argument("--title", help="the first line")
    parser.add_argument("--output", type=Path, help="write it here; default: print it")
    parser.add_argument("--compress", action="store_true", help="then replace the trace by TRACE.gz")
    options = parser.parse_args(arguments)
    text = table(measure(read(options.trace)), steps=max(1, options.steps))
    text = text if options.title is None else f"{options.title}\n\n{text}"
    if options.output is None:
        print(text, end="")
    else:
        write_atomically(options.output, text)
    if options.compress:
        write_atomically(f"{options.trace}.gz", gzip.compress(options.trace.read_bytes(), 6))
        options.trace.unlink()


if __name__ == "__main__":
    sys.exit(main())
