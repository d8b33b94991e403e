"""The passes over a prompt are Hugging Face's, for every schedule; what cuts and cache hits change."""

import json

import pytest
import torch
from engines import BLOCK, compare, generate, prompts, scheduler, worst
from whitematter_vllm.sweeps import schedule_of

CLOSE = 1e-4
MIXED = prompts([1, 2, 7, 8, 9, 31, 33, 64, 90, 130])
KINDS = {
    "trained": {"prefill": "trained"},
    "one pass": {"prefill_passes": 1},
    "jacobi": {"prefill": "cyclic", "prefill_groups": 1, "prefill_passes": 2},
    "three groups": {"prefill": "cyclic", "prefill_groups": 3, "prefill_passes": 2},
    "relaxed": {"prefill": "cyclic", "relaxation": [0.7, 0.9], "prefill_passes": 4},
    "chunked": {"prefill": "chunked", "chunk_size": 16, "prefill_passes": 1},
    "chunked jacobi": {"prefill": "chunked", "chunk_size": 24, "prefill_groups": 1, "prefill_passes": 2},
    "wavefront": {"prefill": "wavefront", "chunk_size": 16, "prefill_passes": 2},
    "converged": {"prefill": "converged", "prefill_tolerance": 1e-2},
}


LAYERWISE = {
    "one jacobi pass": {"prefill_groups": 1, "prefill_passes": 1},
    "one cyclic pass": {"prefill_groups": 4, "prefill_passes": 1},
    "embedding stands in": {"prefill_groups": 4, "prefill_passes": 1, "start_missing": "embedding"},
    "chunked": {"prefill": "chunked", "chunk_size": 16, "prefill_groups": 2, "prefill_passes": 1},
}


@pytest.fixture(scope="module")
def folder(engines):
    return engines.folder("trained")


@pytest.fixture
def llm(engines, folder):
    """An engine without prefix caching, of which tests change the schedule."""
    return as_filed(engines.engine(folder, enable_prefix_caching=False), folder)


@pytest.fixture
def cached(engines, folder):
    """The same with prefix caching."""
    return as_filed(engines.engine(folder), folder)


def as_filed(llm, folder):
    """The engine with the schedule of the folder's config.json."""
    entry = json.loads((folder / "config.json").read_text())
    names = {name for fields in KINDS.values() for name in fields}
    usual = {"prefill_border": None, "start": "embedding", "start_missing": "newest"}
    set_schedule(llm, {name: entry[name] for name in names} | usual)
    return llm


def set_schedule(llm, fields):
    """As if config.json had these fields."""

    def change(model):
        config = model.model.config
        for name, value in fields.items():
            setattr(config, name, value)
        model.model.schedule = schedule_of(config)

    llm.apply_model(change)
    llm.reset_prefix_cache()


@pytest.fixture
def reference(engines, folder, tmp_path):
    """Hugging Face's model with some fields of its configuration changed."""
    model = engines.reference(folder)
    before = dict(model.config.__dict__)

    def changed(fields):
        for name, value in fields.items():
            setattr(model.config, name, value)
        return model

    yield changed
    model.config.__dict__.update(before)


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_is_the_one_of_the_reference(llm, reference, kind):
    model = reference(KINDS[kind])
    set_schedule(llm, KINDS[kind])
    outputs = generate(llm, MIXED)
    if kind == "converged":  # how many passes a row gets may hang on a rounding
        assert worst(model, MIXED, outputs) < 1e-3
    else:
        assert worst(model, MIXED, outputs) < CLOSE


@pytest.mark.parametrize("kind", LAYERWISE)
def test_layerwise_start(llm, reference, kind):
    fields = {"start": "layerwise"} | LAYERWISE[kind]
    model = reference(fields)
    set_schedule(llm, fields)
    assert worst(model, MIXED, generate(llm, MIXED)) < CLOSE
    whole = prompts([130], seed=9)[0]
    with torch.no_grad():  # the start matters
        one = model(torch.tensor([whole])).logits
        other = reference({"start": "embedding"})(torch.tensor([whole])).logits
    assert (one - other).abs().max() > CLOSE


def test_the_schedules_differ_from_exact_evaluation(reference):
    # Else the test above would not tell them apart.
    model, prompt = reference({}), prompts([64], seed=3)[0]
    ids = torch.tensor([prompt])
    with torch.no_grad():
        exact = model(ids, prefill="exact").logits
        for kind in ("one pass", "jacobi", "relaxed", "chunked"):
            changed = reference(KINDS[kind])
            assert (changed(ids).logits - exact).abs().max() > 10 * CLOSE, kind


