"""LCKV, the routings, tied heads, padded vocabularies, vanilla; bf16; two ranks."""

import pytest
import torch
from engines import chosen, expected, generate, prompts, worst

CLOSE = 1e-4
MIXED = prompts([1, 2, 9, 32, 33, 64, 100], vocabulary=300)
MODELS = {
    "lckv": ("lckv", {}),
    "lckv with warm-up layers above only": ("lckv", {"warmup_layers": 1}),
    "static routing, tied head, padded vocabulary": (
        "whitematter",
        {"routing": "static", "tie_word_embeddings": True, "tokenizer_size": 300},
    ),
    "softmax routing, one channel": ("whitematter", {"routing": "softmax", "num_kv_channels": 1}),
    "fixed routing, a channel for each layer": (
        "whitematter",
        {"routing": "fixed", "num_kv_channels": 4, "router_init": "shifted"},
    ),
    "dynamic routing, wide stride": ("whitematter", {"num_kv_channels": 3, "router_stride": 3}),
    "vanilla": ("vanilla", {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_answers_are_the_reference_s(engines, name):
    family, fields = MODELS[name]
    folder = engines.folder(family, **fields)
    llm, model = engines.engine(folder), engines.reference(folder)
    assert_sees_its_context(model)
    outputs = generate(llm, MIXED)
    padded = fields.get("tokenizer_size", 384)
    for prompt, out in zip(MIXED, outputs, strict=True):
        ids, values = chosen(out.outputs[0])
        logprobs = expected(model, prompt, ids)
        theirs = logprobs[range(len(ids)), ids]
        assert (theirs - torch.tensor(values)).abs().max() < CLOSE
        assert (logprobs[:, :padded].amax(-1) - theirs).max() < 1e-5  # greedy among the ids that are tokens
    if family != "vanilla":  # again, with hits; and one after another
        assert sum(out.num_cached_tokens for out in generate(llm, MIXED)) > 0


def assert_sees_its_context(model):
    """The comparison is worth something: another first token changes what comes 30 tokens later."""
    row = prompts([30], vocabulary=300)[0]
    with torch.no_grad():
        one, other = (model(torch.tensor([[first, *row]])).logits[0, -1] for first in (5, 6))
    assert (one - other).abs().max() > 1e-3


def test_padded_ids_are_never_picked_and_scored_as_the_model_scores_them(engines):
    family, fields = MODELS["static routing, tied head, padded vocabulary"]
    folder = engines.folder(family, **fields)
    llm, model = engines.engine(folder), engines.reference(folder)
    prompt = prompts([20], vocabulary=300)[0]
    answers = generate(llm, [prompt], new=40, n=4, temperature=2.0, seed=1, logprobs=-1)[0].outputs
    picked = [token for answer in answers for token in answer.token_ids]
    assert max(picked) < 300
    first = answers[0].logprobs[0]
    theirs = expected(model, prompt, [0])[0]
    assert max(abs(theirs[token] - first[token].logprob) for token in range(384)) < CLOSE
    assert theirs[300:].exp().sum() > 0.05  # what it would have picked


def test_bfloat16(engines):
    # Rounding errors of two programs: bounded by what bf16 does to Hugging Face's own numbers.
    folder = engines.folder("trained")
    llm = engines.engine(folder, dtype="bfloat16", hf_overrides={"prefill": "exact"})
    half, full = engines.reference(folder, torch.bfloat16), engines.reference(folder)
    for prompt, out in zip(MIXED, generate(llm, MIXED, logprobs=-1)):
        answer = out.outputs[0]
        ids = list(answer.token_ids)
        mine = torch.tensor([[entry[token].logprob for token in range(384)] for entry in answer.logprobs])
        theirs = expected(half, prompt, ids, prefill="exact")
        true = expected(full, prompt, ids, prefill="exact")
        likely = true > -7
        rounding = (theirs - true)[likely].abs().max()
        assert (mine - true)[likely].abs().max() < 2 * rounding + 0.02
        assert (mine - theirs)[likely].abs().max() < 0.15


def test_a_model_that_amplifies_rounding(engines):
    # fp32 against fp64, the reference alone: as far apart as vLLM's fp32 is from either.
    folder = engines.folder("whitematter", num_hidden_layers=8, num_kv_channels=8, initializer_range=0.02)
    llm = engines.engine(folder, hf_overrides={"prefill": "exact"})
    single, double = engines.reference(folder), engines.reference(folder, torch.float64)
    prompt = prompts([150], seed=1, vocabulary=300)[0]
    answer = generate(llm, [prompt], new=1, logprobs=-1)[0].outputs[0]
    mine = torch.tensor([answer.logprobs[0][token].logprob for token in range(384)])
    theirs, true = (expected(model, prompt, [0], prefill="exact")[0] for model in (single, double))
    assert (mine - true).abs().max() < 5 * (theirs - true).abs().max() + 1e-6


@pytest.mark.parametrize(("name", "fields"), [("trained", {}), ("lckv", {})])
def test_two_ranks(engines, name, fields):
    folder = engines.folder(name, **fields)
    llm = engines.engine(folder, tensor_parallel_size=2, distributed_executor_backend="mp")
    assert worst(engines.reference(folder), MIXED, generate(llm, MIXED)) < CLOSE
