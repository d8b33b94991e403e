"""Evaluate a trained model: `python -m wm_ds.evaluate perplexity|lm-eval RUN_OR_FOLDER …`.

`perplexity` is the held-out loss, weighted by tokens, for every number of passes up to `--passes`, for the
trained schedule, for passes until the pool stands still, and, on a few sequences, for exact autoregressive
evaluation beside the trained schedule on the same sequences. One loss is one sum over tokens in float64, so
neither the batch size nor the number of ranks matters. `lm-eval` runs downstream tasks, see harness.py.

`perplexity` is started alone or by torchrun, `lm-eval` alone. Exit codes: 0 done, 1 some task of `lm-eval`
failed (the others' scores are printed and written), 2 refused (the message says why).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from wm_ds.errors import run_cli

log = logging.getLogger("wm_ds.evaluate")


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line, evaluate, print; returns the exit code."""
    return run_cli(run, arguments, refused=2)


def run(arguments: list[str] | None = None) -> int:
    """What the command line asks for."""
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
    three = commands.add_parser("on-the-way", help="what a run that trains wants evaluated (evaluate.tasks)")
    three.add_argument("source", type=Path, nargs="?", metavar="RUN")
    three.add_argument("--parent", type=int, help="end when this process has, unless the run is done")
    three.add_argument("--cpu", action="store_true", help="leave the accelerators alone")
    three.add_argument("--check", action="store_true", help="only whether --tasks and their --data are there")
    three.add_argument("--tasks", nargs="+", default=[], help="with --check")
    three.add_argument("--data", type=Path, metavar="DIR", help="with --check")
    for command in (one, two):
        command.add_argument("--step", type=int, help="of a run: the checkpoint of this step, not the latest")
        command.add_argument("--batch", type=int, default=8, help="sequences at a time (default 8)")
        command.add_argument(
            "--dtype", choices=("bfloat16", "float32", "float64"), default="float32", help="default float32"
        )
        command.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers here")
    options = vars(parser.parse_args(arguments))
    wanted, output = options.pop("command"), options.pop("json", None)
    if wanted == "on-the-way":
        return on_the_way(**options)

    # After parsing, so that --help need not wait for torch.
    from wm_ds.distributed import log as terminal
    from wm_ds.distributed import process_group
    from wm_ds.evaluate import perplexity
    from wm_ds.files import write_json

    terminal.start("stderr")  # standard output is the table alone
    ranks = process_group.launch_size()[2]
    if wanted == "perplexity":
        world = process_group.init() if ranks > 1 else perplexity.alone()
        report = perplexity.evaluate(perplexity.Question(**options), world)
        text = perplexity.table(report)
    else:
        if ranks > 1:
            raise perplexity.EvaluationError(
                "lm-eval runs as one process on one device: start it without torchrun or srun, or split "
                "--tasks over several such processes"
            )
        from wm_ds.evaluate import tasks  # here, because the harness takes seconds to import

        world = perplexity.alone()
        report, text = tasks.evaluate(tasks.Question(**options), world)
    if world.is_main:
        print(text)
        if output:
            output.parent.mkdir(parents=True, exist_ok=True)
            write_json(output, report, indent=2)
    process_group.shutdown()
    failed = report.get("errors", {})
    for name, message in failed.items():
        log.error("error: task %s failed: %s", name, message)
    return 1 if failed else 0


def on_the_way(
    source: Path | None, parent: int | None, cpu: bool, check: bool, tasks: list[str], data: Path | None
) -> int:
    """Evaluate what a run wants; with `check`, see whether it could be. The exit code."""
    if cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
    from wm_ds.distributed import log as terminal
    from wm_ds.evaluate import beside, perplexity  # the harness takes seconds to import

    terminal.start("stderr")
    if check:
        beside.check(tasks, data)
        return 0
    if source is None or not (source / "config.yaml").is_file():
        raise perplexity.EvaluationError(f"{source or 'RUN'} is no run directory (no config.yaml)")
    beside.work(source, perplexity.alone(), parent)
    return 0


if __name__ == "__main__":
    sys.exit(main())
