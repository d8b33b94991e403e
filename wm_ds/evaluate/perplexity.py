"""Held-out perplexity by number of passes, and what the schedules are called.

One loss is one sum over tokens in float64, so neither the batch size nor the number of ranks matters.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wm_ds import trained
from wm_ds.data.sequences import PackedSequences, evaluation_batches
from wm_ds.distributed import process_group
from wm_ds.distributed.process_group import World
from wm_ds.engine.loss import IGNORE, TokenLoss
from wm_ds.errors import WmError
from wm_ds.families import has_passes
from wm_ds.model import Converged, Schedule

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class EvaluationError(WmError, ValueError):
    """What was asked for cannot be evaluated; the message is one line."""


@dataclass(frozen=True)
class Question:
    """What is to be evaluated; the options of `python -m wm_ds.evaluate perplexity`.

    Attributes:
        source: run, checkpoint, or exported folder.
        data: packed data; None for the run's.
        sequences: only the first so many of the split.
        passes: the largest number of passes; None for the trained one and one more.
        exact: sequences of the exact evaluation.
        tolerance: of the converged row.
        batch: sequences at a time.
    """

    source: Path
    step: int | None = None
    data: Path | None = None
    split: str = "holdout"
    sequences: int | None = None
    passes: int | None = None
    exact: int = 4
    tolerance: float = 1e-3
    batch: int = 8
    dtype: str = "float32"


@dataclass(frozen=True)
class Entry:
    """One row of the table: a schedule (None: one causal pass) on the first `sequences` of the split.

    `beside_exact`: one of the two rows that compare the trained schedule with exact evaluation.
    """

    name: str
    schedule: Schedule | Converged | None
    sequences: int
    as_trained: bool = False
    beside_exact: bool = False


def alone() -> World:
    """This process by itself, without a process group."""
    return World(0, 0, 1, *process_group.pick_device(0))


def at_least_one(**options: int | None) -> None:
    """Raises EvaluationError for an option that was given and is not positive."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise EvaluationError(f"--{name.replace('_', '-')} {value} must be at least 1")


def evaluate(question: Question, world: World) -> dict[str, Any]:
    """All rows of the table, as data. Collective. Raises WmError."""
    at_least_one(batch=question.batch, sequences=question.sequences, passes=question.passes)
    source = trained.find(question.source, question.step)
    if question.data is None and source.run_dir is None:
        raise EvaluationError(
            f"{question.source} is an exported folder; say with --data which packed data to use"
        )
    path = question.data or source.run.data.holdout or source.run.data.sources()[0].path
    rows = PackedSequences(path, question.split)
    model = source.load(DTYPES[question.dtype], world.device)
    model.config.use_cache = False
    if rows.vocab_size > model.config.vocab_size:
        raise EvaluationError(
            f"{path} was packed with {rows.vocab_size} tokens, the model's vocabulary is "
            f"{model.config.vocab_size}"
        )
    count = min(question.sequences or len(rows), len(rows))
    report: dict[str, Any] = {
        "source": str(source.path),
        "step": source.step,
        "data": str(path),
        "split": question.split,
        "sequences": count,
        "dtype": question.dtype,
        "unigram_entropy": unigram_entropy(rows),
        "rows": [],
    }
    for entry in entries(model.config, question, count):
        log.info("%s …", entry.name)
        start = time.perf_counter()
        batches = evaluation_batches(rows, world.rank, world.size, question.batch, entry.sequences)
        loss, tokens = mean_loss(model, batches, entry.schedule, world.device)
        report["rows"].append(
            {
                "schedule": entry.name,
                "kind": kind_of(entry.schedule),
                "as_trained": entry.as_trained,
                "beside_exact": entry.beside_exact,
                "passes": getattr(entry.schedule, "passes", None),
                "groups": getattr(entry.schedule, "groups", None),
                "sequences": entry.sequences,
                "tokens": tokens,
                "loss": loss,
                "perplexity": math.exp(loss),
                "seconds": round(time.perf_counter() - start, 3),
            }
        )
    return report


