"""What a person sees of a run: progress on the terminal, metrics.jsonl, TensorBoard, trackers.

Rank 0 writes, from numbers that the step has already brought together; nothing here communicates.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wm_ds.config.stages import Plan, PlannedStage
from wm_ds.distributed import process_group
from wm_ds.distributed.log import duration
from wm_ds.distributed.process_group import World
from wm_ds.engine.compile import compile_seconds
from wm_ds.engine.engine import StepResult
from wm_ds.errors import describe, one_line
from wm_ds.plan.flops import Flops
from wm_ds.run import trackers

log = logging.getLogger(__name__)
# No curves: where a row belongs, and the router's map (a number for each channel and source).
NO_CURVE = ("attempt", "step", "samples", "router_share")
WINDOW = 20  # steps over which speed and ETA are averaged


class Metrics:
    """Sinks of one attempt of a run. On other ranks than 0 every method does nothing.

    Raises ConfigError where a configured sink is not installed (call `trackers.check` first, on all ranks).
    """

    def __init__(self, stages: Plan, *, attempt: int, world: World, begun: int = 0) -> None:
        """`begun`: the step that this attempt goes on from. What earlier ones said of later steps is void."""
        config = stages.config
        self.active, self.attempt, self.every, self._world = world.is_main, attempt, config.log.every, world
        self.total, self.staged, self.stage, self._begun = stages.total, stages.staged, 0, begun
        self._stages = stages.stages
        self.work: dict[str, float] = {}
        """Per step of the stage at hand, on one device: TFLOP, and shares of the device's peak."""
        self._times: deque[tuple[float, int]] = deque(maxlen=WINDOW + 1)
        self._compiles, self._compile_s = config.compile, 0.0
        self._tensorboard = self._live = None
        self._trackers: list[trackers.Tracker] = []
        if not self.active:
            return
        folder = self._folder = Path(config.run.dir)
        self._path = folder / "metrics.jsonl"
        self._seen_step = self._told = last_step(self._path)
        self._file: Any = None
        self._unwritten = False
        with contextlib.suppress(OSError):  # tried again for each row, which then says so
            self._open()
        if config.log.tensorboard:
            self._open_tensorboard(begun + 1 if self._seen_step > begun else None)
        self._trackers = trackers.open_trackers(config)
        if sys.stdout.isatty():
            self._live = _Live(self.total)

    def _open(self) -> None:
        # Append, line by line: an earlier attempt's rows stay, and a kill or a full disk costs at most a half
        # line, which readers drop.
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        self._halved = self._file.tell() > 0 and not _ends_with_newline(self._path)

    def start(self) -> None:
        """Speed is measured from here."""
        self._times.append((time.perf_counter(), 0))

    def enter(self, stage: PlannedStage, flops: Flops | None) -> None:
        """The steps to come are of a stage; `flops`: per token, None where not known."""
        self.stage, self.work = stage.index, {}
        if flops is not None:
            for name, per_token in (("model", flops.model), ("hardware", flops.hardware)):
                per_step = per_token * stage.positions / self._world.size
                self.work[f"{name}_tflops_per_device"] = per_step / 1e12
                peak = process_group.peak_flops(self._world.device)
                if peak is not None:
                    self.work[{"model": "mfu", "hardware": "hfu"}[name]] = per_step / peak
        if not self.active or not self.staged or stage.first <= self._begun:
            return
        batch = stage.config.batch.global_batch
        text = f"{stage.name}: steps {stage.first} to {stage.last}, {batch} x {stage.seq_len} tokens a step"
        log.info("%s", text)
        self._to_tensorboard(stage.first, lambda board: board.add_text("border", text, stage.first))
        if self._times:  # the steps before are no measure of these
            self.pause()

    def step(self, result: StepResult, *, total_tokens: int, data_s: float, extra: dict[str, Any]) -> None:
        """One row for a step. `extra`: rarer measurements, merged into the row."""
        if not self.active:
            return
        now = time.perf_counter()
        step_s = now - self._times[-1][0]
        self._times.append((now, result.tokens))
        span = now - self._times[0][0]
        tokens_per_s = sum(t for _, t in list(self._times)[1:]) / span
        eta_s = self._steps_left(result.step) * span / (len(self._times) - 1)
        steps_per_s = (len(self._times) - 1) / span
        row = self._row(result, steps_per_s) | {
            "tokens": total_tokens,
            "tokens_per_s": round(tokens_per_s, 1),
            "step_s": round(step_s, 4),
        }
        row["time"] = {"data": round(data_s, 4), **row["time"]}
        row.update(extra)
        self._write(row)
        self._scalars(row, result.step)
        text = (
            f"step {result.step:>{len(str(self.total))}}/{self.total}  loss {result.loss:.4f}  "
            f"grad {result.grad_norm:.3f}  lr {result.lr:.2e}  {tokens_per_s:,.0f} tokens/s  "
            f"ETA {duration(eta_s)}"
        )
        if result.skipped:
            log.info("step %d: skipped, %s; samples %s", result.step, result.skipped, result.samples)
        elif result.spike:
            log.info(
                "step %d: loss %.4f is %.1f sigma above its mean; samples %s",
                *(result.step, result.loss, result.spike, result.samples),
            )
        if self._live is not None:
            self._live.update(result.step, text)
        elif result.step % self.every == 0 or result.step in (1, self.total):
            log.info(text)

    def _steps_left(self, step: int) -> float:
        """Steps after `step`, each counted by its tokens: in those of the stage at hand."""
        left = [(s.last - max(s.first - 1, step)) * s.positions for s in self._stages if s.last > step]
        return sum(left) / self._stages[self.stage].positions

    def _row(self, result: StepResult, steps_per_s: float) -> dict[str, Any]:
        """What a step was, by itself."""
        row: dict[str, Any] = {
            "attempt": self.attempt,
            "step": result.step,
            "loss": result.loss,
            "stage": self.stage,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": 0,
            "tokens_per_s": 0.0,
            "step_s": 0.0,
            "time": {k: round(v, 4) for k, v in result.seconds.items()},
        }
        if result.step <= self._seen_step:  # a kill after the last checkpoint: these steps are taken again
            row["replayed"] = True
        for name, per_step in self.work.items():
            row[name] = float(f"{per_step * steps_per_s:.4g}")
        for name in ("skipped", "spike"):
            if getattr(result, name) is not None:
                row[name], row["samples"] = getattr(result, name), result.samples
        if self._compiles and (seconds := compile_seconds()) > self._compile_s:
            row["compile_s"] = round(seconds - self._compile_s, 1)
            log.info("step %d: %s s of it went into torch.compile", result.step, row["compile_s"])
            self._compile_s = seconds
        return row

    def evaluation(self, step: int, losses: dict[str, float], tokens: int, seconds: float) -> None:
        """One row for an evaluation: `holdout_loss` and what else was measured beside it."""
        if not self.active:
            return
        row = {"attempt": self.attempt, "step": step, **losses, "stage": self.stage}
        row.update(holdout_tokens=tokens, holdout_s=round(seconds, 3))
        self._write(row)
        self._scalars({k: v for k, v in row.items() if k in losses}, step)
        text = ", ".join(f"{k.replace('_', ' ')} {v:.4f}" for k, v in losses.items())
        log.info(f"step {step}: {text} ({tokens:,} tokens, {seconds:.1f} s)")
        # An evaluation's time is not a step's.
        if self._times:
            self._times = deque([(time.perf_counter(), 0)], maxlen=WINDOW + 1)

    def samples(self, step: int, texts: list[dict[str, str]], seconds: float) -> None:
        """Texts that the model wrote after `step` (evaluate/samples.py): a row of samples.jsonl."""
        if not self.active:
            return
        row = {"attempt": self.attempt, "step": step, "seconds": round(seconds, 1), "samples": texts}
        try:
            path = self._folder / "samples.jsonl"
            halved = path.exists() and path.stat().st_size > 0 and not _ends_with_newline(path)
            with open(path, "a", encoding="utf-8") as file:
                file.write("\n" * halved + json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            log.warning("step %d: its samples are lost: %s", step, describe(error))
        shown = "\n\n".join(f"**{one['prompt']}**{one['text']}" for one in texts)
        self._to_tensorboard(step, lambda board: board.add_text("samples", shown, step))
        log.info("step %d: %d samples (%.1f s)", step, len(texts), seconds)
        self.pause()

    def rolled_back(self, at: int, to: int, batches: tuple[int, int], number: int) -> None:
        """After step `at` the run has gone back to step `to` and leaves `batches` out: one row, with which
        rows of later steps so far are void. `number` counts the rollbacks of the run."""
        if not self.active:
            return
        log.info(
            "step %d: too many spikes in a row; back to the checkpoint of step %d, and batches %d to %d of "
            "the data are left out (rollback %d)",
            *(at, to, *batches, number),
        )
        done = {"at": at, "batches": list(batches), "number": number}
        self._write({"attempt": self.attempt, "step": to, "rollback": done})
        if self._tensorboard is not None:
            self._to_tensorboard(to, lambda board: board.close())
            self._open_tensorboard(purge_step=to + 1)
        self._begun, self._told = min(self._begun, to), max(self._told, at)
        self.pause()

    def _open_tensorboard(self, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._tensorboard = SummaryWriter(str(self._folder / "tensorboard"), purge_step=purge_step)
        except OSError as error:
            self._tensorboard = None
            log.warning("no TensorBoard in this attempt: %s", describe(error))

    def pause(self) -> None:
        """Leave what happened since the last step out of the speed (a checkpoint, say)."""
        self._times = deque([(time.perf_counter(), 0)], maxlen=WINDOW + 1)

    def close(self) -> None:
        """Flush and close every sink."""
        if not self.active:
            return
        if self._live is not None:
            self._live.close()
        with contextlib.suppress(OSError):  # a network file system's late answer: rows are no reason to fail
            if self._file is not None:
                self._file.close()
        if self._tensorboard is not None:
            try:
                self._tensorboard.close()
            except Exception as error:
                log.warning("TensorBoard's last points are lost: %s", one_line(str(error)))
        for tracker in self._trackers:
            tracker.close()

    def _write(self, row: dict[str, Any]) -> None:
        """Append a row. A disk that is full costs rows, and one line on the terminal, but not the run."""
        text = json.dumps(_finite(row), allow_nan=False).encode() + b"\n"
        try:
            if self._file is None:
                self._open()
            line = b"\n" * self._halved + text
            written = self._file.write(line) or 0
            if written < len(line):
                self._halved = True
                self._file.write(line[written:])
            self._halved = self._unwritten = False
        except OSError as error:
            if not self._unwritten:
                log.warning(
                    "metrics.jsonl: %s; training goes on, without rows from step %d on until there is room",
                    *(error.strerror, row["step"]),
                )
            self._unwritten = True

    def _scalars(self, row: dict[str, Any], step: int) -> None:
        flat = {k: v for k, v in _flatten(row) if k.partition("/")[0] not in NO_CURVE}
        self._to_tensorboard(
            step, lambda board: [board.add_scalar(name, value, step) for name, value in flat.items()]
        )
        if step > self._told:  # a step that is taken again keeps the numbers of its first time there
            self._trackers = [tracker for tracker in self._trackers if tracker.tell(flat, step)]

    # Whatever these libraries raise, and whatever their threads do: they are optional, the run is not.
    def _to_tensorboard(self, step: int, write: Callable[[Any], object]) -> None:
        if self._tensorboard is None:
            return
        try:
            write(self._tensorboard)
        except Exception as error:
            log.warning("step %d: no more TensorBoard in this attempt: %s", step, one_line(str(error)))
            self._tensorboard = None


class _Live:
    """rich's progress bar with a line of numbers, for terminals; what is logged meanwhile goes above it."""

    def __init__(self, total: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._progress = Progress(BarColumn(bar_width=24), TextColumn("{task.description}"))
        self._task = self._progress.add_task("starting", total=total)
        self._progress.start()

    def update(self, step: int, text: str) -> None:
        self._progress.update(self._task, completed=step, description=text)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._progress.stop()


def last_step(path: Path) -> int:
    """The highest step that has a row in `metrics.jsonl`, 0 where there is none. Half lines are skipped."""
    highest = 0
    if path.is_file():
        with open(path, "rb") as lines:  # bytes: damage in one line is no reason not to start
            for line in lines:
                if found := re.search(rb'"step": (\d+), "loss"', line):
                    highest = max(highest, int(found[1]))
    return highest


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: wherever they stand, they are written as text."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _flatten(row: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found += _flatten(value, f"{name}/")
        elif isinstance(value, list):
            found += _flatten({str(i): v for i, v in enumerate(value)}, f"{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found.append((name, value))
    return found


def _ends_with_newline(path: Path) -> bool:
    with open(path, "rb") as handle:
        handle.seek(-1, 2)
        return handle.read(1) == b"\n"
