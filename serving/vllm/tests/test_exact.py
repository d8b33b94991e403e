"""A trained model with `prefill: exact` gives Hugging Face's numbers, however vLLM schedules it."""

import pytest
import torch
from engines import BLOCK, MODEL_LENGTH, SEATS, chosen, compare, expected, generate, prompts, scheduler, worst

EXACT = {"prefill": "exact"}
CLOSE = 1e-4
MIXED = prompts([1, 2, 3, 9, 31, 32, 33, 64, 90, 130])


@pytest.fixture(scope="module")
def folder(engines):
    return engines.folder("trained")


@pytest.fixture
def llm(engines, folder):
    return engines.engine(folder, hf_overrides=EXACT)


@pytest.fixture(scope="module")
def model(engines, folder):
    return engines.reference(folder)


def test_one_prompt_at_a_time(llm, model):
    for prompt in MIXED:
        assert worst(model, [prompt], generate(llm, [prompt]), **EXACT) < CLOSE


def test_the_model_is_trained(model):
    # Else the comparisons here would be of noise: it is sure of what follows in its own text.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.config._name_or_path, trust_remote_code=False)
    ids = tokenizer("The model is trained with the passes that the configuration names.").input_ids
    loss = -expected(model, ids[:1], ids[1:], **EXACT)[range(len(ids) - 1), ids[1:]].mean()
    assert loss < 3.5


def test_batched_with_mixed_lengths_and_more_requests_than_seats(llm, model):
    many = [*MIXED, *prompts([5, 17, 40, 3, 70, 12, 1, 50, 28, 100], seed=1)]
    assert len(many) > 2 * SEATS
    assert worst(model, many, generate(llm, many), **EXACT) < CLOSE


@pytest.mark.parametrize("budget", [SEATS, 16, 50])
def test_chunked_prefill(llm, model, monkeypatch, budget):
    monkeypatch.setattr(scheduler(llm), "max_num_scheduled_tokens", budget)
    assert worst(model, MIXED, generate(llm, MIXED), **EXACT) < CLOSE


def test_prefix_cache_hits_of_earlier_steps(llm, model):
    prompt = prompts([80], seed=2)[0]
    generate(llm, [prompt])
    longer = [prompt, prompt[:70], [*prompt, 7, 8, 9]]
    outputs = generate(llm, longer)
    assert [out.num_cached_tokens for out in outputs] == [64, 64, 64]
    assert worst(model, longer, outputs, **EXACT) < CLOSE


@pytest.mark.parametrize("lengths", [(80, 80, 70), (64, 33, 65)])
def test_prefix_cache_hits_within_a_step(llm, model, lengths):
    # The second and third request count as computed what the first computes in the same step.
    prompt = prompts([80], seed=3)[0]
    together = [prompt[:length] for length in lengths]
    outputs = generate(llm, together)
    assert max(out.num_cached_tokens for out in outputs[1:]) >= BLOCK
    assert worst(model, together, outputs, **EXACT) < CLOSE


def test_a_hit_of_one_token_on_a_block_that_decoding_fills(llm, model):
    # A request whose next token fills its block, and another one that has this block and one token more.
    prompt = prompts([BLOCK - 4], seed=4)[0]
    ids, _ = chosen(generate(llm, [prompt], new=8)[0].outputs[0])
    llm.reset_prefix_cache()
    whole = [*prompt, *ids]
    engine = llm.llm_engine
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    engine.add_request("first", {"prompt_token_ids": prompt}, greedy)
    finished = {}
    for step in range(40):
        if step == 4:  # the step in which the block becomes full
            engine.add_request("second", {"prompt_token_ids": whole[: BLOCK + 1]}, greedy)
        finished |= {out.request_id: out for out in engine.step() if out.finished}
        if not engine.has_unfinished_requests():
            break
    outputs = [next(out for name, out in finished.items() if name.startswith(n)) for n in ("first", "second")]
    assert outputs[1].num_cached_tokens == BLOCK
    assert worst(model, [prompt, whole[: BLOCK + 1]], outputs, **EXACT) < CLOSE


def test_sampling_several_answers(llm, model):
    prompt = prompts([40], seed=5)[0]
    out = generate(llm, [prompt], new=10, n=4, temperature=1.0, seed=0)[0]
    assert len({tuple(answer.token_ids) for answer in out.outputs}) > 1
    for answer in out.outputs:
        ids, values = chosen(answer)
        theirs = expected(model, prompt, ids, **EXACT)[range(len(ids)), ids]
        assert (theirs - torch.tensor(values)).abs().max() < CLOSE


def test_stop_string(llm, model):
    prompt = llm.get_tokenizer()("The model is trained").input_ids
    text = generate(llm, [prompt], new=20)[0].outputs[0].text
    stop = text[4:7]
    answer = generate(llm, [prompt], new=20, stop=[stop])[0].outputs[0]
    assert answer.finish_reason == "stop"
    assert answer.text == text[: text.index(stop)]


def test_log_probabilities_of_the_prompt(llm, model):
    prompt = prompts([50], seed=6)[0]
    for _ in range(2):  # with the blocks in the cache, too: vLLM then computes them again
        out = generate(llm, [prompt], new=1, prompt_logprobs=0)[0]
        values = [entry[token].logprob for entry, token in zip(out.prompt_logprobs[1:], prompt[1:])]
        theirs = expected(model, prompt[:1], prompt[1:], **EXACT)[range(49), prompt[1:]]
        assert (theirs - torch.tensor(values)).abs().max() < CLOSE


def test_a_prompt_as_long_as_the_model_allows(llm, model):
    prompt = prompts([MODEL_LENGTH - 1], seed=7)[0]
    out = generate(llm, [prompt], new=5)[0]
    assert len(out.outputs[0].token_ids) == 1  # the row is full then
    assert compare(model, prompt, out.outputs[0], **EXACT) < CLOSE
    with pytest.raises(Exception, match="256"):
        generate(llm, prompts([MODEL_LENGTH + 1]))


def test_preemption_and_recomputation(engines, folder, model):
    # Eight requests that grow to 4 blocks each, and 12 blocks.
    llm = engines.engine(folder, hf_overrides=EXACT, num_gpu_blocks_override=12, disable_log_stats=False)
    many = prompts([30, 40, 50, 33, 61, 20, 45, 64], seed=8)
    outputs = generate(llm, many, new=50)
    preempted = [m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"]
    assert sum(preempted) > 0
    assert worst(model, many, outputs, **EXACT) < CLOSE
