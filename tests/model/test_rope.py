"""Rotation and everything else that must stay in fp32 while the model is bf16."""

import copy

import pytest
import torch

from tests.support.tiny import batch, build, hidden, tokens
from wm_ds.model import Schedule, WhiteMatterForCausalLM
from wm_ds.model.blocks import rotary_table, rotate

# 256 and 257 are the same number in bf16, and so are most positions of a 2048-token row.
POSITIONS = [0, 1, 255, 256, 257, 258, 259, 260, 1023, 2047]


def still(dtype: torch.dtype) -> WhiteMatterForCausalLM:
    """Blocks that add nothing to the residual stream: equal tokens have equal keys but for rotation."""
    lm = build(2, 2, 2, dtype=torch.float32, head_dim=16, max_position_embeddings=4096).eval()
    with torch.no_grad():
        for layer in lm.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return lm.to(dtype)


def cached_keys(lm: WhiteMatterForCausalLM) -> torch.Tensor:
    """Keys [2048, d] of one channel and head, for a row of 2048 equal tokens."""
    ids = torch.full((1, 2048), 5)
    with torch.no_grad():
        cache = lm(ids, schedule=Schedule.jacobi(1), use_cache=True, logits_to_keep=1).past_key_values
    return cache.layers[1].keys[0, 1]


def rotated(key_d: torch.Tensor, position: int, theta: float = 1000.0) -> torch.Tensor:
    d = key_d.shape[0]
    angle = position * theta ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    cos, sin = angle.cos(), angle.sin()
    a, b = key_d.double().chunk(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin))


def test_keys_are_rotated_by_an_fp32_table() -> None:
    keys = cached_keys(still(torch.float32))
    for position in POSITIONS:
        want = rotated(keys[0], position)
        assert (keys[position] - want).abs().max() < 1e-3 * want.abs().max()
    for position in POSITIONS[:8]:
        assert (keys[position] - rotated(keys[0], position)).abs().max() < 1e-4


@pytest.mark.parametrize("how", ["to", "bfloat16", "autocast"])
def test_a_bf16_model_rotates_as_precisely(how: str) -> None:
    """bf16 rounds the stored key, half an ulp, not its angle: an angle off by one would show as 100 %."""
    lm = still(torch.float32)
    unrounded = cached_keys(lm)
    if how == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            keys = cached_keys(lm)
    else:
        keys = cached_keys(lm.to(torch.bfloat16) if how == "to" else lm.bfloat16())
    assert keys.dtype == torch.bfloat16
    size = unrounded.abs().max()
    for position in POSITIONS:
        # a few roundings of the key itself, in either place
        assert (keys[position].float() - unrounded[position]).abs().max() < 0.03 * size, position
    distinct = (keys[256].float() - keys[257].float()).abs().max()
    assert distinct > 0.1 * size, "positions 256 and 257 have the same rotation"


def test_queries_of_a_bf16_model_are_rotated_as_precisely_as_its_keys() -> None:
    """Attention weights far out in a row, seen through the output: bf16 against fp32 of the same weights."""
    lm = build(2, 2, 2, dtype=torch.float32, head_dim=16).eval().bfloat16().float()
    ids = tokens(1, 300)
    with torch.no_grad():
        want = lm.model(input_ids=ids, schedule=Schedule.jacobi(2)).last_hidden_state
        got = lm.bfloat16().model(input_ids=ids, schedule=Schedule.jacobi(2)).last_hidden_state.float()
    error_T = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert error_T[:, :250].median() < 0.05
    assert error_T[:, 256:].median() < 2 * error_T[:, 128:250].median()


def test_there_is_no_buffer_to_be_cast() -> None:
    lm = build()
    assert list(lm.named_buffers()) == []
    assert set(lm.state_dict()) == {name for name, _ in lm.named_parameters()}


@pytest.mark.parametrize("policy", ["none", "layer", "group", "group+layer"])
def test_autocast_gradients_agree_between_recomputation_policies(policy: str) -> None:
    """bf16 autocast over fp32 weights, used without gradient first and with gradient later in one region."""
    lm = build(dtype=torch.float32).train()
    input_ids, document_ids = batch("several", "filler")

    def gradients(policy: str) -> dict:
        lm.zero_grad(set_to_none=True)
        lm.model.recompute = policy
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = hidden(lm, input_ids, document_ids, None)
        h.float().square().mean().backward()
        return {name: weight.grad.clone() for name, weight in lm.model.named_parameters()}

    plain = copy.deepcopy(gradients("none"))
    got = gradients(policy)
    lm.model.recompute = "none"
    lm.zero_grad(set_to_none=True)
    hidden(lm, input_ids, document_ids, None).square().mean().backward()
    for name, weight in lm.model.named_parameters():
        assert got[name].dtype == torch.float32
        assert torch.isfinite(got[name]).all(), name
        scale = weight.grad.norm()
        assert (got[name] - plain[name]).norm() < 0.01 * scale, name  # the same computation again
        assert (got[name] - weight.grad).norm() < 0.25 * scale, name  # and the right one, to bf16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_table_is_fp32_whatever_the_model_is(dtype: torch.dtype) -> None:
    positions = torch.tensor([POSITIONS])
    cos, sin = rotary_table(positions, 96, 1_000_000.0, dtype)
    inverse = torch.tensor([1_000_000.0 ** (-2 * m / 96) for m in range(48)], dtype=torch.float64).float()
    angle = positions[0, :, None].float() * inverse
    assert cos.dtype == sin.dtype == torch.float32
    # Equal fp32 angles to an ulp; at position 2047 that ulp is 1.2e-4 and the largest.
    for table, want in ((cos, angle.cos()), (sin, angle.sin())):
        for half in table[0].chunk(2, dim=-1):
            assert (half - want).abs().max() < 3e-4
            assert (half[:2] - want[:2]).abs().max() < 1e-6
            assert (half[2:8] - want[2:8]).abs().max() < 4e-5


def test_rotating_a_bf16_vector_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(POSITIONS), 96, generator=generator).bfloat16()
    cos, sin = rotary_table(torch.tensor(POSITIONS), 96, 10_000.0, torch.bfloat16)
    got = rotate(x, cos, sin)
    want = rotate(x.double(), cos.double(), sin.double())
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).abs().max() <= 1.01 * (want.bfloat16().double() - want).abs().max()
