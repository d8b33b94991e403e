"""flex_attention under the pool's rule: the same numbers as the formulas, forward and backward, never NaN.

flex_attention refuses gradients on CPU; its eager form differentiates there all the same once the check is
out of the way. The compiled kernels of CUDA are not what runs here.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex_module

from tests.model.test_gradients import assert_equal_gradients, fast, slow
from tests.support import reference
from tests.support.tiny import batch, build, hidden, parameters, settings, tokens
from wm_ds.model import Schedule
from wm_ds.model import attention as attention_module
from wm_ds.model.attention import slots_of, takes_flex
from wm_ds.model.cache import CACHE_FIELD
from wm_ds.model.flex import block_mask
from wm_ds.model.visibility import Visibility, seen_slots

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def gradients_on_cpu(monkeypatch):
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)


@pytest.fixture
def masks_made(monkeypatch) -> list[range]:
    """The positions for which a block mask was built, in order: proof that flex_attention ran."""
    made = []

    def record(positions, *args):
        made.append(positions)
        return block_mask(positions, *args)

    monkeypatch.setattr(attention_module, "block_mask", record)
    return made


def test_values_are_those_of_the_formulas(masks_made) -> None:
    """Documents, one-token documents, filler; one mask for each group, whatever the passes and layers."""
    lm = build(attention="flex").eval()
    names = ("several", "filler", "one")
    input_ids, document_ids = batch(*names)
    with torch.no_grad():
        got = hidden(lm, input_ids, document_ids, Schedule.cyclic(3, 3))
    assert set(masks_made) >= {range(0, 13, 3), range(1, 13, 3), range(2, 13, 3)}
    assert len(masks_made) == len(set(masks_made))
    p, s = parameters(lm), settings(lm)
    for row in range(len(names)):
        want = reference.passes(
            p, s, input_ids[row].tolist(), document_ids[row].tolist(), reference.cyclic(13, 3, 3)
        )
        assert (got[row] - want.hidden_TD).abs().max() < 1e-10, names[row]


@pytest.mark.parametrize("policy", ["none", "group+layer"])
def test_gradients_are_those_of_the_formulas(policy: str, masks_made) -> None:
    lm = build(2, 2, 3, attention="flex")
    names = ("several", "filler")
    loss, got = fast(lm, Schedule.cyclic(2, 2, no_grad=1), names, policy)
    assert set(masks_made) >= {range(0, 13, 2), range(1, 13, 2)}
    assert len(masks_made) == len(set(masks_made))
    want_loss, want = slow(lm, reference.cyclic(13, 2, 2), 1, names)
    assert abs(loss - want_loss) < 1e-9
    assert (got["model.dummy_key"] != 0).any()
    assert_equal_gradients(got, want)


def test_padding_and_cached_tokens() -> None:
    """Left-padded rows, one of padding only, that continue a cache: sdpa's numbers."""
    results = {}
    for kernel in ("sdpa", "flex"):
        lm = build(attention=kernel).eval()
        mask = torch.tensor([[0] * 3 + [1] * 4, [1] * 7, [0] * 7])
        more = torch.tensor([[1] * 6, [1] * 6, [0] * 6])
        with torch.no_grad():
            first = lm(tokens(3, 7), attention_mask=mask)
            second = lm(
                tokens(3, 6, seed=1),
                attention_mask=torch.cat((mask, more), 1),
                **{CACHE_FIELD: getattr(first, CACHE_FIELD)},
            )
            plain = lm(tokens(2, 6), **{CACHE_FIELD: getattr(lm(tokens(2, 4)), CACHE_FIELD)})
        results[kernel] = torch.cat([out.logits.flatten() for out in (first, second, plain)])
        assert torch.isfinite(results[kernel]).all()
    assert (results["flex"] - results["sdpa"]).abs().max() < 1e-11
    assert not torch.equal(results["flex"], results["sdpa"]), "two kernels, not one"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_nan_and_the_dummy_learns(dtype: torch.dtype) -> None:
    lm = build(2, 2, 2, dtype=dtype, attention="flex").train()
    document_ids = torch.tensor([[0] + [1] * 4 + [2] + [3] + [4] * 5, [-1] * 12, [0] * 3 + [-1] * 9])
    h = hidden(lm, tokens(3, 12), document_ids, None)
    assert torch.isfinite(h).all()
    (h.float().square() * (document_ids >= 0)[:, :, None]).sum().backward()
    for name, weight in lm.model.named_parameters():
        assert torch.isfinite(weight.grad).all(), name
    assert (lm.model.dummy_key.grad != 0).any()


CASES = {
    "plain": (0, None, None),
    "cached": (5, None, None),
    "padded cache": (5, [[0, 0, 1, 1, 1], [1] * 5], [[0] * 13, [-1] + [0] * 12]),
    "documents": (0, None, [[0] * 4 + [1] + [2] * 8, [0] * 6 + [-1] * 2 + [3] * 5]),
    "one row of padding": (0, None, [[-1] * 13, [0] * 13]),
}


