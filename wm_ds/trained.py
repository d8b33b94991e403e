"""A trained model on disk, wherever it came from: a run's checkpoint, or a folder in Hugging Face format.

Export and evaluation take either, by path; this module answers what they ask of it: the model's
configuration, its tokenizer, its weights in a given dtype, and the facts of the run.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from wm_ds.checkpoint.directory import describe, latest, step_name
from wm_ds.checkpoint.format import (
    CLIENT,
    MANIFEST,
    WEIGHT,
    CheckpointError,
    Manifest,
    Reader,
    read_json,
    read_manifest,
)
from wm_ds.config import load as run_config
from wm_ds.config.schema import PASSES
from wm_ds.config.stages import PlannedStage, plan
from wm_ds.data.shards import load_manifest
from wm_ds.errors import WmError, one_line
from wm_ds.families import MODEL_TYPES, model_class, model_config, on_meta
from wm_ds.run.directory import history
from wm_ds.run.metrics_file import read_metrics
from wm_ds.run.trained_with import over

# In the directory of a run whose step 0 came from a dense model: which, and how (upcycle/).
UPCYCLED = "upcycled.json"


class TrainedError(WmError, RuntimeError):
    """No trained model is at the path, or something that belongs to it is missing; the text says what."""


@dataclass(frozen=True)
class Trained:
    """`path` is a checkpoint's directory or an exported folder, `run_dir` its run's (None for a folder)."""

    path: Path
    run_dir: Path | None
    tokenizer: Path | None = None
    """Folder of the tokenizer, where it is not the one that the run names."""

    @cached_property
    def run(self) -> run_config.Config:
        """The run's resolved configuration."""
        assert self.run_dir is not None
        return run_config.load_record(self.run_dir / "config.yaml")

    @cached_property
    def data(self) -> dict[str, Any]:
        """Manifest of the run's (first) training data."""
        return load_manifest(self.run.data.sources()[0].path)

    @cached_property
    def stages(self) -> list[PlannedStage]:
        """The stages that the checkpoint has been through; the last one is the one that it was saved in."""
        step = self.step
        assert self.run_dir is not None
        assert step is not None
        past = over(history(self.run_dir).get("stages", []), step)
        found = plan(self.run, self.data["seq_len"], past)
        return [stage for stage in found.stages if stage.first <= max(1, step)]

    def hf_config(self) -> PreTrainedConfig:
        """The model's configuration, a new object each time."""
        if self.run_dir is None:
            entry = _folder_entry(self.path)
            return MODEL_TYPES[entry["model_type"]].config_class.from_dict(entry)
        return model_config(
            self.stages[-1].config.model,
            vocab_size=self.data["vocab_size"],
            seq_len=max(stage.seq_len for stage in self.stages),
            eos_id=self.data["eos_id"],
        )

    @property
    def step(self) -> int | None:
        """The checkpoint's step, 0 for a run that has none yet (its `path` is the run's directory); None for
        an exported folder."""
        if self.run_dir is None:
            return None
        return 0 if self.path == self.run_dir else int(read_manifest(self.path).run["step"])

    def load(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
        """The model in evaluation mode. Weights are read in pieces and cast once, in place."""
        config = self.hf_config()
        if self.run_dir is None:
            model = model_class(config).from_pretrained(self.path, dtype=dtype)
            return model.to(device).eval()
        with no_init_weights():
            model = model_class(config)._from_config(config, dtype=dtype).to(device)
            model.tie_weights()
        parameters = dict(model.named_parameters())
        with self.reader() as reader, torch.no_grad():
            missing = sorted(set(parameters) - set(reader.manifest.tensors))
            if missing:
                raise CheckpointError(f"{self.path} lacks {', '.join(missing[:3])} ({len(missing)} tensors)")
            for name, parameter in parameters.items():
                reader.read_into(parameter.view(-1), name, WEIGHT, 0)
        return model.eval()

    def on_meta(self) -> PreTrainedModel:
        """The model without numbers."""
        return on_meta(self.hf_config())

    # The rest is about checkpoints only.

    def reader(self) -> Reader:
        """The checkpoint, opened for reading."""
        return Reader(self.path)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the model's parameters, shared ones once."""
        return {name: tuple(parameter.shape) for name, parameter in self.on_meta().named_parameters()}

    def tokenizer_dir(self) -> Path:
        """The tokenizer's folder. Raises TrainedError where none is found."""
        if self.run_dir is None:
            return self.path
        data = Path(self.run.data.sources()[0].path)
        named = [self.run.data.tokenizer, str(data / "tokenizer"), self.data["tokenizer"]["name"]]
        candidates = [self.tokenizer] if self.tokenizer else [Path(folder) for folder in named if folder]
        for folder in candidates:
            if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")):
                return folder
        places = ", ".join(map(str, candidates))
        raise TrainedError(
            f"no tokenizer.json or tokenizer.model in {places}; give its folder with --tokenizer DIR"
        )

    def facts(self) -> dict[str, Any]:
        """Where the model came from, for the export's provenance and model card."""
        manifest = read_manifest(self.path)
        rows = read_metrics(self.run_dir / "metrics.jsonl") if self.run_dir is not None else []
        rows = [row for row in rows if row.get("step", 0) <= manifest.run["step"]]
        losses = [row["loss"] for row in rows if "loss" in row]
        holdouts = [row["holdout_loss"] for row in rows if "holdout_loss" in row]
        tokens = [row["tokens"] for row in rows if "tokens" in row]
        averaged = manifest.run.get("averaged")
        began = None if self.run_dir is None else self.run_dir / UPCYCLED
        upcycled = {"upcycled": json.loads(began.read_text())} if began and began.is_file() else {}
        return (
            ({} if averaged is None else {"averaged": averaged})
            | upcycled
            | {
                "run": self.run_dir.name if self.run_dir is not None else None,
                "step": manifest.run["step"],
                "zero_stage": manifest.run.get("zero_stage"),
                "world_size": manifest.run.get("world_size"),
                "tokens": tokens[-1] if tokens else self._tokens_so_far(manifest),
                "train_loss": losses[-1] if losses else None,
                "holdout_loss": holdouts[-1] if holdouts else None,
                "data": {key: self.data.get(key) for key in ("align", "tokens", "documents", "holdout")}
                | {"seq_len": self.stages[-1].seq_len},
                # Of the stage that the checkpoint was saved in.
                "config": self.stages[-1].config.model_dump(mode="json"),
                "stages": [
                    _facts_of(stage, manifest.run["step"]) for stage in self.stages if self.run.stages
                ],
            }
        )

    def _tokens_so_far(self, manifest: Manifest) -> int | None:
        """Of a checkpoint that lies in a directory without metrics: an average, say."""
        client = read_json(self.path, manifest, CLIENT) if CLIENT in manifest.files else {}
        return client.get("engine", {}).get("tokens")


def _folder_entry(folder: Path) -> dict[str, Any]:
    """An exported folder's config.json. Raises TrainedError where it is damaged."""
    try:
        entry = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise TrainedError(f"{folder / 'config.json'} is damaged ({one_line(str(error))})") from None
    if not isinstance(entry, dict):
        raise TrainedError(f"{folder / 'config.json'} is damaged: it holds no JSON object")
    return entry


def _facts_of(stage: PlannedStage, step: int) -> dict[str, Any]:
    config = stage.config
    return {
        "first": stage.first,
        "last": min(stage.last, step),
        "seq_len": stage.seq_len,
        "global_batch": config.batch.global_batch,
        "passes": {name: getattr(config.model, name) for name in PASSES},
        "data": [source.model_dump() for source in config.data.sources()],
    }


def find(path: str | Path, step: int | None = None) -> Trained:
    """The model at a run directory (its latest checkpoint, or the one of `step`), a checkpoint, or a folder.

    Raises TrainedError or CheckpointError where there is none.
    """
    path = Path(path)
    if (path / MANIFEST).is_file() and path.parent.name == "checkpoints":
        if step is not None and step_name(step) != path.name:
            raise TrainedError(
                f"{path} is one checkpoint, of another step than {step}; give the run's directory"
            )
        return Trained(path, path.parent.parent)
    if (path / "config.yaml").is_file():
        if step is None:
            checkpoint, _ = latest(path)
            if checkpoint is None:
                raise TrainedError(f"{path} has no checkpoint yet")
            return Trained(checkpoint, path)
        checkpoint = path / "checkpoints" / step_name(step)
        if not checkpoint.is_dir():
            raise TrainedError(f"no checkpoint of step {step}; {describe(path)}")
        read_manifest(checkpoint)
        return Trained(checkpoint, path)
    if (path / "config.json").is_file():
        if step is not None:
            raise TrainedError(f"{path} is an exported folder; --step is for run directories")
        known = _folder_entry(path).get("model_type")
        if known not in MODEL_TYPES:
            raise TrainedError(f"{path} holds a model of type {known!r}; this reads {', '.join(MODEL_TYPES)}")
        return Trained(path, None)
    what = "is no run directory, checkpoint or exported folder" if path.exists() else "does not exist"
    raise TrainedError(f"{path} {what}")
