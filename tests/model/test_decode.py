"""Prefill, more prompt, decoding and padding against the formulas, token by token, in float64.

The cache's and generate's own behaviour is tested beside this; here the numbers are compared.
"""

import pytest
import torch

from tests.support import reference
from tests.support.tiny import build, parameters, settings, tokens
from wm_ds.model import Schedule

SCHEDULES = {
    "exact": (Schedule.exact(), lambda length: reference.one_by_one(length)),
    "cyclic": (Schedule.cyclic(3, 2), lambda length: reference.cyclic(length, 3, 2)),
    "jacobi": (Schedule.jacobi(2), lambda length: reference.cyclic(length, 1, 2)),
}


def past_of(out) -> dict:
    """The cache of an output, under the name that this version of transformers gives it."""
    name = "cache" if getattr(out, "cache", None) is not None else "past_key_values"
    return {name: getattr(out, name)}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("k", "parts"), [(3, [7]), (3, [4, 5]), (1, [6, 1, 4]), (4, [1, 2, 7])])
def test_prompt_in_parts_then_token_by_token(name: str, k: int, parts: list[int]) -> None:
    """Each part runs the schedule over its own tokens, groups counted by position in the text."""
    schedule, steps_of = SCHEDULES[name]
    lm = build(k, 2, 4).eval()
    p, s = parameters(lm), settings(lm)
    ids = tokens(1, sum(parts) + 4)
    entries: list = []
    past: dict = {}
    begin = 0
    with torch.no_grad():
        for size in [*parts, 1, 1, 1, 1]:
            new = ids[:, begin : begin + size]
            out = lm(new, schedule=schedule, use_cache=True, **past)
            steps = reference.from_position(steps_of(begin + size), begin)
            if size == 1:  # one token is evaluated exactly
                steps = [[(begin, 0)]]
            want, entries = reference.continue_document(p, s, entries, new[0].tolist(), steps)
            assert (out.logits[0] - reference.logits(p, want)).abs().max() < 1e-10, f"from {begin}"
            past = past_of(out)
            begin += size
            (cache,) = past.values()
            assert cache.get_seq_length() == begin
    for j in range(k):
        keys, values = reference.stack_entries(entries)
        assert (cache.layers[j].keys[0].transpose(0, 1) - keys[:, j]).abs().max() < 1e-10
        assert (cache.layers[j].values[0].transpose(0, 1) - values[:, j]).abs().max() < 1e-10


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_of_different_lengths(name: str, side: str) -> None:
    """Rows of 1, 5, 9 and 12 tokens in one batch: each as if alone, whatever stands in the padding."""
    schedule, steps_of = SCHEDULES[name]
    lm = build().eval()
    p, s = parameters(lm), settings(lm)
    sizes = [1, 5, 9, 12]
    ids = tokens(4, 12)
    mask = torch.zeros(4, 12, dtype=torch.long)
    for row, size in enumerate(sizes):
        mask[row, 12 - size :] = 1 if side == "left" else 0
        if side == "right":
            mask[row, :size] = 1
    with torch.no_grad():
        out = lm(ids, attention_mask=mask, schedule=schedule, use_cache=True)
        assert torch.isfinite(out.logits).all()
        caches = []
        for row, size in enumerate(sizes):
            real = mask[row].bool()
            row_ids = ids[row, real].tolist()
            want, entries = reference.continue_document(p, s, [], row_ids, steps_of(size))
            assert (out.logits[row, real] - reference.logits(p, want)).abs().max() < 1e-10, f"{size} tokens"
            caches.append(entries)
        if side == "right":
            return
        # and on, token by token, behind the padding
        past = past_of(out)
        for _ in range(3):
            new = tokens(4, 1, seed=int(mask.shape[1]))
            mask = torch.cat((mask, torch.ones(4, 1, dtype=torch.long)), dim=1)
            out = lm(new, attention_mask=mask, use_cache=True, **past)
            for row in range(4):
                step = [[(len(caches[row]), 0)]]
                want, caches[row] = reference.continue_document(p, s, caches[row], new[row].tolist(), step)
                assert (out.logits[row] - reference.logits(p, want)).abs().max() < 1e-10
            past = past_of(out)


@pytest.mark.parametrize("pad", range(5))
def test_any_amount_of_left_padding_gives_the_same_numbers(pad: int) -> None:
    lm = build().eval()
    ids = tokens(1, 8)
    schedule = Schedule.cyclic(3, 1)
    with torch.no_grad():
        want = lm(ids, schedule=schedule, use_cache=False).logits
        padded = torch.cat((torch.zeros(1, pad, dtype=torch.long), ids), dim=1)
        mask = torch.cat((torch.zeros(1, pad, dtype=torch.long), torch.ones(1, 8, dtype=torch.long)), dim=1)
        got = lm(padded, attention_mask=mask, schedule=schedule, use_cache=False).logits[:, pad:]
    assert (got - want).abs().max() < 1e-12


def test_a_row_of_padding_only_in_a_batch() -> None:
    lm = build().eval()
    ids = tokens(2, 6)
    mask = torch.tensor([[0] * 6, [1] * 6])
    for schedule, _ in SCHEDULES.values():
        with torch.no_grad():
            got = lm(ids, attention_mask=mask, schedule=schedule, use_cache=True)
            want = lm(ids[1:], schedule=schedule, use_cache=False).logits
        assert torch.isfinite(got.logits).all()
        assert (got.logits[1:] - want).abs().max() < 1e-12
