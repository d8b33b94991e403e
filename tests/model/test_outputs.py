"""What a forward returns beside logits: hidden states, tuples; and what it refuses by name."""

import pytest
import torch
from torch import Tensor

from tests.model import test_lckv, test_sharing
from tests.support import reference
from tests.support.tiny import build, parameters, settings, tokens
from wm_ds.model import Schedule
from wm_ds.model.cache import CACHE_FIELD

LENGTH = 9
ROW = tokens(1, LENGTH)[0].tolist()
DOCUMENTS = [0] * LENGTH


def close(got: Tensor, want: Tensor, tolerance: float = 1e-11) -> bool:
    return got.shape == want.shape and bool((got - want).abs().max() < tolerance)


def recorded(monkeypatch, layers: int, run) -> list[Tensor]:
    """The states [T, D] that enter each layer when the reference last runs it, and its final result."""
    entering: dict[tuple[int, int], Tensor] = {}
    plain = reference.attention_and_mlp

    def recording(p, s, layer, x, position, keys, values):
        entering[layer, position] = x
        return plain(p, s, layer, x, position, keys, values)

    monkeypatch.setattr(reference, "attention_and_mlp", recording)
    last = run()
    monkeypatch.setattr(reference, "attention_and_mlp", plain)
    return [torch.stack([entering[layer, i] for i in range(LENGTH)]) for layer in range(layers)] + [last]


def whitematter(schedule: Schedule, steps: list, no_grad: int = 0):
    lm = build()
    p = parameters(lm, requires_grad=True)
    return (
        lm,
        p,
        schedule,
        lambda: reference.passes(p, settings(lm), ROW, DOCUMENTS, steps, no_grad).hidden_TD,
    )


def without_feedback():
    lm = build(k=4, feedback=False)
    p = parameters(lm, requires_grad=True)
    return lm, p, None, lambda: reference.no_feedback(p, settings(lm), ROW, DOCUMENTS)


def sandwich():
    lm = test_lckv.build(num_groups=1, no_grad_passes=2, grad_passes=1)
    p = parameters(lm, requires_grad=True)
    steps = reference.cyclic(LENGTH, 1, 3)
    s, condensed = settings(lm), lm.config.condensed
    return lm, p, None, lambda: reference.lckv(p, s, ROW, DOCUMENTS, condensed, steps, no_grad=2)


def fused():
    lm = test_sharing.build("fusedkv")
    p = parameters(lm, requires_grad=True)
    return lm, p, None, lambda: test_sharing.definition(p, settings(lm), "fusedkv", ROW, DOCUMENTS)


FAMILIES = {
    "cyclic": lambda: whitematter(Schedule.cyclic(3, 3, no_grad=1), reference.cyclic(LENGTH, 3, 3), 1),
    "wavefront": lambda: whitematter(Schedule.wavefront(4, 2, 2), reference.wavefront(LENGTH, 4, 2, 2)),
    "exact": lambda: whitematter(Schedule.exact(), reference.one_by_one(LENGTH)),
    "no feedback": without_feedback,
    "lckv": sandwich,
    "fusedkv": fused,
}