def test_chunks_of_the_engine_are_prefills_behind_a_cache(llm, reference, monkeypatch):
    # 24 tokens a step: what Hugging Face does when the prompt is given in pieces of 24.
    model = reference({})
    monkeypatch.setattr(scheduler(llm), "max_num_scheduled_tokens", 24)
    prompt = prompts([61], seed=4)[0]
    out = generate(llm, [prompt], new=1)[0].outputs[0]
    cache = None
    with torch.no_grad():
        for start in range(0, 61, 24):
            found = model(torch.tensor([prompt[start : start + 24]]), use_cache=True, past_key_values=cache)
            cache = found.past_key_values
    theirs = found.logits[0, -1].double().log_softmax(-1)
    assert abs(theirs[out.token_ids[0]] - out.logprobs[0][out.token_ids[0]].logprob) < CLOSE


def first_logprobs(llm, prompt):
    """All log-probabilities of the first token behind a prompt."""
    out = generate(llm, [prompt], new=1, logprobs=-1)[0]
    entry = out.outputs[0].logprobs[0]
    return torch.tensor([entry[token].logprob for token in sorted(entry)]), out.num_cached_tokens


def test_hits_within_a_step_are_passes_over_the_whole_text(cached, reference):
    # The reader's blocks are in the same pass as if it had computed them: the numbers of no hit at all.
    prompt = prompts([80], seed=5)[0]
    together = [prompt, prompt[:70], prompt[:33]]
    outputs = generate(cached, together, new=1)
    assert outputs[1].num_cached_tokens == 64
    assert outputs[2].num_cached_tokens == 32
    assert worst(reference({}), together, outputs) < CLOSE


def test_a_hit_changes_no_more_than_the_passes_had_left_open(cached, reference):
    # Behind finished blocks the rest of a prompt is nearer to exact evaluation, never farther than without.
    model, prompt = reference({}), prompts([120], seed=6)[0]
    set_schedule(cached, {"prefill_passes": 1})
    generate(cached, [prompt[:64]], new=1)
    hit, tokens = first_logprobs(cached, prompt)
    assert tokens == 64
    cached.reset_prefix_cache()
    fresh, tokens = first_logprobs(cached, prompt)
    assert tokens == 0
    with torch.no_grad():
        logits = model(torch.tensor([prompt]), prefill="exact").logits[0, -1]
    exact = logits.double().log_softmax(-1)
    open_ = (fresh - exact).abs().max()
    assert (hit - fresh).abs().max() > CLOSE  # there is something to bound
    assert (hit - fresh).abs().max() < 2 * open_
    assert (hit - exact).abs().max() <= 1.1 * open_


@pytest.mark.parametrize("kind", ["one pass", "jacobi", "relaxed", "converged"])
def test_fixed_borders_make_results_independent_of_hits(cached, reference, kind):
    # Blocks of 32 tokens, borders at each 16: a prompt is computed in segments that end where hits can end.
    set_schedule(cached, KINDS[kind] | {"prefill_border": 16})
    prompt = prompts([120], seed=7)[0]
    fresh, tokens = first_logprobs(cached, prompt)
    assert tokens == 0
    for length in (40, 64, 110):
        cached.reset_prefix_cache()
        generate(cached, [prompt[:length]], new=1)
        hit, tokens = first_logprobs(cached, prompt)
        assert tokens == length // BLOCK * BLOCK
        assert (hit - fresh).abs().max() < 1e-5
    cached.reset_prefix_cache()
    together = generate(cached, [prompt, prompt[:90], prompt], new=1, logprobs=-1)
    assert together[2].num_cached_tokens == 96
    entry = together[2].outputs[0].logprobs[0]
    same_step = torch.tensor([entry[token].logprob for token in sorted(entry)])
    assert (same_step - fresh).abs().max() < 1e-5


def test_converged_results_depend_on_hits_within_the_tolerance(cached):
    prompt = prompts([120], seed=8)[0]
    far = {}
    for tolerance in (1e-1, 1e-4):
        set_schedule(cached, {"prefill": "converged", "prefill_tolerance": tolerance})
        generate(cached, [prompt[:64]], new=1)
        hit, _ = first_logprobs(cached, prompt)
        cached.reset_prefix_cache()
        fresh, _ = first_logprobs(cached, prompt)
        far[tolerance] = float((hit - fresh).abs().max())
    assert far[1e-4] < 1e-3
    assert far[1e-4] < far[1e-1]


def test_the_folder_names_the_schedule(engines, folder, reference):
    # config.json says "trained"; hf_overrides says otherwise.
    llm = engines.engine(folder, hf_overrides={"prefill_passes": 1, "prefill_groups": 2})
    model = reference({"prefill_passes": 1, "prefill_groups": 2})
    prompt = prompts([77], seed=9)[0]
    assert compare(model, prompt, generate(llm, [prompt])[0].outputs[0]) < CLOSE
