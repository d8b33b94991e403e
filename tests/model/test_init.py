"""Names, shapes, sizes and first values of the parameters."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support.tiny import build
from wm_ds.model import WhiteMatterConfig, WhiteMatterForCausalLM

PAPER = {
    "vocab_size": 151_936,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 96,
    "max_position_embeddings": 2048,
}


def non_embedding(lm: torch.nn.Module) -> int:
    return sum(
        w.numel() for name, w in lm.named_parameters() if "embed_tokens" not in name and "lm_head" not in name
    )


def expected_shapes(L: int, D: int, I: int, Hq: int, Hkv: int, d: int, k: int, sources: int, V: int) -> dict:  # noqa: E741
    shapes: dict[str, tuple] = {
        "model.embed_tokens.weight": (V, D),
        "lm_head.weight": (V, D),
        "model.norm.weight": (D,),
    }
    for l in range(L):  # noqa: E741
        at = f"model.layers.{l}."
        shapes[at + "input_layernorm.weight"] = (D,)
        shapes[at + "self_attn.q_proj.weight"] = (Hq * d, D)
        shapes[at + "self_attn.q_norm.weight"] = (d,)
        shapes[at + "self_attn.o_proj.weight"] = (D, Hq * d)
        shapes[at + "post_attention_layernorm.weight"] = (D,)
        shapes[at + "mlp.gate_proj.weight"] = (I, D)
        shapes[at + "mlp.up_proj.weight"] = (I, D)
        shapes[at + "mlp.down_proj.weight"] = (D, I)
    for branch in ("key", "value"):
        at = f"model.pool.{branch}."
        shapes[at + "source_norm"] = (L, D)
        shapes[at + "router_weight"] = (k * L, sources * D)
        shapes[at + "router_bias"] = (k * L,)
        shapes[at + "channel_norm"] = (k, D)
        shapes[at + "proj"] = (k, Hkv * d, D)
    shapes["model.pool.key.head_norm"] = (k, d)
    shapes["model.dummy_key"] = (k, Hkv, d)
    shapes["model.dummy_value"] = (k, Hkv, d)
    return shapes


@pytest.mark.parametrize(
    ("k", "p", "layers", "sources"), [(3, 2, 4, 2), (1, 1, 4, 4), (5, 3, 5, 2), (2, 9, 3, 1)]
)
def test_every_parameter_has_its_name_and_shape(k: int, p: int, layers: int, sources: int) -> None:
    lm = build(k, p, layers)
    got = {name: tuple(weight.shape) for name, weight in lm.named_parameters()}
    assert got == expected_shapes(layers, 24, 40, 4, 2, 8, k, sources, 37)
    assert all(weight.requires_grad for weight in lm.parameters())
    assert dict(lm.named_buffers()) == {}


def bias(lm: WhiteMatterForCausalLM, branch: str) -> list[list[float]]:
    c = lm.config
    return getattr(lm.model.pool, branch).router_bias.view(c.num_kv_channels, c.num_hidden_layers).tolist()


# channel j's first weights on the sources, by hand
PATTERNS = [
    (1, 4, "auto", [[0, 0, 0, 1]]),
    (1, 4, "top", [[0, 0, 0, 1]]),
    (2, 4, "auto", [[1, 0, 1, 0], [0, 1, 0, 1]]),
    (3, 4, "auto", [[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 1, 0]]),
    (2, 5, "cyclic", [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]]),
    (4, 4, "auto", [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1]]),
    (4, 4, "shifted", [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1]]),
    (4, 4, "cyclic", [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]),
]


@pytest.mark.parametrize(("k", "layers", "router_init", "want"), PATTERNS)
def test_routers_begin_static_with_the_papers_pattern(
    k: int, layers: int, router_init: str, want: list
) -> None:
    lm = build(k, 2, layers, randomise=False, router_init=router_init)
    for branch in ("key", "value"):
        assert bias(lm, branch) == want
        assert (getattr(lm.model.pool, branch).router_weight == 0).all()


def test_norms_begin_at_one_and_matrices_at_the_configured_spread() -> None:
    lm = build(
        3,
        2,
        4,
        dtype=torch.float32,
        randomise=False,
        hidden_size=128,
        intermediate_size=256,
        initializer_range=0.05,
    )
    for name, weight in lm.named_parameters():
        if "norm" in name:
            assert (weight == 1).all(), name
        elif "router" not in name and "dummy" not in name:
            assert abs(weight.std().item() / 0.05 - 1) < 0.1, name
            assert abs(weight.mean().item()) < 0.05 / 5, name
        assert torch.isfinite(weight).all(), name
    # no two channels start alike: each projection has its own draw
    assert not torch.equal(lm.model.pool.key.proj[0], lm.model.pool.key.proj[1])
    assert not torch.equal(lm.model.pool.key.proj, lm.model.pool.value.proj)


def test_seed_decides_the_first_values() -> None:
    one, two, three = (
        build(randomise=False, seed=1),
        build(randomise=False, seed=1),
        build(randomise=False, seed=2),
    )
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.model.embed_tokens.weight, three.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ({"num_kv_channels": 5}, "num_kv_channels"),
        ({"num_kv_channels": 0}, "num_kv_channels"),
        ({"router_stride": 0}, "router_stride"),
        ({"router_init": "topp"}, "router_init"),
        ({"num_attention_heads": 3}, "num_attention_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_groups": 0}, "num_groups"),
        ({"grad_passes": 0}, "grad_passes"),
        ({"no_grad_passes": -1}, "no_grad_passes"),
        ({"prefill_passes": 0}, "prefill_passes"),
    ],
)
def test_impossible_sizes_are_refused_by_name(bad: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build(**({"k": bad.pop("num_kv_channels")} if "num_kv_channels" in bad else {}), **bad)


@pytest.mark.parametrize(("k", "want"), [(16, 54_064_128), (8, 50_642_432)])
def test_parameter_count_of_the_papers_models(k: int, want: int) -> None:
    """54.1 M and 50.6 M in the paper; to the unit by adding up the shapes."""
    with torch.device("meta"):
        lm = WhiteMatterForCausalLM(
            WhiteMatterConfig(**PAPER, num_hidden_layers=16, num_kv_channels=k, router_stride=2)
        )
    assert {w.device.type for w in lm.parameters()} == {"meta"}
    assert non_embedding(lm) == want


@pytest.mark.parametrize(("layers", "want"), [(16, 51_924_480), (24, 77_886_464), (32, 103_848_448)])
def test_parameter_count_of_vanilla(layers: int, want: int) -> None:
    with torch.device("meta"):
        lm = Qwen3ForCausalLM(Qwen3Config(**PAPER, num_hidden_layers=layers))
    assert non_embedding(lm) == want
