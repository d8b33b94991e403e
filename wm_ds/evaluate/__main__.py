"""Evaluate a trained model: `python -m wm_ds.evaluate perplexity|lm-eval RUN_OR_FOLDER …`.

`perplexity` is the held-out loss, weighted by tokens, for every number of passes up to `--passes`, for the
trained schedule, for passes until the pool stands still, and, on a few sequences, for exact autoregressive
evaluation beside the trained schedule on the same sequences. One loss is one sum over tokens in float64, so
neither the batch size nor the number of ranks matters. `lm-eval` runs downstream tasks, see harness.py.

`perplexity` is started alone or by torchrun, `lm-eval` alone. Exit codes: 0 done, 1 some task of `lm-eval`
failed (the others' scores are printed and written), 2 refused (the message says why).
"""

import argparse
import logging
import math
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wm_ds import trained
from wm_ds.data.sequences import PackedSequences, evaluation_batches
from wm_ds.distributed import log as terminal
from wm_ds.distributed import process_group
from wm_ds.distributed.process_group import World
from wm_ds.engine.loss import IGNORE, TokenLoss
from wm_ds.errors import WmError, run_cli
from wm_ds.files import write_json
from wm_ds.model import Converged, Schedule
from wm_ds.trained import has_passes

log = logging.getLogger("wm_ds.evaluate")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


