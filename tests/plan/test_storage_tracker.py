"""Storage tracking, and what it says about the recomputation policies."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.naive import naive_hidden
from wm_ds.engine.loss import cross_entropy_sum
from wm_ds.model import WhiteMatterConfig, WhiteMatterForCausalLM
from wm_ds.plan.storage_tracker import MIB, StorageTracker, step_memory

# The proportions of the paper's model; the full size is (16, 512, 2048).
SMALL = (16, 128, 512)
FULL = (16, 512, 2048)


def sizes(layers: int, width: int, length: int) -> dict:
    return {
        "vocab_size": 500,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": width * 3 // 16,
        "max_position_embeddings": length,
    }


def whitematter(shape: tuple[int, int, int], k: int = 8, **fields: object) -> WhiteMatterForCausalLM:
    passes = {"num_groups": 8, "no_grad_passes": 1, "grad_passes": 2}
    k = min(k, shape[0])
    config = WhiteMatterConfig(**(sizes(*shape) | passes | fields), num_kv_channels=k, router_stride=2)
    return WhiteMatterForCausalLM._from_config(config, dtype=torch.float32).train()


def peak(shape: tuple[int, int, int], kind: str, k: int = 8) -> StorageTracker:
    """One step of the model's body at batch 1: none, layer, group, group+layer, naive or vanilla(+layer)."""
    length = shape[2]
    ids = torch.zeros(1, length, dtype=torch.long)
    if kind.startswith("vanilla"):
        config = Qwen3Config(**sizes(*shape), use_cache=False)
        lm = Qwen3ForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()
        if kind == "vanilla+layer":
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        inputs = {
            "attention_mask": torch.zeros(1, 1, length, length),
            "position_ids": torch.arange(length)[None],
        }
        return step_memory(lm, lambda: lm.model(ids, **inputs).last_hidden_state.sum())
    lm = whitematter(shape, k)
    documents = torch.zeros(1, length, dtype=torch.int32)
    if kind == "naive":
        return step_memory(lm, lambda: naive_hidden(lm, ids, documents).sum())
    lm.model.recompute = kind
    return step_memory(lm, lambda: lm.model(ids, document_ids=documents).last_hidden_state.sum())


def fake() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def test_a_storage_counts_once_however_many_views_share_it() -> None:
    with StorageTracker() as tracker:
        x = torch.zeros(1024)
        y = x.view(2, 512)[0]
        z = x + 1
        assert tracker.total == 2 * 4096
        del x
        assert tracker.total == 2 * 4096, "a view keeps the storage"
        del y, z
        gc.collect()
        assert tracker.total == 0
    assert tracker.peak == 2 * 4096


def test_parameters_are_not_counted_and_gradients_are_told_apart() -> None:
    layer = torch.nn.Linear(32, 64, bias=False)
    x = torch.randn(7, 32)
    tracker = step_memory(layer, lambda: layer(x).square().sum())
    assert tracker.peaks["gradients"] == 32 * 64 * 4
    assert 7 * 64 * 4 <= tracker.peaks["activations"] <= 6 * 7 * 64 * 4


def test_labels_and_resetting_the_peak() -> None:
    with StorageTracker() as tracker:
        with tracker.labelled("scratch"):
            x = torch.zeros(1024)
        del x
        tracker.reset_peak()
        y = torch.zeros(8)
    assert tracker.peaks["scratch"] == 0
    assert tracker.peak == 32
    assert y.sum() == 0


@pytest.mark.parametrize("kind", ["none", "layer", "group", "group+layer", "vanilla", "vanilla+layer"])
def test_fake_peaks_equal_real_ones(kind: str) -> None:
    shape = (2, 256, 128)
    real = peak(shape, kind)
    with fake():
        unreal = peak(shape, kind)
    assert real.peak > 3 * MIB, "too small to compare to 1 MiB"
    assert abs(real.peak - unreal.peak) < MIB
    assert abs(real.peaks["activations"] - unreal.peaks["activations"]) < MIB


def activations(shape: tuple[int, int, int], k: int, *kinds: str) -> list[int]:
    return [peak(shape, kind, k).peaks["activations"] for kind in kinds]


@pytest.mark.long
def test_group_needs_a_sixth_of_plain_autograd_and_less_than_vanilla() -> None:
    naive, vanilla, group = activations(SMALL, 8, "naive", "vanilla", "group")
    assert group < naive / 6
    assert group < vanilla


@pytest.mark.long
def test_group_and_layer_need_less_than_vanilla_with_recomputed_layers() -> None:
    """With k = L/2. The kept entries grow with k, vanilla's kept states do not: k = L takes more than it."""
    vanilla, both = activations((16, 128, 2048), 8, "vanilla+layer", "group+layer")
    assert both < vanilla


@pytest.mark.slow
def test_policies_at_the_papers_size() -> None:
    with fake():
        naive, vanilla, checkpointed, group, both = activations(
            FULL, 8, "naive", "vanilla", "vanilla+layer", "group", "group+layer"
        )
    print(*(round(size / MIB, 1) for size in (naive, vanilla, checkpointed, group, both)))
    assert group < naive / 6
    assert group < vanilla
    assert both < checkpointed


def test_the_naive_passes_are_the_models_own() -> None:
    """Otherwise the comparison above would be one with something else."""
    torch.manual_seed(0)
    lm = whitematter((4, 32, 61), k=3).double()
    for p in lm.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ids = torch.randint(0, 500, (2, 61))
    documents = torch.zeros(2, 61, dtype=torch.int32)
    documents[0, 20:] = 1
    weight = torch.randn(2, 61, 32, dtype=torch.float64)
    gradients = []
    for hidden in (naive_hidden(lm, ids, documents), lm.model(ids, document_ids=documents).last_hidden_state):
        lm.zero_grad(set_to_none=True)
        (hidden * weight).sum().backward()
        gradients.append({name: p.grad for name, p in lm.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, grad in gradients[0].items():
        assert torch.allclose(grad, gradients[1][name], rtol=1e-8, atol=1e-10), name


def test_the_loss_never_holds_all_logits() -> None:
    """At Qwen3's vocabulary they would take 1.24 GB in fp32, three times over with softmax and gradient."""
    with fake():
        head = torch.nn.Linear(512, 151_936, bias=False)
        hidden = torch.zeros(2048, 512, requires_grad=True)
        labels = torch.zeros(2048, dtype=torch.long)
        tracker = step_memory(head, lambda: cross_entropy_sum(hidden, head.weight, labels))
    gradient = 151_936 * 512 * 4
    assert tracker.peak - 2 * gradient < 2048 * 151_936 * 4 / 2
