"""Profiles of a few steps: a trace, the most expensive operators by pass and layer, memory.

  RUN/profiles/step_00000100/rank_00000.trace.json.gz   for chrome://tracing or Perfetto
  RUN/profiles/step_00000100/rank_00000.txt             where the time went, operators (operators.py)
  RUN/profiles/step_00000100/rank_00000.memory.pickle   on CUDA: what its allocator did, for memory_viz
  RUN/profiles/step_00000100/rank_00000.memory.json     on a CPU: what was alive at the worst moment

The steps are those of `profile.steps`, or, when somebody makes a file RUN/PROFILE, the next few. No number of
the run depends on it, and none of its failures ends the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wm_ds.config.schema import Config
from wm_ds.distributed.process_group import World
from wm_ds.errors import one_line
from wm_ds.files import temporary, write_json
from wm_ds.model.modeling import WhiteMatterPreTrainedModel
from wm_ds.model.spans import name_parts, span
from wm_ds.plan.storage_tracker import StorageTracker

log = logging.getLogger(__name__)
REQUEST = "PROFILE"
FEW = 3  # steps of a profile on demand
HISTORY = 200_000  # events of the allocator that are kept
ROOT = str(Path(__file__).parents[2])


class Profiles:
    """Profiles of a run on this rank. Call `before` and `after` around every step, on all ranks."""

    def __init__(self, config: Config, lm: nn.Module, world: World) -> None:
        self._settings, self._lm, self._world = config.profile, lm, world
        self._run, self._compiles = Path(config.run.dir), config.compile
        self._here = world.rank in config.profile.ranks
        self._spans = [range(0)]
        if config.profile.steps is not None:
            self._spans = [range(config.profile.steps[0], config.profile.steps[1] + 1)]
        self._due = range(0)
        """The steps that are being profiled."""
        self._first = 0
        self._profiler: Any = None
        self._tracing = False
        self._tracker: StorageTracker | None = None
        self._named: list[Any] = []

    def requested(self) -> bool:
        """Rank 0: whether somebody has made RUN/PROFILE since the last call, which takes it away."""
        if not self._world.is_main:
            return False
        try:
            (self._run / REQUEST).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("%s cannot be removed (%s): no profile", self._run / REQUEST, error.strerror)
            return False
        return True

    def request(self, step: int) -> None:
        """Profile the next few steps after `step`. On all ranks."""
        self._spans = [*self._spans[:1], range(step + 1, step + 1 + FEW)]
        log.info("profile: steps %d to %d", step + 1, step + FEW)

    @property
    def active(self) -> bool:
        """Whether this rank is being profiled."""
        return self._profiler is not None or self._tracker is not None

    def before(self, step: int) -> None:
        """A step begins."""
        if not self._here:
            return
        if step not in self._due:
            self._due = next((steps for steps in self._spans if step in steps), range(0))
        if not self._due:
            return
        with self._unless_it_fails(step):
            tracks = self._settings.memory and self._world.device.type == "cpu" and not self._compiles
            alone = len(self._due) == 1
            last = step == self._due[-1]
            self._first = self._first or step
            if self._profiler is None and (alone or not (tracks and last)):
                self._start()
            if tracks and last:
                if not alone:  # by itself: the tracker would be most of the trace
                    self._stop_trace()
                self._tracker = StorageTracker(self._lm.parameters())
                self._tracker.__enter__()

    def after(self, step: int) -> None:
        """The step has ended; what was profiled is written once the last one has."""
        if self.active and step == self._due[-1]:
            with self._unless_it_fails(step):
                self._finish(step)

    @contextlib.contextmanager
    def _unless_it_fails(self, step: int) -> Any:
        try:
            yield
        except Exception as error:  # torch's, kineto's, the disk's: the run is not at stake
            what = one_line(str(error)) or type(error).__name__
            log.warning("step %d: no profile of rank %d: %s; training goes on", step, self._world.rank, what)
            self._give_up()

    def _start(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            if self._settings.memory:
                torch.cuda.memory._record_memory_history(max_entries=HISTORY)
        self._profiler = torch.profiler.profile(activities=activities)
        name_parts(True)
        if (
            not isinstance(self._lm, WhiteMatterPreTrainedModel) and not self._compiles
        ):  # a hook compiles anew
            self._named = _name_layers(self._lm)
        self._profiler.start()
        self._tracing = True

    def _stop_trace(self) -> None:
        """The profiler ends, if it runs; what it has seen is kept for `_finish`."""
        name_parts(False)
        for handle in self._named:
            handle.remove()
        self._named = []
        if self._tracing:
            self._tracing = False
            if self._world.device.type == "cuda":
                torch.cuda.synchronize()
            self._profiler.stop()

    def _finish(self, step: int) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.__exit__(None, None, None)
        self._stop_trace()
        profiler, self._profiler = self._profiler, None
        first, self._first = self._first, 0
        folder = self._run / "profiles" / f"step_{first:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"rank_{self._world.rank:05d}"
        if profiler is not None:
            last = step - (tracker is not None and step > first)
            trace = folder / f"{name}.trace.json"
            _write(trace, profiler.export_chrome_trace)
            on = self._world.device.type
            title = f"steps {first} to {last}, rank {self._world.rank} of {self._world.size}, on {on}"
            _describe(trace, folder / f"{name}.txt", title, last - first + 1)
        if tracker is not None:
            write_json(folder / f"{name}.memory.json", _peak(tracker, step), indent=1)
        elif self._settings.memory and self._world.device.type == "cuda":
            _write(folder / f"{name}.memory.pickle", torch.cuda.memory._dump_snapshot)
            torch.cuda.memory._record_memory_history(enabled=None)
        log.info("profile of steps %d to %d: %s", first, step, folder)

    def _give_up(self) -> None:
        """Leave no profiler behind, whatever state it is in."""
        with contextlib.suppress(Exception):
            if self._tracker is not None:
                self._tracker.__exit__(None, None, None)
        with contextlib.suppress(Exception):
            self._stop_trace()
        with contextlib.suppress(Exception):
            if self._world.device.type == "cuda":
                torch.cuda.memory._record_memory_history(enabled=None)
        self._profiler = self._tracker = None
        self._first, self._due, self._spans = 0, range(0), [range(0)]


def _write(path: Path, write: Callable[[str], object]) -> None:
    """A file that a library writes, under its name once it is whole."""
    part = temporary(path)
    try:
        write(str(part))
        if not part.stat().st_size:
            raise OSError(f"{path}: nothing was written")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _describe(trace: Path, output: Path, title: str, steps: int) -> None:
    """Have the table made of a trace, and the trace compressed, by a process beside the run."""
    command = [sys.executable, "-m", "wm_ds.plan.operators", str(trace), "--output", str(output)]
    command += ["--title", title, "--steps", str(steps), "--compress"]
    process = subprocess.Popen(
        ["nice", "-n", "19", *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))},
        text=True,
    )
    threading.Thread(target=_wait, args=(process, trace), name="profile", daemon=True).start()


def _wait(process: subprocess.Popen[str], trace: Path) -> None:
    said = process.communicate()[1].strip()
    if process.returncode:
        what = one_line(said[-300:]) or f"it ended with {process.returncode}"
        log.warning("no table of %s: %s; training goes on", trace, what)


def _peak(tracker: StorageTracker, step: int) -> dict[str, Any]:
    """Bytes that the step made, by what they are; parameters and optimizer states are not among them."""
    return {
        "step": step,
        "peak_bytes": tracker.peak,
        "at_peak_bytes": dict(tracker.at_peak),
        "left_bytes": tracker.total,
    }


def _name_layers(lm: nn.Module) -> list[Any]:
    """Name the layers of a model whose code is not ours; handles that end it."""
    handles: list[Any] = []
    for index, layer in enumerate(lm.get_submodule("model").layers):
        opened: list[Any] = []

        def enter(*_: Any, index: int = index, opened: list[Any] = opened) -> None:
            opened.append(span("layer", index))
            opened[-1].__enter__()

        def leave(*_: Any, opened: list[Any] = opened) -> None:
            if opened:
                opened.pop().__exit__(None, None, None)

        handles += [layer.register_forward_pre_hook(enter), layer.register_forward_hook(leave)]
    return handles
