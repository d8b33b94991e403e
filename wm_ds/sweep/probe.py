"""What measure.py asks of one trained model; see there."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import torch

from wm_ds import trained
from wm_ds.data.sequences import PackedSequences, evaluation_batches
from wm_ds.evaluate import perplexity as evaluation
from wm_ds.families import has_passes, mixes_layers
from wm_ds.model import EMBEDDING, LAYERWISE, Converged, Schedule
from wm_ds.model.modeling import CACHE_FIELD
from wm_ds.run.metrics_file import read_metrics
from wm_ds.sweep.description import Measure

CACHED_TOKENS = 8  # any number tells what a token takes
BYTES = 2  # of a number in bf16, as models are served


class Probe:
    """One method for each part; each is given the parts before it."""

    def __init__(self, folder: Path, settings: Measure) -> None:
        source = trained.find(folder)
        run = source.run
        assert source.step is not None
        self.step, self.settings, self.folder = source.step, settings, folder
        self.rows = PackedSequences(run.data.holdout or run.data.sources()[0].path, "holdout")
        self.device = evaluation.alone().device
        self.lm = source.load(torch.float32, self.device)
        self.lm.config.use_cache = False
        self.iterates = has_passes(self.lm.config)
        self.schedule = self.lm.config.training_schedule() if self.iterates else None

    def model(self, _: dict[str, Any]) -> dict[str, Any]:
        """Sizes, and how training ended."""
        parameters = dict(self.lm.named_parameters())
        outside = ("embed_tokens", "lm_head")
        body = sum(w.numel() for n, w in parameters.items() if not any(part in n for part in outside))
        steps = [row for row in read_metrics(self.folder / "metrics.jsonl") if "loss" in row]
        losses = [row["loss"] for row in steps if isinstance(row["loss"], int | float)]
        last = losses[-max(1, len(losses) // 20) :]
        return {
            "parameters": sum(w.numel() for w in parameters.values()),
            "parameters_without_embeddings": body,
            "cache_bytes_per_token": self.cache_bytes(),
            "train_loss_of_the_last_twentieth": sum(last) / max(1, len(last)),
            "skipped_steps": sum("skipped" in row for row in steps),
            "training_tokens": steps[-1]["tokens"] if steps else None,
        }

    @torch.no_grad()
    def cache_bytes(self) -> float:
        """Bytes a token of the cache that the model itself makes, in bf16."""
        ids = torch.zeros(1, CACHED_TOKENS, dtype=torch.long, device=self.device)
        cache = getattr(self.lm.model(input_ids=ids, use_cache=True), CACHE_FIELD)
        # An entry may be of no length: some caches have a place for every layer and fill a part.
        held = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
        numbers = sum(layer.keys.numel() + layer.values.numel() for layer in held)
        return BYTES * numbers / CACHED_TOKENS

    def perplexity(self, _: dict[str, Any]) -> dict[str, Any]:
        """As trained, on many rows."""
        found = self.run(self.schedule, self.settings.sequences)
        name = "one pass" if self.schedule is None else evaluation.name_of(self.schedule)
        return found | {"schedule": name, "sequences": min(self.settings.sequences, len(self.rows))}

    def passes(self, found: dict[str, Any]) -> dict[str, Any]:
        """By the number of passes, on some rows."""
        some = self.settings.some
        as_trained = self.run(self.schedule, some)["perplexity"]
        if self.schedule is None:
            return {"sequences": some, "as_trained": as_trained, "groups": None, "perplexities": []}
        groups = self.schedule.groups if self.schedule.kind == "cyclic" else self.lm.config.num_groups
        groups = min(groups, self.rows.seq_len)
        curve = [
            self.run(Schedule.cyclic(groups, n), some)["perplexity"]
            for n in range(1, self.settings.passes + 1)
        ]
        return {"sequences": some, "as_trained": as_trained, "groups": groups, "perplexities": curve}

    def starts(self, found: dict[str, Any]) -> dict[str, Any]:
        """From either start, whatever was trained with, by the number of passes, on the rows of `passes`:
        with the groups of training, twice as many, and one (Jacobi)."""
        if not mixes_layers(self.lm.config):
            return {"sequences": self.settings.some, "curves": []}
        trained, curves = found["passes"]["groups"], []
        for groups in sorted({trained, min(2 * trained, self.rows.seq_len), 1}):
            for start in (EMBEDDING, LAYERWISE):
                schedules = [
                    Schedule.cyclic(groups, n, start=start) for n in range(1, self.settings.start_passes + 1)
                ]
                perplexities = [self.run(each, self.settings.some)["perplexity"] for each in schedules]
                curves.append({"groups": groups, "start": start.kind, "perplexities": perplexities})
        return {"sequences": self.settings.some, "curves": curves}

    def exact(self, found: dict[str, Any]) -> dict[str, Any]:
        """Exact autoregressive evaluation."""
        if self.schedule is None:
            return {"perplexity": found["passes"]["as_trained"], "seconds_per_row": None}
        result = self.run(Schedule.exact(), self.settings.some)
        return {"perplexity": result["perplexity"], "seconds_per_row": result["seconds_per_row"]}

    def converge(self, found: dict[str, Any]) -> dict[str, Any]:
        """Passes to within the tolerance of exact, and of the best of the curve, for each g."""
        if self.schedule is None:
            return {"exact": None, "groups": []}
        settings, rows = self.settings, self.settings.converge_sequences
        exact = self.run(Schedule.exact(), rows)
        best = min([*found["passes"]["perplexities"], found["passes"]["as_trained"]])
        # The best is of other rows: carried over by what exact evaluation says of both.
        best *= exact["perplexity"] / found["exact"]["perplexity"]
        groups = []
        for g in settings.converge:
            perplexities: list[float] = []
            reached: dict[str, dict[str, Any]] = {}
            for number in range(1, settings.converge_passes + 1):
                schedule = Schedule.cyclic(min(g, self.rows.seq_len), number)
                result = self.run(schedule, rows)
                perplexities.append(result["perplexity"])
                for name, goal in (("exact", exact["perplexity"]), ("best", best)):
                    if name not in reached and near(result["perplexity"], goal, settings.within):
                        reached[name] = {
                            "passes": number,
                            "seconds_per_row": result["seconds_per_row"],
                            "steps": len(schedule.steps(self.rows.seq_len)),
                        }
                if len(reached) == 2:
                    break
            groups.append({"groups": g, "reached": reached, "perplexities": perplexities})
        return {"exact": exact, "sequences": rows, "within": settings.within, "groups": groups}

    def run(self, schedule: Schedule | Converged | None, sequences: int) -> dict[str, Any]:
        """Perplexity of the first rows, and seconds a row."""
        batch = min(self.settings.batch, sequences)
        batches = evaluation_batches(self.rows, 0, 1, batch, sequences)
        begun = time.perf_counter()
        loss, tokens = evaluation.mean_loss(self.lm, batches, schedule, self.device)
        seconds = (time.perf_counter() - begun) / min(sequences, len(self.rows))
        return {"perplexity": math.exp(loss), "loss": loss, "tokens": tokens, "seconds_per_row": seconds}


def near(value: float, other: float, within: float) -> bool:
    """Whether two perplexities differ by no more than `within`, relative to the second."""
    return math.isfinite(value) and abs(value / other - 1) <= within
