"""How fast each schedule reaches exact evaluation: the paper's Figure 5 and Appendix B for a trained model.

    python tools/measure_convergence.py DIR --data PACKED [--sequences 8] [--output convergence]

For every schedule (cyclic with each number of groups, of which one is Jacobi; chunked and wavefront with each
chunk; all of them also with relaxation, and from each start): the smallest number of passes whose held-out
perplexity is within --within (1%) of exact autoregressive evaluation, what these passes cost in FLOPs, in
sequential steps and in time on this machine, and how that compares with Jacobi and with exact evaluation.
Writes OUTPUT.json (all passes and residuals) and OUTPUT.png (excess perplexity by passes), and prints the
table; with --every-pass a second one, of the excess after each of --max-passes passes.

A layerwise start's sweep is no pass, but its FLOPs, its step and its time are counted. FLOPs are counted on
the meta device, without the head; attention counts as half of T x T (count_flops.py).
"""

import argparse
import io
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any


def parser() -> argparse.ArgumentParser:
    """The command line's options."""
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("source", type=Path, metavar="RUN_OR_FOLDER")
    found.add_argument("--data", type=Path, help="packed data (default: the run's; needed for a folder)")
    found.add_argument("--sequences", type=int, default=8, help="held-out sequences (default 8)")
    found.add_argument("--groups", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    found.add_argument("--chunks", type=int, nargs="*", default=[64, 128])
    found.add_argument(
        "--relaxation", type=float, default=0.8, help="also with this (default 0.8; 1 for none)"
    )
    found.add_argument(
        "--starts",
        nargs="+",
        choices=["embedding", "layerwise", "layerwise-embedding"],
        default=["embedding", "layerwise"],
        help="of the iteration; in a layerwise one the newest state, or the embedding, stands in for missing "
        "ones (default: embedding layerwise)",
    )
    found.add_argument("--every-pass", action="store_true", help="go on to --max-passes in any case")
    found.add_argument("--max-passes", type=int, default=16, help="give up after so many (default 16)")
    found.add_argument("--within", type=float, default=0.01, help="of exact perplexity (default 0.01)")
    found.add_argument("--output", type=Path, default=Path("convergence"), help="path without its ending")
    return found


if __name__ == "__main__":  # before the imports that take seconds, so that --help need not wait for them
    parser().parse_args()

import torch

from tools.count_flops import Account, count, forward
from wm_ds import trained
from wm_ds.data.sequences import PackedSequences, evaluation_batches
from wm_ds.errors import run_cli
from wm_ds.evaluate import perplexity as evaluate
from wm_ds.families import has_passes
from wm_ds.files import write_atomically, write_json
from wm_ds.model import EMBEDDING, LAYERWISE, Schedule, Start
from wm_ds.model.work import pass_counts

STARTS = {
    "embedding": EMBEDDING,
    "layerwise": LAYERWISE,
    "layerwise-embedding": Start("layerwise", "embedding"),
}


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    return run_cli(run, argv)


def run(argv: list[str] | None = None) -> None:
    """The command, its errors as exceptions."""
    args = parser().parse_args(argv)
    options = vars(args)
    output = options.pop("output")
    question = Question(**options)
    report = measure(question)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_json(output.with_suffix(".json"), report, indent=2)
    draw(report, output.with_suffix(".png"))
    print(table(report))
    if question.every_pass:
        print(pass_table(report))
    print(f"{output.with_suffix('.json')} {output.with_suffix('.png')}")


@dataclass(frozen=True)
class Question:
    """What is to be measured: see the command line's options of the same names."""

    source: Path
    data: Path | None
    sequences: int
    groups: list[int]
    chunks: list[int]
    relaxation: float
    starts: list[str]
    every_pass: bool
    max_passes: int
    within: float


def measure(question: Question) -> dict[str, Any]:
    """All schedules, as data."""
    for name in ("sequences", "max_passes"):
        if getattr(question, name) < 1:
            raise evaluate.EvaluationError(f"--{name.replace('_', '-')} must be at least 1")
    source = trained.find(question.source)
    if question.data is None and source.run_dir is None:
        raise evaluate.EvaluationError(
            f"{question.source} is an exported folder; say with --data which data to use"
        )
    rows = PackedSequences(question.data or source.run.data.sources()[0].path, "holdout")
    device = evaluate.alone().device
    model = source.load(torch.float32, device)
    if not has_passes(model.config):
        raise evaluate.EvaluationError(f"{question.source} is a model without passes")
    model.config.use_cache = False
    bench = Bench(model, source.on_meta().eval(), rows, min(question.sequences, len(rows)), device)
    exact = bench.run(Schedule.exact())
    exact["flops"] = bench.flops(Schedule.exact())
    report: dict[str, Any] = {
        "source": str(source.path),
        "sequences": bench.sequences,
        "length": rows.seq_len,
        "within": question.within,
        "exact": exact,
        "schedules": [],
    }
    for name, make in families(question, rows.seq_len):
        print(f"{name} …", file=sys.stderr, flush=True)
        report["schedules"].append(converge(bench, name, make, exact, question))
    jacobi = next((s for s in report["schedules"] if s["name"] == "Jacobi"), None)
    for entry in report["schedules"]:
        reached = entry["reached"]
        if reached:
            reached["speedup_over_exact"] = exact["seconds"] / reached["seconds"]
            if jacobi and jacobi["reached"]:
                reached["speedup_over_jacobi"] = jacobi["reached"]["seconds"] / reached["seconds"]
    return report


class Bench:
    """Runs schedules over the same sequences, one by one as in prefilling, and counts what they cost."""

    def __init__(
        self, model: Any, on_meta: Any, rows: PackedSequences, sequences: int, device: torch.device
    ) -> None:
        self.model, self.on_meta, self.rows, self.sequences, self.device = (
            model,
            on_meta,
            rows,
            sequences,
            device,
        )

    def run(self, schedule: Schedule) -> dict[str, Any]:
        """Perplexity, seconds a sequence, and sequential steps."""
        batches = list(evaluation_batches(self.rows, 0, 1, 1, self.sequences))
        start = time.perf_counter()
        loss, _ = evaluate.mean_loss(self.model, batches, schedule, self.device)
        seconds = (time.perf_counter() - start) / self.sequences
        return {
            "passes": schedule.passes,
            "perplexity": math.exp(loss),
            "seconds": seconds,
            "steps": pass_counts(schedule, self.rows.seq_len, gradient=False).steps,
        }

    @torch.no_grad()
    def residuals(self, schedule: Schedule) -> list[float]:
        """How far each pass moved the pool, relative, as the mean over sequences.

        A run of its own, with a cache: without one the last pass leaves out the entries that nothing reads.
        """
        inner = self.model.model
        inner.measure_residuals = True
        total = torch.zeros(schedule.passes, device=self.device)
        for batch in evaluation_batches(self.rows, 0, 1, 1, self.sequences):
            inputs = {name: batch[name].to(self.device) for name in ("input_ids", "document_ids")}
            inner(**inputs, schedule=schedule, use_cache=True)
            total += inner.residuals / self.sequences
        inner.measure_residuals = False
        return total.tolist()

    @torch.no_grad()
    def flops(self, schedule: Schedule) -> float:
        """FLOPs of one sequence, all positions' final states included."""
        length = self.rows.seq_len
        return count(
            lambda: forward(self.on_meta, length, schedule=schedule, use_cache=False), Account(length / 2)
        )


def families(question: Question, length: int) -> Iterator[tuple[str, Any]]:
    """(name, passes -> schedule) of everything to be measured."""
    for start, relaxation in product(question.starts, dict.fromkeys([1.0, question.relaxation])):
        note = "" if relaxation == 1.0 else f", relaxed {relaxation:g}"
        note += "" if start == "embedding" else f", {start} start"
        how = {"relaxation": relaxation, "start": STARTS[start]}
        for groups in question.groups:
            if groups <= length:
                name = "Jacobi" if groups == 1 else f"cyclic g={groups}"
                yield name + note, lambda n, g=groups, how=how: Schedule.cyclic(g, n, **how)
        for kind, chunk, groups in product(("chunked", "wavefront"), question.chunks, question.groups):
            if 1 < groups <= chunk < length:
                make = getattr(Schedule, kind)
                yield (
                    f"{kind} {chunk} g={groups}{note}",
                    lambda n, c=chunk, g=groups, how=how, make=make: make(c, g, n, **how),
                )


def converge(bench: Bench, name: str, make: Any, exact: dict[str, Any], question: Question) -> dict[str, Any]:
    """Passes 1, 2, … until the perplexity is near enough, or --max-passes."""
    passes, reached = [], None
    for number in range(1, question.max_passes + 1):
        result = bench.run(make(number))
        result["excess"] = result["perplexity"] / exact["perplexity"] - 1
        passes.append(result)
        if reached is None and abs(result["excess"]) <= question.within:
            reached = result | {"flops": bench.flops(make(number))}
        if reached and not question.every_pass:
            break
    residuals = bench.residuals(make(len(passes)))
    return {"name": name, "reached": reached, "passes": passes, "residuals": residuals}


def pass_table(report: dict[str, Any]) -> str:
    """Excess over exact perplexity after each pass, one line a schedule."""
    most = max(len(entry["passes"]) for entry in report["schedules"])
    lines = ["", f"{'excess after passes':<46}" + "".join(f"{n:>9}" for n in range(1, most + 1))]
    for entry in report["schedules"]:
        cells = "".join(f"{result['excess']:>+9.2%}" for result in entry["passes"])
        lines.append(f"{entry['name']:<46}{cells}")
    return "\n".join(lines)


def table(report: dict[str, Any]) -> str:
    """One line a schedule."""
    exact, length = report["exact"], report["length"]
    columns = [("passes", 7), ("steps", 7), ("GFLOP", 9), ("s", 9), ("excess", 9)]
    columns += [("vs Jacobi", 11), ("vs exact", 10)]
    lines = [
        f"{report['source']}: {report['sequences']} sequences of {length}, exact perplexity "
        f"{exact['perplexity']:.3f} ({length} steps, {exact['seconds']:.3f} s)",
        f"{'schedule':<46}" + "".join(f"{name:>{width}}" for name, width in columns),
    ]
    for entry in report["schedules"]:
        r = entry["reached"]
        if r is None:
            last = entry["passes"][-1]
            lines.append(
                f"{entry['name']:<46}  not within {len(entry['passes'])} ({last['excess']:+.1%} left)"
            )
            continue
        jacobi = f"{r['speedup_over_jacobi']:.2f}" if "speedup_over_jacobi" in r else "-"
        lines.append(
            f"{entry['name']:<46}{r['passes']:>7}{r['steps']:>7}{r['flops'] / 1e9:>9.2f}{r['seconds']:>9.3f}"
            f"{r['excess']:>+9.2%}{jacobi:>11}{r['speedup_over_exact']:>10.2f}"
        )
    return "\n".join(lines)


def draw(report: dict[str, Any], output: Path) -> None:
    """Excess perplexity and residual by number of passes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for index, entry in enumerate(report["schedules"]):
        style = {"color": f"C{index % 10}", "linestyle": "--" if "relaxed" in entry["name"] else "-"}
        points = [(p["passes"], max(abs(p["excess"]), 1e-6)) for p in entry["passes"]]
        left.plot(*zip(*points), marker="o", markersize=3, linewidth=1, label=entry["name"], **style)
        residuals = entry["residuals"]
        right.plot(range(1, len(residuals) + 1), residuals, marker="o", markersize=3, linewidth=1, **style)
    left.axhline(report["within"], color="gray", linewidth=0.8, linestyle=":")
    left.set_title("excess over exact perplexity", fontsize=10)
    right.set_title("relative change of the pool", fontsize=10)
    for axis in (left, right):
        axis.set_yscale("log")
        axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axis.set_xlabel("passes", fontsize=9)
        axis.grid(alpha=0.25)
    figure.legend(*left.get_legend_handles_labels(), fontsize=6, loc="center right")
    figure.tight_layout(rect=(0, 0, 0.82, 1))
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    pyplot.close(figure)
    write_atomically(output, picture.getvalue())


if __name__ == "__main__":
    sys.exit(main())
