"""Downstream tasks of a trained model: what `python -m wm_ds.evaluate lm-eval` does."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from wm_ds import trained
from wm_ds.distributed.process_group import World
from wm_ds.evaluate import harness
from wm_ds.evaluate.perplexity import DTYPES, EvaluationError, at_least_one, name_of
from wm_ds.evaluate.scheduled_lm import ScheduledLM
from wm_ds.families import has_passes
from wm_ds.model import Schedule

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Question:
    """What is to be scored; the options of `python -m wm_ds.evaluate lm-eval`.

    Attributes:
        source: run, checkpoint, or exported folder.
        tasks: the harness's names; "paper" is the paper's suite.
        data: folder of the tasks' data; None for the Hub.
        passes, groups: of cyclic passes; None for the model's.
        exact: exact autoregressive evaluation in the place of passes.
        limit: only the first so many documents of each task.
        batch: requests at a time.
    """

    source: Path
    tasks: list[str]
    step: int | None = None
    data: Path | None = None
    passes: int | None = None
    groups: int | None = None
    exact: bool = False
    limit: int | None = None
    batch: int = 8
    dtype: str = "float32"


def evaluate(question: Question, world: World) -> tuple[dict[str, Any], str]:
    """(results as data, as text). Raises WmError."""
    at_least_one(batch=question.batch, limit=question.limit, passes=question.passes, groups=question.groups)
    tasks = harness.find_tasks(question.tasks)
    if question.data is not None:
        for name in tasks:  # all of them before the first takes its hours
            harness.local_files(name, question.data)
    source = trained.find(question.source, question.step)
    model = source.load(DTYPES[question.dtype], world.device)
    schedule = scoring_schedule(model.config, question)
    tokenizer = AutoTokenizer.from_pretrained(source.tokenizer_dir(), trust_remote_code=True)
    lm = ScheduledLM(model, tokenizer, batch_size=question.batch, schedule=schedule)
    described = "one causal pass" if schedule is None else name_of(schedule)
    log.info("scoring %s: %s, %s", source.path, described, question.dtype)
    scores = harness.run(lm, tasks, data=question.data, limit=question.limit)
    report = {"source": str(source.path), "step": source.step, "schedule": described}
    report |= {"dtype": question.dtype, "limit": question.limit, "data": str(question.data or "Hub")}
    return report | asdict(scores), f"{source.path}: {described}\n{harness.table(scores)}"


def scoring_schedule(config: Any, question: Question) -> Schedule | None:
    """The schedule that was asked for, by default the one of the model's own forward in evaluation mode."""
    if not has_passes(config):
        if question.passes or question.groups or question.exact:
            raise EvaluationError("--passes, --groups and --exact are for models that iterate")
        return None
    if question.exact:
        return Schedule.exact()
    if question.passes is None and question.groups is None:
        return config.prefill_schedule()
    usual = config.prefill_schedule("cyclic")
    groups, passes = question.groups or usual.groups, question.passes or usual.passes
    return Schedule.cyclic(groups, passes, start=usual.start)
