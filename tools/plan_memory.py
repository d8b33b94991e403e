#!/usr/bin/env python3
"""What a run needs per GPU, before there is one.

    python tools/plan_memory.py configs/7b.yaml --gpus 64 --nodes 8 --gpu-memory 80
    python tools/plan_memory.py configs/7b.yaml --gpus 64 --nodes 8 --gpu-memory 80 --json

For every ZeRO stage, recomputation and micro-batch that is sensible: the peak per GPU in GiB by what it is
spent on, whether it fits, and what a step sends over the network; then a recommendation with the options that
make it. A run in stages is planned stage by stage; each one's micro-batch goes into that stage. States are
arithmetic; activations come from running the model on meta tensors (memory.py and activations.py in
wm_ds/plan say how and what is left out). Runs on any machine, without a GPU.

A node's host memory holds what is offloaded, for all its GPUs; with --host-memory, what needs more does not
fit. Building needs no whole model there: weights are drawn and placed one by one (engine/init_weights.py).
Writing a checkpoint in the background takes the optimizer's share again, where there is room
(docs/checkpoints.md).
"""

from __future__ import annotations

import argparse
import json
import sys

from wm_ds.errors import run_cli


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code: 0, 1 where nothing fits, 2 where the question was refused."""
    return run_cli(run, argv, refused=2)


def run(argv: list[str] | None = None) -> int:
    """Plan and print."""
    parser = argparse.ArgumentParser(
        description="Predicted peak memory per GPU for every way to run a configuration."
    )
    parser.add_argument("config", help="the run's YAML")
    parser.add_argument("overrides", nargs="*", metavar="section.field=value")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of the run")
    parser.add_argument(
        "--nodes", type=int, default=1, help="nodes they are spread over (default %(default)s)"
    )
    parser.add_argument("--gpu-memory", type=float, required=True, help="GB of one GPU")
    parser.add_argument("--host-memory", type=float, help="GB of one node's host memory for offload")
    parser.add_argument(
        "--length", type=int, help="tokens of a sequence (default: the packed data's, or 2048)"
    )
    parser.add_argument(
        "--vocabulary", type=int, help="tokens (default: model.vocab_size, the data's, or Qwen3's)"
    )
    parser.add_argument("--all", action="store_true", help="also list what does not fit")
    parser.add_argument("--json", action="store_true", help="everything as JSON, in bytes")
    options = vars(parser.parse_intermixed_args(argv))
    every, as_json = options.pop("all"), options.pop("json")

    # After parsing, so that --help need not wait for torch.
    from wm_ds.plan.choice import Answer, Question, table
    from wm_ds.plan.memory import Plan, plans
    from wm_ds.plan.way import recompute_policies

    question = Question(**options)
    answers: dict[str, Answer] = {}
    for name, run in question.runs().items():
        found: list[Plan] = []
        policies = recompute_policies(run.hf)
        for number, recompute in enumerate(policies, 1):
            at = f"({number} of {len(policies)}{f', {name}' if name else ''})"
            print(f"measuring activations, recompute = {recompute} {at}", file=sys.stderr, flush=True)
            found += plans(run, recompute)
        answers[name] = Answer(question, run, found)
        if not as_json:
            print(f"{name}:" if name else "", table(answers[name], every=every), sep="\n" if name else "")
    if as_json:
        reports = {name: answer.report() for name, answer in answers.items()}
        print(json.dumps(reports.get("", {"stages": list(reports.values())}), indent=2))
    return 0 if all(answer.best is not None for answer in answers.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
