"""Which way to run: what fits into GPUs and hosts, what of it should be fastest, and the planner's table."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wm_ds.config.load import load
from wm_ds.config.schema import Config, ConfigError
from wm_ds.config.stages import plan as stages_of
from wm_ds.data.shards import MANIFEST, load_manifest
from wm_ds.engine.deepspeed_config import table_for
from wm_ds.families import model_config, on_meta
from wm_ds.plan.memory import GIB, RESERVE, Plan
from wm_ds.plan.way import VOCABULARY, Run, Way

SHORT = {
    "parameters": "params",
    "gathered parameters": "gathered",
    "gradients": "grads",
    "activations": "activ",
}
# To weigh recomputation against communication: an H100 at 40% of its bf16 peak, and what one GPU gets of the
# network between nodes (400 Gbit/s) or of NVLink inside one, in bytes a second.
FLOPS, BETWEEN_NODES, INSIDE_NODE = 4e14, 50e9, 300e9


@dataclass(frozen=True)
class Question:
    """What the planner is asked.

    Attributes:
        config: path of the run's YAML; `overrides` as for training.
        gpu_memory: GB of one GPU.
        host_memory: GB of one node's host memory; None for as much as needed.
        length, vocabulary: None for those of the packed data, or of a default.
    """

    config: str
    overrides: list[str]
    gpus: int
    nodes: int
    gpu_memory: float
    host_memory: float | None = None
    length: int | None = None
    vocabulary: int | None = None

    def runs(self) -> dict[str, Run]:
        """What is asked about, stage by stage, by names for a person; one without a name where the run has no
        stages. Raises ConfigError, OptimizerError."""
        for name in ("gpus", "nodes", "gpu_memory", "host_memory", "length", "vocabulary"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: must be positive")
        if self.gpus % self.nodes:
            raise ConfigError(f"--gpus {self.gpus} do not divide over --nodes {self.nodes}")
        config = load(self.config, self.overrides)
        length, vocabulary = self.sizes(config)
        stages = stages_of(config, length)
        names = [f"{s.name}, steps {s.first} to {s.last}" if stages.staged else "" for s in stages.stages]
        runs = [self._run(stage.config, stage.seq_len, vocabulary) for stage in stages.stages]
        return dict(zip(names, runs, strict=True))

    def _run(self, config: Config, length: int, vocabulary: int) -> Run:
        ranks = config.data_ranks(self.gpus)
        if config.batch.global_batch % ranks:
            config.batch.model_copy(update={"micro_batch": 1}).accumulation(ranks)
        hf = model_config(config.model, vocab_size=vocabulary, seq_len=length, eos_id=None)
        lm = on_meta(hf)
        return Run(config, hf, table_for(config, lm), length, self.gpus)

    def sizes(self, config: Config) -> tuple[int, int]:
        """Tokens of a sequence and of the vocabulary: as given, else from packed data that is there."""
        data = Path(config.data.sources()[0].path)
        known: dict[str, Any] = load_manifest(data) if (data / MANIFEST).exists() else {}
        return (
            self.length or int(known.get("seq_len", 2048)),
            self.vocabulary or config.model.vocab_size or int(known.get("vocab_size", VOCABULARY)),
        )

    @property
    def room(self) -> Room:
        """What may be used."""
        host = math.inf if self.host_memory is None else self.host_memory * 1e9
        return Room(self.gpu_memory * 1e9 * (1 - RESERVE), host, self.gpus // self.nodes)


@dataclass(frozen=True)
class Room:
    """Bytes to use: of one GPU, and of the host memory of a node with so many GPUs."""

    gpu: float
    host: float
    gpus_per_node: int

    def holds(self, plan: Plan) -> bool:
        """Whether a plan fits."""
        return plan.peak <= self.gpu and plan.host * self.gpus_per_node <= self.host


@dataclass(frozen=True)
class Answer:
    """All ways to run, planned."""

    question: Question
    run: Run
    plans: list[Plan]

    @cached_property
    def best(self) -> Plan | None:
        """What should be fastest of what fits; None where nothing does."""
        return recommend(self.plans, self.question.room, self.run.own_length, self.question.nodes)

    def report(self) -> dict[str, Any]:
        """As data, in bytes."""
        room = self.question.room
        return {
            "config": self.question.config,
            "gpus": self.question.gpus,
            "nodes": self.question.nodes,
            "length": self.run.length,
            "parameters": self.run.parameters,
            "room": room.gpu,
            "host_room": None if math.isinf(room.host) else room.host,
            "plans": [entry(plan) | {"fits": room.holds(plan)} for plan in self.plans],
            "recommended": None if self.best is None else self.plans.index(self.best),
        }


def recommend(found: list[Plan], room: Room, length: int, nodes: int) -> Plan | None:
    """What fits and should be fastest: computing and sending, one after the other. Offload, and gathering at
    every traversal of a multi-pass model, only where nothing else fits. `length`: a GPU's tokens of a row."""

    def seconds(plan: Plan) -> float:
        tokens = plan.way.micro_batch * plan.way.accumulation * length
        sent = sum(plan.traffic.values()) / (BETWEEN_NODES if nodes > 1 else INSIDE_NODE)
        return (plan.hardware_flops or 0.0) * tokens / FLOPS + sent

    return min(
        (plan for plan in found if room.holds(plan)),
        key=lambda plan: (
            plan.way.offload,
            plan.way.gather == "traversal" and any(other.way.gather == "step" for other in found),
            seconds(plan),
            -plan.way.micro_batch,
        ),
        default=None,
    )