def entries(config: Any, question: Question, count: int) -> list[Entry]:
    """What to evaluate on `count` sequences. A model without passes has one row."""
    if not has_passes(config):
        return [Entry("one pass", None, count, as_trained=True)]
    training = config.training_schedule()
    if training.kind == "exact":
        return [Entry("exact", training, count, as_trained=True)]
    found, start = [], replace(training.start, grad=False)
    plain = training.kind == "cyclic" and training.factor(1) == 1.0
    for passes in range(1, (question.passes or training.passes + 1) + 1):
        schedule = Schedule.cyclic(training.groups, passes, start=start)
        is_trained = plain and passes == training.passes
        name = name_of(schedule) + (", as trained" if is_trained else "")
        found.append(Entry(name, schedule, count, is_trained))
    if not any(entry.as_trained for entry in found):
        found.append(Entry(name_of(training) + ", as trained", training, count, as_trained=True))
    converged = Converged(training.groups, question.tolerance, start=start)
    found.append(Entry(f"until converged to {question.tolerance:g}", converged, count))
    some = min(question.exact, count)
    if some > 0:
        found.append(Entry(f"as trained, on {some} sequences", training, some, True, True))
        found.append(Entry(f"exact, on {some} sequences", Schedule.exact(), some, beside_exact=True))
    return found


def kind_of(schedule: Schedule | Converged | None) -> str:
    """The schedule's kind in a report: "converged", "one pass" for a model without passes, or its own."""
    if schedule is None:
        return "one pass"
    return "converged" if isinstance(schedule, Converged) else schedule.kind


def name_of(schedule: Schedule | Converged) -> str:
    """A schedule in a few words."""
    start = ""
    if schedule.start.sweeps:
        missing = schedule.start.missing
        start = ", layerwise start" + ("" if missing == "newest" else f" ({missing})")
    if isinstance(schedule, Converged):
        return f"until converged to {schedule.tolerance:g}, g={schedule.groups}{start}"
    if schedule.kind == "exact":
        return "exact, one token after another"
    kind = "Jacobi" if schedule.kind == "cyclic" and schedule.groups == 1 else schedule.kind
    where = f" of {schedule.chunk}" if schedule.chunk else ""
    groups = f", g={schedule.groups}" if schedule.groups > 1 else ""
    factors = [f"{schedule.factor(turn):g}" for turn in range(1, schedule.passes)]
    relaxation = f", relaxation {', '.join(dict.fromkeys(factors))}" if set(factors) - {"1"} else ""
    passes = f"{schedule.passes} pass{'es' if schedule.passes > 1 else ''}"
    return f"{kind}{where}{groups}, {passes}{relaxation}{start}"


@torch.no_grad()
def mean_loss(
    model: Any,
    batches: Iterable[dict[str, Tensor]],
    schedule: Schedule | Converged | None,
    device: torch.device,
) -> tuple[float, int]:
    """(nats per token, tokens) over all ranks' batches. Collective."""
    loss = TokenLoss(model).eval()
    arguments = {} if schedule is None else {"schedule": schedule}
    total, tokens = 0.0, 0
    for batch in batches:
        inputs = {name: batch[name].to(device) for name in ("input_ids", "labels", "document_ids")}
        total += float(loss(**inputs, **arguments))
        tokens += int((batch["labels"] != IGNORE).sum())
    total, count = process_group.all_reduce_sum([total, float(tokens)], device)
    if not count:
        raise EvaluationError("the split has no token to predict")
    return total / count, int(count)


def unigram_entropy(rows: PackedSequences) -> float:
    """Entropy of the distribution of the split's targets, in nats: what knows only frequencies.

    No predictor that ignores the context can be better on these rows, so a loss below it has learned context.
    """
    counts = torch.zeros(rows.vocab_size, dtype=torch.float64)
    for i in range(len(rows)):
        labels_T = rows[i].labels
        counts += torch.bincount(labels_T[labels_T != IGNORE], minlength=rows.vocab_size)
    p = counts[counts > 0] / counts.sum()
    return float(-(p * p.log()).sum())


def table(report: dict[str, Any]) -> str:
    """The report for a terminal."""
    step = "" if report["step"] is None else f", step {report['step']}"
    lines = [
        f"{report['source']}{step}: {report['split']} of {report['data']}, {report['dtype']}",
        f"{'schedule':<44}{'sequences':>10}{'tokens':>12}{'loss':>10}{'perplexity':>13}{'seconds':>9}",
    ]
    for row in report["rows"]:
        lines.append(
            f"{row['schedule']:<44}{row['sequences']:>10,}{row['tokens']:>12,}{row['loss']:>10.4f}"
            f"{row['perplexity']:>13.3f}{row['seconds']:>9.1f}"
        )
    lines.append(f"unigram entropy of the whole split: {report['unigram_entropy']:.4f} nats")
    return "\n".join(lines)