@pytest.mark.parametrize("positions", [range(13), range(1, 13, 3), range(12, 13)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_mask_is_the_rule(name: str, positions: range) -> None:
    """Slot by slot: the dummy always; cached tokens of the row; earlier tokens of the own document."""
    past, past_BP, documents = CASES[name]
    past_BP = None if past_BP is None else torch.tensor(past_BP).bool()
    document_BW = None if documents is None else torch.tensor(documents)
    visibility = Visibility(past, past_BP, document_BW, 13)
    mask = block_mask(positions, visibility, CPU)
    dense_Bnm = seen_slots(visibility, positions, CPU)
    own_Bnm = seen_slots(visibility, positions, CPU, own=True)
    for b in range(2):
        for q, position in enumerate(positions):
            mine = 0 if documents is None else documents[b][position]
            for kv in range(1 + past + 13):
                w = kv - 1 - past
                theirs = 0 if documents is None else documents[b][w]
                if kv == 0:
                    want = True
                elif w < 0:
                    want = mine >= 0 and (past_BP is None or bool(past_BP[b, kv - 1]))
                else:
                    want = w < position and mine >= 0 and theirs == mine
                at = (torch.tensor(i) for i in (b, 0, q, kv))
                assert bool(mask.mask_mod(*at)) == want, (b, position, kv)
                row = b if len(dense_Bnm) > 1 else 0
                if kv < dense_Bnm.shape[2]:
                    assert bool(dense_Bnm[row, q, kv]) == want, (b, position, kv)
                else:
                    assert not want, "slots behind the last query are left out"
                if 0 < kv <= own_Bnm.shape[2]:  # layers with KV of their own: the token itself, no dummy
                    assert bool(own_Bnm[row, q, kv - 1]) == (want or w == position), (b, position, kv)


def test_blocks_that_nobody_sees_are_skipped() -> None:
    """Of nine blocks of keys, 128 queries read those up to the last query's position."""
    documents = torch.tensor([[0] * 512 + [1] * 512])
    mask = block_mask(range(3, 1024, 8), Visibility(0, None, documents, 1024), CPU)
    assert mask.shape == (1, 1, 128, 1025)
    one = torch.zeros(1, 1024, dtype=torch.long)
    early = block_mask(range(0, 256, 2), Visibility(0, None, one, 1024), CPU)
    blocks = early.to_dense()[0, 0].sum().item()
    assert blocks == 2, "128 queries up to position 254 reach two of the nine blocks of keys"


@pytest.mark.slow  # a minute and a half of C++ compilation
def test_the_compiled_kernel_skips_no_key_that_somebody_sees() -> None:
    """The forward kernel that inductor makes for the CPU works block by block, as CUDA's does."""
    torch.manual_seed(0)
    documents = torch.tensor([[0] * 300 + [1] * 212, [0] * 500 + [-1] * 12])
    query, key, value = torch.randn(2, 2, 128, 16), torch.randn(2, 1, 513, 16), torch.randn(2, 1, 513, 16)
    positions = range(3, 512, 4)
    mask = block_mask(positions, Visibility(0, None, documents, 512), CPU)
    kernel = torch.compile(flex_module.flex_attention)
    with torch.no_grad():
        got = kernel(query, key, value, block_mask=mask, enable_gqa=True)
    seen = slots_of(positions, Visibility(0, None, documents), torch.float32, CPU)
    parts = [
        F.scaled_dot_product_attention(q, key[:, :, :m], value[:, :, :m], attn_mask=additive, enable_gqa=True)
        for q, m, additive in zip(query.split(seen.sizes, dim=2), seen.lengths, seen.masks)
    ]
    assert (got - torch.cat(parts, dim=2)).abs().max() < 1e-5


def test_who_takes_flex() -> None:
    cuda = torch.device("cuda")
    assert takes_flex("auto", cuda, 128)
    assert not takes_flex("auto", cuda, 127)
    assert not takes_flex("auto", CPU, 4096)
    assert takes_flex("flex", CPU, 2)
    assert not takes_flex("flex", cuda, 1), "decoding needs no mask"
    assert not takes_flex("sdpa", cuda, 4096)
    with pytest.raises(ValueError, match="choose one of auto, sdpa, flex"):
        build(attention="flash")


def test_rotation_stays_in_fp32_in_a_bfloat16_model() -> None:
    """Positions beyond 256 are no bfloat16 numbers: a table computed there would merge neighbours."""
    from wm_ds.model.blocks import rotary_table

    position = torch.tensor([[*range(255, 261), 2047]])
    cos, sin = rotary_table(position, 96, 1e6, torch.bfloat16)
    assert cos.dtype == sin.dtype == torch.float32
    angle = position.double()[..., None] * 1e6 ** (-torch.arange(0, 96, 2, dtype=torch.float64) / 96)
    assert (cos - torch.cat((angle, angle), -1).cos()).abs().max() < 3e-4  # fp32 angles up to 2047 rad
    wide = rotary_table(position, 96, 1e6, torch.float32)
    assert torch.equal(cos, wide[0])
    assert torch.equal(sin, wide[1])
