"""The trainer's own held-out loss against that of the weights that are exported.

Tensors can be the checkpoint's and the checkpoint yet not what was trained, where something has put weights
in the wrong place on their way to it. So with every checkpoint the trainer records the loss of a few held-out
rows (`probe` in wm_ds/train.py), computed with the weights that it trains, and here it is computed again.
"""

import logging
from typing import Any

import torch

from wm_ds.checkpoint.format import CLIENT, read_json, read_manifest
from wm_ds.data import shards
from wm_ds.data.sequences import PackedSequences, evaluation_batches
from wm_ds.data.shards import ShardError
from wm_ds.engine.loss import TokenLoss
from wm_ds.export.tokenizer import ExportError
from wm_ds.families import has_passes
from wm_ds.trained import Trained

log = logging.getLogger(__name__)
# Of the loss, or of 1 where that is larger. fp32 throughout: the order of sums; else weights or products in
# 16 bits. docs/checkpoints.md has what was measured: at most a tenth of EXACT, and a fifth of ROUNDED.
EXACT, ROUNDED = 1e-4, 1e-2


def check_holdout(source: Trained, dtype: torch.dtype) -> float | None:
    """The difference of the two losses, in nats; None where they cannot be compared, which is logged.

    Raises ExportError where it is more than rounding explains.
    """
    if read_manifest(source.path).run.get("averaged"):
        log.info("not compared with the trainer's held-out loss: these are an average, never evaluated")
        return None
    recorded = trainers_record(source)
    if recorded is None:
        log.info("not compared with the trainer's held-out loss: the checkpoint records none (an older one)")
        return None
    path = source.run.data.holdout or source.run.data.sources()[0].path
    try:
        rows = PackedSequences(path, "holdout")
    except ShardError as error:
        log.info(f"not compared with the trainer's held-out loss: {error}")
        return None
    if shards.content(rows.manifest) != recorded["content"]:
        log.info(
            f"not compared with the trainer's held-out loss: {path} holds other rows than were evaluated"
        )
        return None
    loss = holdout_loss(source, rows, int(recorded["rows"]), dtype)
    exact = recorded["precision"] == "fp32" and dtype == torch.float32
    allowed = (EXACT if exact else ROUNDED) * max(1.0, recorded["loss"])
    difference = abs(loss - recorded["loss"])
    if not difference <= allowed:
        raise ExportError(
            f"{source.path}: its weights have a held-out loss of {loss:.4f} on the first {recorded['rows']} "
            f"rows of {path}, the trainer had {recorded['loss']:.4f} at this step ({allowed:.1g} is "
            "allowed): the checkpoint does not hold the weights that were trained; export another step, and "
            "do not resume from this one"
        )
    log.info(f"checked: held-out loss {loss:.4f}, the trainer's {recorded['loss']:.4f}")
    return difference


def trainers_record(source: Trained) -> dict[str, Any] | None:
    """What the trainer noted with the checkpoint: `loss` of the first `rows` held-out rows of the data with
    this `content`, at this `precision`; None in older checkpoints."""
    manifest = read_manifest(source.path)
    client = read_json(source.path, manifest, CLIENT) if CLIENT in manifest.files else {}
    return client.get("holdout")


@torch.no_grad()
def holdout_loss(source: Trained, rows: PackedSequences, count: int, dtype: torch.dtype) -> float:
    """Mean loss of the first `count` held-out rows under the training schedule, with weights in `dtype`."""
    model = source.load(dtype)
    options: dict[str, Any] = {}
    if has_passes(model.config):
        options["schedule"] = model.config.training_schedule()
    loss = TokenLoss(model).eval()
    total, tokens = 0.0, 0
    for batch in evaluation_batches(rows, 0, 1, 1, count):
        inputs = {name: value for name, value in batch.items() if name != "sample_ids"}
        total += float(loss(**inputs, **options))
        tokens += int((batch["labels"] >= 0).sum())
    return total / max(tokens, 1)