class EvaluationError(WmError, ValueError):
    """What was asked for cannot be evaluated; the message is one line."""


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, evaluate, print; returns the exit code."""
    return run_cli(run, arguments, refused=2)


def run(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m wm_ds.evaluate", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("perplexity", help="held-out loss by number of passes")
    one.add_argument("source", type=Path, metavar="RUN_OR_FOLDER", help="run, checkpoint, or exported folder")
    one.add_argument("--data", type=Path, help="packed data (default: the run's; needed for a folder)")
    one.add_argument("--split", choices=("holdout", "train"), default="holdout")
    one.add_argument("--sequences", type=int, help="only the first so many of the split")
    one.add_argument(
        "--passes", type=int, help="largest number of passes (default: the trained one and one more)"
    )
    one.add_argument(
        "--exact", type=int, default=4, metavar="N", help="exact evaluation of N sequences (default 4)"
    )
    one.add_argument("--tolerance", type=float, default=1e-3, help="of the converged row (default 1e-3)")
    two = commands.add_parser("lm-eval", help="downstream tasks through lm-evaluation-harness")
    two.add_argument("source", type=Path, metavar="RUN_OR_FOLDER")
    two.add_argument(
        "--tasks", nargs="+", default=["paper"], help='task names; "paper" is the paper\'s suite'
    )
    two.add_argument("--data", type=Path, metavar="DIR", help="read the tasks' data here, not from the Hub")
    two.add_argument("--passes", type=int, help="cyclic passes (default: the model's; the paper's has 3)")
    two.add_argument("--groups", type=int, help="groups of a pass (default: the model's)")
    two.add_argument("--exact", action="store_true", help="exact autoregressive evaluation instead of passes")
    two.add_argument("--limit", type=int, help="only the first so many documents of each task")
    for command in (one, two):
        command.add_argument("--step", type=int, help="of a run: the checkpoint of this step, not the latest")
        command.add_argument("--batch", type=int, default=8, help="sequences at a time (default 8)")
        command.add_argument("--dtype", choices=sorted(DTYPES), default="float32", help="default float32")
        command.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    options = parser.parse_args(arguments)
    terminal.start("stderr")  # standard output is the table alone
    if options.command == "perplexity":
        world = process_group.init() if process_group.launch_size()[2] > 1 else alone()
        report = evaluate_perplexity(options, world)
        text = table(report)
    else:
        if process_group.launch_size()[2] > 1:
            raise EvaluationError(
                "lm-eval runs as one process on one device: start it without torchrun or srun, or split "
                "--tasks over several such processes"
            )
        world = alone()
        report, text = evaluate_tasks(options, world)
    if world.is_main:
        print(text)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            write_json(options.json, report, indent=2)
    process_group.shutdown()
    failed = report.get("errors", {})
    for name, message in failed.items():
        log.error("error: task %s failed: %s", name, message)
    return 1 if failed else 0


def alone() -> World:
    """This process by itself, without a process group."""
    return World(0, 0, 1, *process_group.pick_device(0))


# -- perplexity --------------------------------------------------------------------------------------------


def evaluate_perplexity(options: argparse.Namespace, world: World) -> dict[str, Any]:
    """All rows of the table, as data. Raises WmError."""
    for name in ("batch", "sequences", "passes"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise EvaluationError(f"--{name} {getattr(options, name)} must be at least 1")
    source = trained.find(options.source, options.step)
    if options.data is None and source.run_dir is None:
        raise EvaluationError(
            f"{options.source} is an exported folder; say with --data which packed data to use"
        )
    path = options.data or source.run.data.holdout or source.run.data.sources()[0].path
    rows = PackedSequences(path, options.split)
    model = source.load(DTYPES[options.dtype], world.device)
    model.config.use_cache = False
    if rows.vocab_size > model.config.vocab_size:
        raise EvaluationError(
            f"{path} was packed with {rows.vocab_size} tokens, the model's vocabulary is "
            f"{model.config.vocab_size}"
        )
    count = min(options.sequences or len(rows), len(rows))
    report: dict[str, Any] = {
        "source": str(source.path),
        "step": source.step,
        "data": str(path),
        "split": options.split,
        "sequences": count,
        "dtype": options.dtype,
        "unigram_entropy": unigram_entropy(rows),
        "rows": [],
    }
    for name, schedule, some in schedules(model.config, options, rows.seq_len, count):
        log.info("%s …", name)
        start = time.perf_counter()
        batches = evaluation_batches(rows, world.rank, world.size, options.batch, some)
        loss, tokens = mean_loss(model, batches, schedule, world.device)
        report["rows"].append(
            {
                "schedule": name,
                "passes": getattr(schedule, "passes", None),
                "groups": getattr(schedule, "groups", None),
                "sequences": some,
                "tokens": tokens,
                "loss": loss,
                "perplexity": math.exp(loss),
                "seconds": round(time.perf_counter() - start, 3),
            }
        )
    return report


def schedules(
    config: Any, options: argparse.Namespace, seq_len: int, count: int
) -> list[tuple[str, Schedule | Converged | None, int]]:
    """What to evaluate, as (name, schedule, sequences). A model without passes has one row."""
    if not has_passes(config):
        return [("one pass", None, count)]
    training = config.training_schedule()
    if training.kind == "exact":
        return [("exact", training, count)]
    most = options.passes or training.passes + 1
    found: list[tuple[str, Schedule | Converged | None, int]] = []
    for passes in range(1, most + 1):
        schedule = Schedule.cyclic(training.groups, passes)
        trained_so = training.kind == "cyclic" and training.factor(1) == 1.0 and passes == training.passes
        found.append((name_of(schedule) + (", as trained" if trained_so else ""), schedule, count))
    if not any("as trained" in name for name, *_ in found):
        found.append((name_of(training) + ", as trained", training, count))
    converged = Converged(training.groups, options.tolerance)
    found.append((f"until converged to {options.tolerance:g}", converged, count))
    some = min(options.exact, count)
    if some > 0:
        found.append((f"as trained, on {some} sequences", training, some))
        found.append((f"exact, on {some} sequences", Schedule.exact(), some))
    return found


def name_of(schedule: Schedule | Converged) -> str:
    """A schedule in a few words."""
    if isinstance(schedule, Converged):
        return f"until converged to {schedule.tolerance:g}, g={schedule.groups}"
    if schedule.kind == "exact":
        return "exact, one token after another"
    kind = "Jacobi" if schedule.kind == "cyclic" and schedule.groups == 1 else schedule.kind
    where = f" of {schedule.chunk}" if schedule.chunk else ""
    groups = f", g={schedule.groups}" if schedule.groups > 1 else ""
    factors = [f"{schedule.factor(turn):g}" for turn in range(1, schedule.passes)]
    relaxation = f", relaxation {', '.join(dict.fromkeys(factors))}" if set(factors) - {"1"} else ""
    return f"{kind}{where}{groups}, {schedule.passes} pass{'es' if schedule.passes > 1 else ''}{relaxation}"


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


# -- lm-eval -----------------------------------------------------------------------------------------------


def evaluate_tasks(options: argparse.Namespace, world: World) -> tuple[dict[str, Any], str]:
    """(results as data, as text) of downstream tasks. Raises WmError."""
    from transformers import AutoTokenizer

    from wm_ds.evaluate import harness  # here, because the harness takes seconds to import

    for name in ("batch", "limit", "passes", "groups"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise EvaluationError(f"--{name} {getattr(options, name)} must be at least 1")
    try:
        tasks = harness.find_tasks(options.tasks)
        if options.data is not None:
            for name in tasks:  # all of them before the first takes its hours
                harness.local_files(name, options.data)
        source = trained.find(options.source, options.step)
        model = source.load(DTYPES[options.dtype], world.device)
        schedule = scoring_schedule(model.config, options)
        tokenizer = AutoTokenizer.from_pretrained(source.tokenizer_dir(), trust_remote_code=True)
        lm = harness.ScheduledLM(model, tokenizer, batch_size=options.batch, schedule=schedule)
        described = "one causal pass" if schedule is None else name_of(schedule)
        log.info("scoring %s: %s, %s", source.path, described, options.dtype)
        scores = harness.run(lm, tasks, data=options.data, limit=options.limit)
    except harness.HarnessError as error:
        raise EvaluationError(str(error)) from None
    report = {"source": str(source.path), "step": source.step, "schedule": described, "dtype": options.dtype}
    report |= {"limit": options.limit, "data": str(options.data or "Hub"), **asdict(scores)}
    return report, f"{source.path}: {described}\n{harness.table(scores)}"


def scoring_schedule(config: Any, options: argparse.Namespace) -> Schedule | None:
    """The schedule that was asked for, by default the one of the model's own forward in evaluation mode."""
    if not has_passes(config):
        if options.passes or options.groups or options.exact:
            raise EvaluationError("--passes, --groups and --exact are for models that iterate")
        return None
    if options.exact:
        return Schedule.exact()
    if options.passes is None and options.groups is None:
        return config.prefill_schedule()
    usual = config.prefill_schedule("cyclic")
    return Schedule.cyclic(options.groups or usual.groups, options.passes or usual.passes)


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


if __name__ == "__main__":
    sys.exit(main())