def entry(plan: Plan) -> dict[str, Any]:
    """A plan as data."""
    way = plan.way
    return {
        "stage": way.stage,
        "offload": way.offload,
        "gather": way.gather,
        "recompute": way.recompute,
        "micro_batch": way.micro_batch,
        "accumulation": way.accumulation,
        "parts": plan.parts,
        "host": plan.host,
        "traffic": plan.traffic,
        "hardware_flops": plan.hardware_flops,
        "notes": list(plan.notes),
        "peak": plan.peak,
    }


def command(question: Question, way: Way) -> str:
    """The start of the run with a way's settings."""
    name = f"ds_configs/zero{way.stage}{'_offload' if way.offload else ''}.json"
    parts = [question.config, *question.overrides, f"deepspeed={name}", f"recompute={way.recompute}"]
    parts.append(f"batch.micro_batch={way.micro_batch}")
    if way.stage == 3:
        parts.append(f"zero3.gather={way.gather}")
    elif way.run.config.zero3.gather is not None:
        parts.append("zero3.gather=null")
    launch = f"torchrun --nnodes {question.nodes} --nproc-per-node {question.gpus // question.nodes}"
    return f"{launch} -m wm_ds.train {shlex.join(parts)}"


def table(answer: Answer, *, every: bool = False) -> str:
    """Of each stage and recomputation the largest micro-batch that fits, or all; then the recommendation."""
    question, run, room = answer.question, answer.run, answer.question.room
    ranks = run.config.sequence_parallel
    lines = [
        f"{question.config}: {run.parameters:,} parameters, rows of {run.length}, precision "
        f"{run.config.precision}; {question.gpus} GPUs of {question.gpu_memory:g} GB "
        f"({room.gpu / GIB:.1f} GiB to use) on {question.nodes} node{'s' * (question.nodes > 1)}"
        + (f", each row on {ranks} GPUs" if ranks > 1 else ""),
        "GiB per GPU; states by arithmetic, activations from the model on meta tensors",
        f"{'ZeRO':22}{'recompute':12}{'mb':>4}{'acc':>5}"
        + "".join(f"{SHORT.get(name, name):>10}" for name in answer.plans[0].parts)
        + f"{'peak':>9}{'sent':>9}",
    ]
    for plan in answer.plans if every else largest(answer.plans, room):
        cells = "".join(f"{size / GIB:>10.2f}" for size in plan.parts.values())
        mark = " <-" if plan is answer.best else ""
        if not room.holds(plan):
            mark = "  does not fit" if plan.peak > room.gpu else "  exceeds the host memory"
        sent = sum(plan.traffic.values()) / GIB
        lines.append(f"{label(plan.way)}{cells}{plan.peak / GIB:>9.2f}{sent:>9.2f}{mark}")
    return "\n".join([*lines, *recommendation(answer)])


def largest(found: list[Plan], room: Room) -> list[Plan]:
    """For each way apart from its micro-batch, the largest one that fits, or the smallest."""

    def kind(plan: Plan) -> tuple:
        return plan.way.stage, plan.way.offload, plan.way.gather, plan.way.recompute

    chosen = []
    for key in dict.fromkeys(map(kind, found)):
        same = [plan for plan in found if kind(plan) == key]
        fitting = (plan for plan in same if room.holds(plan))
        chosen.append(max(fitting, key=lambda plan: plan.way.micro_batch, default=same[0]))
    return chosen


def label(way: Way) -> str:
    """A way in the table's first columns."""
    stage = f"{way.stage}{'+offload' if way.offload else ''}{' ' + way.gather if way.gather else ''}"
    return f"{stage:22}{way.recompute:12}{way.micro_batch:>4}{way.accumulation:>5}"


def recommendation(answer: Answer) -> list[str]:
    """The lines below the table."""
    best, question = answer.best, answer.question
    if best is None:
        return ["nothing fits: more GPUs, a shorter row, or a smaller model"]
    spent = ", ".join(f"{name} {size / GIB:.2f}" for name, size in best.traffic.items()) or "nothing"
    lines = [
        f"recommended: {command(question, best.way)}",
        f"  each GPU sends a step, GiB: {spent}",
        *(f"  {note}" for note in best.notes),
    ]
    if best.way.offload:
        lines.append(f"  host memory per node: {best.host * question.room.gpus_per_node / GIB:.2f} GiB")
    if best.hardware_flops:
        lines.append(f"  hardware GFLOP per token with recomputation: {best.hardware_flops / 1e9:.3f}")
    return lines
