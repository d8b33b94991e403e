"""Goldens of training: one rank goes through the cases: `python -m tests.goldens.training FOLDER`.

A case is (family, precision, recompute policy, ZeRO stage); its goldens are the losses and gradient norms of
three steps and the weights after them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from . import models, record
from .record import Entries
from .subject import Engine, World, engine, start_ranks, stop_ranks, torch, weights

ROWS, STEPS = 8, 3
Case = tuple[str, str, str, int]
FEW: list[Case] = [
    ("dynamic", "fp32", "none", 0),
    ("dynamic", "fp32", "group", 1),
    ("dynamic", "autocast", "group+layer", 2),
    ("dynamic", "autocast", "layer", 3),
    ("dynamic", "bf16", "group", 3),
    ("lckv", "fp32", "group", 2),
    ("vanilla", "autocast", "layer", 3),
]
ALL: list[Case] = FEW + [
    case
    for family, precisions, policies in (
        ("dynamic", ("fp32", "autocast", "bf16"), models.POLICIES),
        ("lckv", ("fp32", "autocast"), ("none", "group+layer")),
        ("vanilla", ("fp32", "autocast"), ("none", "layer")),
    )
    for precision in precisions
    for policy in policies
    for stage in range(4)
    if (case := (family, precision, policy, stage)) not in FEW
]


def settings(case: Case, ranks: int) -> dict:
    """The run of a case: two micro-batches a step, Muon, the paper's clipping at stages 0 and 2."""
    family, precision, policy, stage = case
    return {
        "run": {"dir": "unused"},
        "model": models.FAMILIES[family],
        "data": {"train": "unused"},
        "batch": {"global_batch": ROWS, "micro_batch": ROWS // ranks // 2},
        "optim": {"lr": 1e-2, "warmup": 2, "clip": 0.5, "clip_rule": "global" if stage % 2 else "local"},
        "precision": precision,
        "recompute": policy,
        "steps": 8,
    }


def micro_batches(step: int, world: World) -> list[dict[str, torch.Tensor]]:
    """This rank's two micro-batches of a step's rows, which hold documents and unlabelled positions."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(1, models.VOCABULARY, (ROWS, models.LENGTH), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    labels[1::3, 5:] = -100
    documents = torch.zeros(ROWS, models.LENGTH, dtype=torch.int32)
    documents[1::2, 9:] = 1
    whole = {"input_ids": ids, "labels": labels, "document_ids": documents, "sample_ids": torch.arange(ROWS)}
    parts = torch.arange(ROWS).view(2, world.size, -1)[:, world.rank]
    return [{name: values[part] for name, values in whole.items()} for part in parts]


def run(case: Case, world: World) -> tuple[list[float], list[float], list]:
    """(losses, gradient norms, this rank's fragments of the weights)."""
    family, _, policy, stage = case
    trained: Engine = engine(
        settings(case, world.size), {"stage": stage}, models.seeded(family, policy), world
    )
    results = [trained.step(micro_batches(step, world)) for step in range(STEPS)]
    own = weights(trained)
    trained.ds.destroy()
    return [r.loss for r in results], [r.grad_norm for r in results], own


def main(folder: Path) -> None:
    """Play the cases of FOLDER/cases.json, leave this rank's answers in FOLDER/answer_RANK.pt."""
    torch.backends.mkldnn.set_flags(False)
    world = start_ranks()
    answers = []
    for family, precision, policy, stage in json.loads((folder / "cases.json").read_text()):
        answers.append(run((family, precision, policy, stage), world))
    torch.save(answers, folder / f"answer_{world.rank}.pt")
    stop_ranks()


def collect(folder: Path, ranks: int, cases: list[Case]) -> Entries:
    """The goldens from all ranks' answers."""
    answers = [torch.load(folder / f"answer_{rank}.pt") for rank in range(ranks)]
    entries: Entries = {}
    for number, (family, precision, policy, stage) in enumerate(cases):
        at = f"training/{ranks} ranks/{family}/{precision}/{policy}/zero{stage}"
        losses, norms, _ = answers[0][number]
        entries[f"{at}/losses"] = record.of_floats(losses)
        entries[f"{at}/gradient_norms"] = record.of_floats(norms)
        entries[f"{at}/weights"] = record.of_tensors(_whole([a[number][2] for a in answers]).items())
    return entries


def _whole(ranks: list[list]) -> dict[str, torch.Tensor]:
    whole: dict[str, torch.Tensor] = {}
    for fragments in ranks:
        for name, shape, start, stop, values in fragments:
            flat = whole.setdefault(name, torch.full((torch.Size(shape).numel(),), float("nan")))
            flat[start:stop] = values
    return whole


if __name__ == "__main__":
    main(Path(sys.argv[1]))