@pytest.mark.parametrize("policy", ["none", "group+layer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_their_gradients_are_the_references(monkeypatch, family: str, policy: str) -> None:
    """L+1 states: what entered each layer in the last pass, and the normed output of the last one."""
    lm, p, schedule, run = FAMILIES[family]()
    want = recorded(monkeypatch, lm.config.num_hidden_layers, run)
    lm.model.recompute = policy
    row = torch.tensor([ROW])
    out = lm.train()(row, schedule=schedule, output_hidden_states=True)
    assert len(out.hidden_states) == lm.config.num_hidden_layers + 1
    assert all(close(got[0], state) for got, state in zip(out.hidden_states, want, strict=True))
    assert torch.equal(lm.lm_head(out.hidden_states[-1]), out.logits)
    shares = [0.3 + 0.1 * i for i in range(len(want))]
    sum(share * (state**2).sum() for share, state in zip(shares, out.hidden_states, strict=True)).backward()
    sum(share * (state**2).sum() for share, state in zip(shares, want, strict=True)).backward()
    for name, weight in lm.named_parameters():
        if name != "lm_head.weight":
            assert close(weight.grad, p[name].grad, 1e-9 * (1 + p[name].grad.abs().max())), name


@pytest.mark.parametrize("make", [build, lambda: build(k=4, feedback=False), test_lckv.build])
@pytest.mark.parametrize("prefill", ["exact", "converged"])
def test_states_behind_a_cache_are_those_of_the_whole_row(make, prefill: str) -> None:
    """In one forward, in two, and token by token (decoding): the same states. Padding is zero."""
    lm = make().eval()
    row = tokens(2, LENGTH)
    more = {"prefill": prefill, "output_hidden_states": True}
    if prefill == "converged":
        more["prefill_tolerance"] = 0.0
    with torch.no_grad():
        whole = lm(row, **more).hidden_states
        first = lm(row[:, :4], **more)
        cache = {CACHE_FIELD: getattr(first, CACHE_FIELD)}
        rest = lm(row[:, 4:7], **cache, **more).hidden_states
        seventh = lm(row[:, 7:8], **cache, **more).hidden_states
        eighth = lm(row[:, 8:], **cache, **more).hidden_states
        padded = torch.cat((torch.zeros(2, 3, dtype=torch.long), row), 1)
        mask = torch.tensor([[0] * 3 + [1] * LENGTH] * 2)
        left = lm(padded, attention_mask=mask, **more).hidden_states
    for i, state in enumerate(whole):
        parts = [first.hidden_states[i], rest[i], seventh[i], eighth[i]]
        assert close(torch.cat(parts, dim=1), state, 1e-10)
        assert close(left[i][:, 3:], state)
        assert not left[i][:, :3].any()


def test_generate_returns_the_states_of_every_token() -> None:
    lm = build().eval()
    row = tokens(1, 5)
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "prefill": "exact"}
    out = lm.generate(
        row, max_new_tokens=4, output_hidden_states=True, return_dict_in_generate=True, **settings
    )
    with torch.no_grad():
        want = lm(out.sequences[:, :-1], prefill="exact", output_hidden_states=True).hidden_states
    assert [len(step) for step in out.hidden_states] == [len(lm.model.layers) + 1] * 4
    for i, state in enumerate(want):
        assert close(torch.cat([step[i] for step in out.hidden_states], dim=1), state, 1e-10)


def test_the_configuration_decides_where_the_call_does_not() -> None:
    lm = build().eval()
    row = tokens(1, 4)
    with torch.no_grad():
        want = lm(row, use_cache=False)
        assert want.hidden_states is None
        assert lm.model(row).hidden_states is None
        lm.config.output_hidden_states, lm.config.return_dict = True, False
        logits, states = lm(row, use_cache=False)
        assert torch.equal(logits, want.logits)
        assert len(states) == 5
        assert len(lm(row, output_hidden_states=False, use_cache=False)) == 1
        assert lm(row, return_dict=True).logits is not None
        last, cache, states = lm.model(row)
        assert states[-1] is last
        assert cache.get_seq_length() == 4


def test_return_dict_false_gives_the_tuple_of_what_is_there() -> None:
    lm = build().eval()
    row = tokens(1, 4)
    with torch.no_grad():
        want = lm(row, labels=row)
        loss, logits, cache = lm(row, labels=row, return_dict=False)
    assert torch.equal(loss, want.loss)
    assert torch.equal(logits, want.logits)
    assert cache.get_seq_length() == 4


@pytest.mark.parametrize("make", [build, test_lckv.build])
def test_attention_weights_are_refused_by_name(make) -> None:
    lm = make().eval()
    row = tokens(1, 4)
    for model in (lm, lm.model):
        with pytest.raises(ValueError, match="output_attentions=True is not supported"):
            model(row, output_attentions=True)
        model(row, output_attentions=False)
    with pytest.raises(ValueError, match="output_attentions=True is not supported"):
        lm.generate(row, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("labls", "did you mean 'labels'"),
        ("ouput_hidden_states", "'output_hidden_states'"),
        ("xyz", "it has"),
    ],
)
def test_arguments_that_do_not_exist_are_refused_with_the_nearest_name(name: str, hint: str) -> None:
    lm = build().eval()
    with pytest.raises(TypeError, match=rf"WhiteMatterForCausalLM\.forward has no '{name}'.*{hint}"):
        lm(tokens(1, 4), **{name: None})
    with pytest.raises(TypeError, match=r"WhiteMatterModel\.forward has no 'labels'"):
        lm.model(tokens(1, 4), labels=tokens(1, 4))


def test_labels_with_only_some_logits_are_refused() -> None:
    lm = build().eval()
    row = tokens(1, 4)
    for keep in (1, torch.tensor([0, 1])):
        for more in ({"labels": row}, {"shift_labels": row}):
            with pytest.raises(ValueError, match="labels need the logits of all positions"):
                lm(row, logits_to_keep=keep, **more)


def test_losses_of_shifted_labels_and_of_a_given_count() -> None:
    lm = build().eval()
    row = tokens(2, 6)
    shifted = torch.cat((row[:, 1:], torch.full((2, 1), -100)), 1)
    with torch.no_grad():
        loss = lm(row, labels=row).loss
        assert close(lm(row, shift_labels=shifted).loss, loss)
        assert close(lm(row, labels=row, num_items_in_batch=4).loss, loss * 10 / 4)
