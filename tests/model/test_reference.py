"""The reference itself, checked where somebody else's code or arithmetic by hand can check it."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.support import reference

SETTINGS = reference.Settings(
    layers=4, channels=2, stride=2, heads=4, kv_heads=2, head_dim=8, eps=1e-6, theta=1000.0
)


def test_blocks_equal_qwen3_of_transformers() -> None:
    """Norms, head norms, rotation, grouped heads, scaling, SwiGLU and the packed mask, all at once."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=37,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.3,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    qwen = Qwen3ForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, weight in qwen.named_parameters():
            if "norm" in name:
                weight.normal_(1, 0.3)
    documents = [0, 0, 0, 0, 1, 2, 2, 2, 2, 2]
    tokens = torch.randint(0, 37, (1, 10))
    positions = torch.tensor([reference.positions_in_document(documents)])
    assert positions.tolist() == [[0, 1, 2, 3, 0, 0, 1, 2, 3, 4]]
    ids = torch.tensor(documents)
    allowed = (ids[:, None] == ids[None]) & torch.ones(10, 10, dtype=torch.bool).tril()
    mask = torch.zeros(1, 1, 10, 10, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    with torch.no_grad():
        want = qwen(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits[0]
        p = {name: weight.detach() for name, weight in qwen.named_parameters()}
        got = reference.logits(p, reference.vanilla(p, SETTINGS, tokens[0].tolist(), documents))
    # transformers keeps its rotation table in fp32 whatever the model's precision
    assert (got - want).abs().max() < 1e-5


def test_router_reads_every_pth_layer_counted_down_from_the_last() -> None:
    def sources(layers: int, stride: int) -> list[int]:
        return reference.router_sources(reference.Settings(layers, 1, stride, 1, 1, 2, 1e-6, 1e4))

    assert sources(16, 2) == [1, 3, 5, 7, 9, 11, 13, 15]
    assert sources(5, 2) == [0, 2, 4]
    assert sources(5, 3) == [1, 4]
    assert sources(4, 1) == [0, 1, 2, 3]
    assert sources(4, 9) == [3]


def test_schedules_spelled_out() -> None:
    assert reference.cyclic(5, 2, 2) == [
        [(0, 0), (2, 0), (4, 0)],
        [(1, 0), (3, 0)],
        [(0, 1), (2, 1), (4, 1)],
        [(1, 1), (3, 1)],
    ]
    assert reference.chunked(4, 2, 1, 2) == [
        [(0, 0), (1, 0)],
        [(0, 1), (1, 1)],
        [(2, 0), (3, 0)],
        [(2, 1), (3, 1)],
    ]
    # while the first chunk runs its second pass, the second chunk runs its first
    assert [sorted(step) for step in reference.wavefront(4, 2, 1, 2)] == [
        [(0, 0), (1, 0)],
        [(0, 1), (1, 1), (2, 0), (3, 0)],
        [(2, 1), (3, 1)],
    ]


def test_passes_of_single_positions_equal_token_by_token_evaluation() -> None:
    """The two ways of evaluating that this file knows, on random parameters."""
    s = SETTINGS
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5

    p = {"model.embed_tokens.weight": draw(9, 24) * 5, "model.norm.weight": 1 + draw(24)}
    for layer in range(4):
        at = f"model.layers.{layer}."
        p[at + "input_layernorm.weight"] = p[at + "post_attention_layernorm.weight"] = 1 + draw(24)
        p[at + "self_attn.q_proj.weight"], p[at + "self_attn.o_proj.weight"] = draw(32, 24), draw(24, 32)
        p[at + "self_attn.q_norm.weight"] = 1 + draw(8)
        p[at + "mlp.gate_proj.weight"], p[at + "mlp.up_proj.weight"] = draw(40, 24), draw(40, 24)
        p[at + "mlp.down_proj.weight"] = draw(24, 40)
    for branch in ("key", "value"):
        at = f"model.pool.{branch}."
        p[at + "source_norm"], p[at + "channel_norm"] = 1 + draw(4, 24), 1 + draw(2, 24)
        p[at + "router_weight"], p[at + "router_bias"] = draw(8, 48), draw(8)
        p[at + "proj"] = draw(2, 16, 24)
    p["model.pool.key.head_norm"] = 1 + draw(2, 8)
    p["model.dummy_key"], p["model.dummy_value"] = draw(2, 2, 8), draw(2, 2, 8)

    tokens, documents = [1, 2, 3, 4, 5, 6, 7, 8], [0, 0, 0, -1, 1, 2, 2, 2]
    exact = reference.exact(p, s, tokens, documents)
    singly = reference.passes(p, s, tokens, documents, reference.one_by_one(8)).hidden_TD
    jacobi = reference.passes(p, s, tokens, documents, reference.cyclic(8, 1, 3)).hidden_TD
    assert torch.equal(exact, singly)
    assert (exact - jacobi).abs().max() < 1e-12  # the longest document has three tokens
    fewer = reference.passes(p, s, tokens, documents, reference.cyclic(8, 1, 2)).hidden_TD
    assert (exact - fewer).abs().max() > 1e-6
