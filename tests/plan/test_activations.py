"""The planner's activations against real steps."""

from __future__ import annotations

import pytest
import torch

from tests.plan.test_storage_tracker import MIB, peak, step_memory, whitematter
from wm_ds.plan.activations import PretendedShard, body

SHAPE = (6, 128, 512)


@pytest.mark.parametrize("kind", ["none", "layer", "group", "group+layer"])
def test_predicted_activations_are_within_a_tenth_of_measured_ones(kind: str) -> None:
    predicted = body(whitematter(SHAPE, 4).config, SHAPE[2], "fp32", kind)
    measured = peak(SHAPE, kind, 4).peaks["activations"]
    assert measured > 4 * MIB
    assert predicted.peak == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        ("none", {"start": "layerwise", "no_grad_passes": 0, "grad_passes": 1}),
        ("group", {"start": "layerwise", "no_grad_passes": 0, "grad_passes": 1}),
        ("group+layer", {"start": "layerwise", "no_grad_passes": 0, "start_grad": True}),
    ],
)
def test_a_layerwise_start_is_predicted_likewise(kind: str, start: dict) -> None:
    """Its sweep is of whole rows: with one detached, the states are kept until its pool's backward."""
    lm = whitematter(SHAPE, 2, **start)
    lm.model.recompute = kind
    ids = torch.zeros(1, 512, dtype=torch.long)
    documents = torch.zeros(1, 512, dtype=torch.int32)
    tracker = step_memory(lm, lambda: lm.model(ids, document_ids=documents).last_hidden_state.sum())
    predicted = body(lm.config, 512, "fp32", kind)
    assert predicted.peak == pytest.approx(tracker.peaks["activations"], rel=0.1)


@pytest.mark.parametrize("kind", ["none", "group"])
def test_a_rank_of_a_shared_row_is_predicted_likewise(kind: str) -> None:
    """One of two ranks: the model on real tensors, all-to-alls going nowhere; less than a whole row."""
    lm = whitematter((6, 128, 512), 4, num_attention_heads=4, num_key_value_heads=2)
    lm.model.recompute, lm.model.shard = kind, PretendedShard(2)
    ids = torch.zeros(1, 512, dtype=torch.long)
    documents = torch.zeros(1, 512, dtype=torch.int32)
    tracker = step_memory(lm, lambda: lm.model(ids, document_ids=documents).last_hidden_state.sum())
    predicted = body(lm.config, 512, "fp32", kind, 2)
    assert predicted.peak == pytest.approx(tracker.peaks["activations"], rel=0.1)
    assert predicted.peak < 0.75 * body(lm.config, 512, "fp32", kind).peak


def test_deep_models_are_extrapolated_from_shallow_ones() -> None:
    """Six layers from two and four: the same within 2%."""
    config = whitematter((6, 64, 256), 2).config
    extrapolated = body(config, 256, "fp32", "group")
    measured = peak((6, 64, 256), "group", 2).peaks["activations"]
    assert extrapolated.peak == pytest.approx(measured, rel=0.1)
