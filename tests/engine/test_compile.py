"""Compiled blocks: the same loss and gradients as eager ones, whatever is recomputed, and few graphs."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from wm_ds.engine.compile import compile_blocks
from wm_ds.families import build_model
from wm_ds.model import FusedKVConfig, LCKVConfig, WhiteMatterConfig

SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 301,
}
WHITEMATTER = WhiteMatterConfig(**SIZES, num_kv_channels=2, num_groups=4)
LCKV = LCKVConfig(**SIZES | {"num_hidden_layers": 4}, warmup_layers=2, num_groups=1)
FUSEDKV = FusedKVConfig(**SIZES, own_kv_layers=2)


def gradients(lm: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of rows with documents, at a length that the groups do not divide."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (2, 301), generator=generator)
    documents = torch.zeros(2, 301, dtype=torch.int32)
    documents[0, 100:] = 1
    weight = torch.randn(2, 301, 32, generator=generator)
    lm.zero_grad(set_to_none=True)
    loss = (lm.model(input_ids=ids, document_ids=documents).last_hidden_state * weight).sum()
    loss.backward()
    found = {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}
    return found | {"loss": loss.detach()}


@pytest.mark.parametrize(
    ("config", "recompute", "backend"),
    [
        (WHITEMATTER, "none", "inductor"),
        (WHITEMATTER, "none", "aot_eager"),
        pytest.param(WHITEMATTER, "layer", "aot_eager", marks=pytest.mark.long),
        pytest.param(WHITEMATTER, "group", "aot_eager", marks=pytest.mark.long),
        pytest.param(WHITEMATTER, "group+layer", "aot_eager", marks=pytest.mark.long),
        pytest.param(LCKV, "none", "aot_eager", marks=pytest.mark.long),
        (LCKV, "group", "aot_eager"),
        pytest.param(FUSEDKV, "layer", "aot_eager", marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_the_same_gradients_from_few_graphs(config: WhiteMatterConfig, recompute: str, backend: str) -> None:
    lm = build_model(config, seed=3, recompute=recompute).train()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    want = gradients(lm)
    torch.compiler.reset()
    counters.clear()
    compile_blocks(lm, backend=backend)
    for _ in range(2):  # the second step finds everything compiled
        got = gradients(lm)
        assert got.keys() == want.keys()
        for name, expected in want.items():
            assert (got[name] - expected).norm() <= 2e-5 * expected.norm(), name
        graphs = counters["stats"]["unique_graphs"]
        # Before and after attention, with and without gradient; the pool in these two and in the start.
        assert 4 <= graphs <= 8
        assert not counters["graph_break"]
    torch.compiler.reset()
