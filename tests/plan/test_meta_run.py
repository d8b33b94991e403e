"""Meta tensors under our tracker hold what torch's own fake tensors hold, operation for operation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.initialization import no_init_weights

from wm_ds.config.load import load
from wm_ds.engine.loss import document_mask
from wm_ds.families import construct, model_config
from wm_ds.model.layout import document_positions
from wm_ds.plan import activations
from wm_ds.plan.meta_run import MetaTracker, as_on_cpu
from wm_ds.plan.storage_tracker import StorageTracker

TINY = ["model.hidden_size=32", "model.intermediate_size=64", "model.head_dim=16"]
TINY += ["model.num_attention_heads=2", "model.num_key_value_heads=1"]
PASSES = ["model.num_groups=2", "model.no_grad_passes=1", "model.grad_passes=1"]


def fake(hf: Any, length: int, precision: str, recompute: str, ranks: int = 1) -> tuple[float, float]:
    """(kept, peak) by torch's fake tensors on the CPU."""
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"):
        with no_init_weights():
            lm = construct(hf, recompute=recompute, dtype=activations.storage_dtype(precision)).train()
        ids = torch.zeros(1, length, dtype=torch.long)
        documents = torch.zeros(1, length, dtype=torch.int32)
        arguments: dict[str, Any] = {"document_ids": documents}
        if hf.model_type == "qwen3":
            mask, positions = document_mask(documents, lm.dtype), document_positions(documents)
            arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
        else:
            lm.model.shard = activations.PretendedShard(ranks)
        with StorageTracker(lm.parameters()) as tracker:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                hidden = lm.model(input_ids=ids, **arguments).last_hidden_state
            kept = tracker.current["activations"]
            tracker.in_backward = True
            hidden.backward(torch.zeros_like(hidden))
        return kept, tracker.peaks["activations"]


def shape(name: str, *more: str) -> Any:
    """The model of one of configs/, made tiny."""
    config = load(f"configs/{name}.yaml", [*TINY, *more])
    return model_config(config.model, vocab_size=64, seq_len=64, eos_id=None)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["bf16", "autocast", "fp32"])
@pytest.mark.parametrize("recompute", ["none", "layer", "group", "group+layer"])
def test_every_policy_and_precision(precision: str, recompute: str) -> None:
    hf = shape("7b", "model.num_hidden_layers=2", "model.num_kv_channels=2", *PASSES)
    found = activations._measure(hf, 64, precision, recompute)
    assert found == fake(hf, 64, precision, recompute)
    kept, _ = activations._measure(hf, 64, precision, recompute, backward=False)
    assert kept == found[0]


OTHERS = {
    "paper_vanilla_16l": ["model.num_hidden_layers=2"],
    "paper_lckv_w4": [],
    "ablation_no_feedback": ["model.num_hidden_layers=2", "model.num_kv_channels=2"],
    "ablation_static_k1": ["model.num_hidden_layers=2", *PASSES],
    "related_feedback_transformer": ["model.num_hidden_layers=2"],
    "related_cla2": ["model.num_hidden_layers=4"],
    "related_fusedkv": ["model.num_hidden_layers=4", "model.own_kv_layers=2"],
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_family(name: str) -> None:
    hf = shape(name, *OTHERS[name])
    assert activations._measure(hf, 16, "autocast", "layer") == fake(hf, 16, "autocast", "layer")


def test_routing_that_fake_tensors_cannot_build() -> None:
    """A fixed pattern is read as numbers while the model is built: fake tensors have none, the CPU does."""
    hf = shape("related_recurrent_transformer", "model.num_hidden_layers=2", "model.num_kv_channels=2")
    kept, peak = activations._measure(hf, 16, "fp32", "none")
    lm = construct(hf, dtype=torch.float32).train()
    ids, documents = torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.int32)
    with StorageTracker(lm.parameters()) as tracker:
        hidden = lm.model(ids, document_ids=documents).last_hidden_state
        assert tracker.current["activations"] == kept
        tracker.in_backward = True
        hidden.backward(torch.zeros_like(hidden))
    assert tracker.peaks["activations"] == peak


def test_a_rank_of_a_shared_row() -> None:
    hf = shape("7b", "model.num_hidden_layers=2", "model.num_kv_channels=2", *PASSES)
    hf.num_key_value_heads = 2
    assert activations._measure(hf, 64, "bf16", "group", 2) == fake(hf, 64, "bf16", "group", 2)


def test_known_operations_give_the_same_results_and_views_stay_views() -> None:
    with torch.device("meta"), MetaTracker() as tracker:
        x = torch.zeros(4, 6)
        first, again = x * 2, x * 2
        assert (again.shape, again.stride(), again.dtype) == (first.shape, first.stride(), first.dtype)
        assert (x * 2.0).dtype == torch.float32
        ints = torch.zeros(3, dtype=torch.long)
        assert [(ints * 2).dtype, (ints * 2.0).dtype] == [torch.int64, torch.float32]
        for _ in range(2):
            view = x.view(2, 12)
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert x.add_(1) is x
            assert [part.shape for part in x.split(2)] == [(2, 6), (2, 6)]
        del view
        before = tracker.total
        third = x.t() * 2
        assert tracker.total == before + 4 * 24
        assert third.stride() == (x.t() * 2).stride()


def test_nothing_stays_patched() -> None:
    names = [(torch, "matmul"), (torch.nn.functional, "linear"), (torch, "clear_autocast_cache")]
    before = [getattr(owner, name) for owner, name in names]
    with pytest.raises(ZeroDivisionError), as_on_cpu():
        raise ZeroDivisionError
    assert [getattr(owner, name) for owner, name in names] == before
