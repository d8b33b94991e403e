"""Generation: the cache changes nothing, the batch changes nothing, settings arrive, refusals are clear."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from tests.support.tiny import VOCABULARY, build, tokens
from wm_ds.model import Converged, Schedule, WhiteMatterConfig, WhiteMatterForCausalLM
from wm_ds.model.cache import CACHE_FIELD

G = 3  # groups of tiny models
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def fp32(**fields):
    return build(dtype=torch.float32, **fields).eval()


def cache_of(outputs) -> DynamicCache:
    return getattr(outputs, CACHE_FIELD)


def greedy(lm, input_ids: Tensor, new: int, **settings) -> tuple[Tensor, Tensor]:
    """Generated ids [B, new] and the logits [B, new, V] that chose them."""
    settings.setdefault("attention_mask", torch.ones_like(input_ids))
    out = lm.generate(
        input_ids,
        max_new_tokens=new,
        return_dict_in_generate=True,
        output_logits=True,
        **(GREEDY | settings),
    )
    return out.sequences[:, input_ids.shape[1] :], torch.stack(out.logits, dim=1)


def by_hand(lm, row: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """Greedy decoding without cache, one exact forward a token."""
    logits = []
    for _ in range(new):
        with torch.no_grad():
            logits.append(lm(row, schedule=Schedule.exact(), use_cache=False).logits[:, -1])
        row = torch.cat((row, logits[-1].argmax(-1, keepdim=True)), dim=1)
    return row[:, -new:], torch.stack(logits, dim=1)


@pytest.mark.parametrize("length", [1, G - 1, G, G + 1, 2 * G + 3])
def test_cache_on_and_off_and_by_hand_agree_in_exact_mode(length: int) -> None:
    lm = fp32()
    row = tokens(1, length, seed=length)
    want_ids, want = by_hand(lm, row, 12)
    for use_cache in (True, False):
        ids, logits = greedy(lm, row, 12, prefill="exact", use_cache=use_cache)
        assert torch.equal(ids, want_ids)
        assert (logits - want).abs().max() < 1e-4


def test_the_default_prefill_approaches_exact_mode_pass_by_pass() -> None:
    lm = build().eval()
    row = tokens(1, 24)
    with torch.no_grad():
        exact = lm(row, prefill="exact").logits
        error = [(lm(row, prefill_passes=n).logits - exact).abs().max().item() for n in (1, 2, 3, 8)]
    assert error[0] > error[1] > error[2] > error[3]
    assert error[3] < 1e-10


def test_a_cache_from_one_prefill_equals_one_from_single_tokens() -> None:
    lm = build().eval()
    row = tokens(1, 11)
    with torch.no_grad():
        at_once = cache_of(lm(row, prefill="exact"))
        cache = None
        for i in range(11):
            cache = cache_of(lm(row[:, i : i + 1], **{CACHE_FIELD: cache}, use_cache=True))
    for a, b in zip(at_once.layers, cache.layers, strict=True):
        assert (a.keys - b.keys).abs().max() < 1e-12
        assert (a.values - b.values).abs().max() < 1e-12


@pytest.mark.parametrize("settings", [{"prefill": "exact"}, {}, {"prefill": "converged"}], ids=str)
def test_left_padding_changes_nothing(settings: dict) -> None:
    """Prompts of 1, 5 and 12 tokens in one batch, with 0 … g further columns of padding before them."""
    lm = fp32()
    prompts = [tokens(1, n, seed=n) for n in (1, 5, 12)]
    alone = [greedy(lm, prompt, 10, **settings) for prompt in prompts]
    for more in range(G + 1):
        width = 12 + more
        batch = torch.cat(
            [torch.cat((torch.zeros(1, width - p.shape[1], dtype=torch.long), p), 1) for p in prompts]
        )
        mask = torch.tensor([[0] * (width - p.shape[1]) + [1] * p.shape[1] for p in prompts])
        ids, logits = greedy(lm, batch, 10, attention_mask=mask, **settings)
        for i, (want_ids, want) in enumerate(alone):
            assert torch.equal(ids[i], want_ids[0]), f"row {i}, {more} columns more"
            assert (logits[i] - want[0]).abs().max() < 1e-4


def test_right_padding_and_a_mask_of_ones_change_nothing() -> None:
    lm = build().eval()
    row = tokens(1, 7)
    padded = torch.cat((row, torch.zeros(1, 4, dtype=torch.long)), 1)
    with torch.no_grad():
        want = lm(row).logits
        ones = lm(row, attention_mask=torch.ones_like(row)).logits
        right = lm(padded, attention_mask=torch.tensor([[1] * 7 + [0] * 4])).logits
    assert torch.equal(ones, want)
    assert (right[:, :7] - want).abs().max() < 1e-12


def test_a_row_of_padding_only_is_harmless() -> None:
    lm = build().eval()
    row = tokens(2, 7)
    mask = torch.tensor([[0] * 7, [1] * 7])
    with torch.no_grad():
        for prefill in ("trained", "exact", "converged"):
            out = lm(row, attention_mask=mask, prefill=prefill)
            assert torch.isfinite(out.logits).all()
            assert (out.logits[1] - lm(row[1:], prefill=prefill).logits[0]).abs().max() < 1e-12


@pytest.mark.parametrize("cut", [1, G, 4, 7, 10])
def test_a_prompt_in_two_parts(cut: int) -> None:
    lm = build().eval()
    row = tokens(2, 11)
    with torch.no_grad():
        whole = lm(row, prefill="exact").logits
        cache = cache_of(lm(row[:, :cut], prefill="exact"))
        rest = lm(row[:, cut:], **{CACHE_FIELD: cache}, prefill="exact").logits
        assert cache.get_seq_length() == 11
    assert (rest - whole[:, cut:]).abs().max() < 1e-10


def test_a_padded_prompt_in_two_parts() -> None:
    """The second part of every row begins at another phase of the groups, and lands right."""
    lm = build().eval()
    lengths = (3, 7, 8)
    rows = [tokens(1, n + 9, seed=n) for n in lengths]
    width = max(lengths)
    first = torch.cat(
        [
            torch.cat((torch.zeros(1, width - n, dtype=torch.long), row[:, :n]), 1)
            for n, row in zip(lengths, rows)
        ]
    )
    second = torch.cat([row[:, n:] for n, row in zip(lengths, rows)])
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    full = torch.cat((mask, torch.ones(3, 9, dtype=torch.long)), 1)
    for settings in ({"prefill": "exact"}, {"prefill_passes": 1}, {"prefill_passes": 2}):
        with torch.no_grad():
            cache = cache_of(lm(first, attention_mask=mask, **settings))
            got = lm(second, attention_mask=full, **{CACHE_FIELD: cache}, **settings).logits
            for i, (n, row) in enumerate(zip(lengths, rows)):
                cache = cache_of(lm(row[:, :n], **settings))
                want = lm(row[:, n:], **{CACHE_FIELD: cache}, **settings).logits[0]
                assert (got[i] - want).abs().max() < 1e-10, (i, settings)


def test_generate_continues_from_a_cache_that_it_returned() -> None:
    lm = fp32(prefill="exact")
    row = tokens(1, 6)
    want, _ = greedy(lm, row, 12)
    first = lm.generate(row, max_new_tokens=5, return_dict_in_generate=True, **GREEDY)
    cache = cache_of(first)
    assert cache.get_seq_length() == first.sequences.shape[1] - 1
    ids = lm.generate(first.sequences, max_new_tokens=7, **{CACHE_FIELD: cache}, **GREEDY)
    assert torch.equal(ids[:, 6:], want)


def test_generate_takes_a_dynamic_cache_and_a_prompt_in_chunks() -> None:
    lm = fp32(prefill="exact")
    row = tokens(1, 10)
    want, _ = greedy(lm, row, 8)
    for cache in (DynamicCache(), DynamicCache(config=lm.config)):
        assert torch.equal(greedy(lm, row, 8, **{CACHE_FIELD: cache})[0], want)
        assert cache.get_seq_length() == 17
        assert sum(layer.get_seq_length() > 0 for layer in cache.layers) == lm.config.num_kv_channels
    assert torch.equal(greedy(lm, row, 8, prefill_chunk_size=4)[0], want)


def test_beams_and_samples_do_not_depend_on_the_cache() -> None:
    lm = fp32(prefill="exact")
    row = tokens(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    for settings in (
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
        {"do_sample": True, "num_return_sequences": 3, "temperature": 1.3},
    ):
        results = []
        for use_cache in (True, False):
            torch.manual_seed(0)
            out = lm.generate(
                row, attention_mask=mask, max_new_tokens=8, use_cache=use_cache, **(GREEDY | settings)
            )
            results.append(out)
        assert results[0].shape[0] == 2 * settings["num_return_sequences"]
        assert torch.equal(*results)
    assert len({tuple(r) for r in results[0].tolist()}) > 2, "samples differ from one another"


def test_beam_search_finds_what_exhaustive_search_finds() -> None:
    """All continuations of two tokens, scored one by one, against beams as wide as the vocabulary."""
    lm = fp32(prefill="exact")
    row = tokens(1, 4)
    pairs = torch.cartesian_prod(torch.arange(VOCABULARY), torch.arange(VOCABULARY))
    with torch.no_grad():
        full = torch.cat((row.expand(len(pairs), -1), pairs), 1)
        scores = lm(full, prefill="exact", use_cache=False).logits.log_softmax(-1)
    total = sum(scores[torch.arange(len(pairs)), 3 + i, pairs[:, i]] for i in range(2))
    out = lm.generate(row, max_new_tokens=2, num_beams=VOCABULARY, **GREEDY)
    assert out[0, 4:].tolist() == pairs[total.argmax()].tolist()


def test_generation_stops_at_eos_and_pads_finished_rows() -> None:
    lm = fp32(prefill="exact")
    rows = tokens(2, 5)
    ids, _ = greedy(lm, rows, 10)
    first = next(i for i in range(2, 8) if ids[0, i] not in ids[1] and ids[0, i] not in ids[0, :i])
    eos = ids[0, first].item()
    out = lm.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        max_new_tokens=10,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
    )
    assert out[0, 5 : 6 + first].tolist() == ids[0, : first + 1].tolist()
    assert (out[0, 6 + first :] == 0).all()
    alone = lm.generate(rows[:1], max_new_tokens=10, do_sample=False, eos_token_id=eos, pad_token_id=0)
    assert alone[0].tolist() == [*rows[0].tolist(), *ids[0, : first + 1].tolist()]


def test_assisted_decoding_gives_greedy_text() -> None:
    lm = fp32(prefill="exact")
    draft = fp32(k=1, layers=2, seed=3)
    row = torch.cat((tokens(1, 5), tokens(1, 5)), 1)  # something for prompt lookup to find
    settings = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": VOCABULARY - 1, "pad_token_id": 0}
    want = lm.generate(row, **settings)
    assert torch.equal(lm.generate(row, prompt_lookup_num_tokens=3, **settings), want)
    assert torch.equal(lm.generate(row, assistant_model=draft, **settings), want)


@pytest.mark.parametrize("kind", ["static", "offloaded", "quantized"])
def test_other_kinds_of_cache_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"cache_implementation='{kind}' is not supported"):
        fp32().generate(tokens(1, 4), max_new_tokens=2, cache_implementation=kind, **GREEDY)


def test_settings_arrive_from_the_call_the_generation_config_and_the_config(tmp_path) -> None:
    lm = fp32(prefill_passes=1)
    row = tokens(1, 17)
    rough, exact = greedy(lm, row, 3)[1], greedy(lm, row, 3, prefill="exact")[1]
    assert (rough - exact).abs().max() > 1e-3
    eight = greedy(lm, row, 3, prefill_passes=8)[1]
    assert (eight - exact).abs().max() < 1e-4
    assert (greedy(lm, row, 3, prefill_groups=17)[1] - exact).abs().max() < 1e-4
    assert (greedy(lm, row, 3, prefill="converged", prefill_tolerance=0.0)[1] - exact).abs().max() < 1e-4
    assert (greedy(lm, row, 3, schedule=Schedule.exact())[1] - exact).abs().max() < 1e-4
    lm.generation_config.prefill = "exact"
    lm.save_pretrained(tmp_path)
    lm = WhiteMatterForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(greedy(lm, row, 3)[1], exact)
    assert torch.equal(greedy(lm, row, 3, prefill="trained")[1], rough), "the call outranks the file"
    lm.generation_config = GenerationConfig()
    lm.config.prefill, lm.config.prefill_tolerance = "converged", 0.25
    lm.config.save_pretrained(tmp_path)
    config = WhiteMatterConfig.from_pretrained(tmp_path)
    assert config.prefill_schedule() == Converged(G, 0.25)


def test_typing_errors_in_settings_are_refused() -> None:
    lm, row = fp32(), tokens(1, 4)
    with pytest.raises(ValueError, match="prefil_passes"):
        lm.generate(row, max_new_tokens=2, prefil_passes=3, **GREEDY)
    with pytest.raises(ValueError, match="choose"):
        lm(row, prefill="exactly")
    with pytest.raises(ValueError, match="not both"):
        lm(row, prefill="exact", schedule=Schedule.exact())


# ------------------------------------------------------------------------------------------ converged


def test_a_converged_row_does_not_depend_on_its_batch() -> None:
    """Rows of several lengths need different numbers of passes; together and alone they are the same."""
    lm = build().eval()
    lengths = (4, 24, 31, 40)
    width = max(lengths)
    rows = [tokens(1, n, seed=n) for n in lengths]
    batch = torch.cat(
        [torch.cat((torch.zeros(1, width - n, dtype=torch.long), r), 1) for n, r in zip(lengths, rows)]
    )
    mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths])
    with torch.no_grad():
        for tolerance in (0.3, 0.03, 1e-3):
            settings = {"prefill": "converged", "prefill_tolerance": tolerance}
            got = lm(batch, attention_mask=mask, **settings)
            for i, (n, row) in enumerate(zip(lengths, rows)):
                want = lm(row, **settings)
                assert (got.logits[i, -n:] - want.logits[0]).abs().max() < 1e-11
                for a, b in zip(cache_of(got).layers, cache_of(want).layers, strict=True):
                    assert (a.keys[i, :, -n:] - b.keys[0]).abs().max() < 1e-11
                    assert (a.values[i, :, -n:] - b.values[0]).abs().max() < 1e-11


def test_convergence_stops_after_the_right_pass() -> None:
    """The number of passes, found from residuals measured apart, gives the same numbers."""
    lm = build().eval()
    row = tokens(1, 40)

    def entries(passes: int) -> list[Tensor]:
        cache = cache_of(lm(row, prefill_passes=passes))
        return [
            part.transpose(1, 2).flatten(2) for layer in cache.layers for part in (layer.keys, layer.values)
        ]

    with torch.no_grad():
        moved = []
        for n in range(2, 13):
            pairs = zip(entries(n - 1), entries(n))
            moved.append(max(((b - a).norm(dim=-1) / b.norm(dim=-1)).max().item() for a, b in pairs))
        for tolerance in (0.3, 0.03, 0.003):
            passes = 2 + next(i for i, change in enumerate(moved) if change <= tolerance)
            got = lm(row, prefill="converged", prefill_tolerance=tolerance).logits
            assert (got - lm(row, prefill_passes=passes).logits).abs().max() < 1e-12


def test_a_converged_prefill_continues_a_cache_and_refuses_gradients() -> None:
    lm = build().eval()
    row = tokens(2, 20)
    settings = {"prefill": "converged", "prefill_tolerance": 0.0}
    with torch.no_grad():
        cache = cache_of(lm(row[:, :7], **settings))
        got = lm(row[:, 7:], **{CACHE_FIELD: cache}, **settings).logits
        assert (got - lm(row, prefill="exact").logits[:, 7:]).abs().max() < 1e-10
    with pytest.raises(ValueError, match="no gradient"):
        lm(row, **settings)


# ----------------------------------------------------------------------------------- vocabulary, inputs


def test_ids_without_a_token_are_never_sampled() -> None:
    rows = tokens(50, 3)
    settings = {
        "do_sample": True,
        "temperature": 5.0,
        "max_new_tokens": 40,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    torch.manual_seed(0)
    assert (fp32().generate(rows, **settings) >= 30).any()
    lm = fp32(tokenizer_size=30)
    for more in ({}, {"top_p": 0.1}, {"top_k": 1}, {"num_beams": 2}):
        assert (lm.generate(rows % 30, **(settings | more)) < 30).all()
    with torch.no_grad():
        assert torch.isfinite(lm(rows).logits).all(), "scores stay those of training"


def test_packed_position_ids_mean_documents() -> None:
    """transformers packs rows by restarting position_ids; nothing may leak through them."""
    lm = build().eval()
    lengths = (6, 3, 9)  # multiples of the groups: every pass count agrees with lone documents
    docs = [tokens(1, n, seed=n) for n in lengths]
    row = torch.cat(docs, 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        for mask in (None, torch.ones_like(row)):
            packed = lm(row, position_ids=positions, attention_mask=mask, use_cache=False).logits
            at = 0
            for n, doc in zip(lengths, docs):
                assert (packed[:, at : at + n] - lm(doc).logits).abs().max() < 1e-11
                at += n
        padded = torch.cat((torch.zeros(1, 4, dtype=torch.long), row), 1)
        mask = torch.tensor([[0] * 4 + [1] * 18])
        shifted = torch.cat((torch.ones(1, 4, dtype=torch.long), positions), 1)
        got = lm(padded, position_ids=shifted, attention_mask=mask, use_cache=False).logits[:, 4:]
        assert (got - packed).abs().max() < 1e-11
        cache = cache_of(lm(row))
        with pytest.raises(ValueError, match="several documents"):
            lm(row, position_ids=positions, **{CACHE_FIELD: cache})


@pytest.mark.parametrize("passes", [1, 2, 3])
def test_packed_padded_and_alone_agree_at_every_pass_count(passes: int) -> None:
    lm = build().eval()
    doc = tokens(1, 7)
    filler = tokens(1, 2, seed=9)
    packed = torch.cat((tokens(1, 4, seed=8), filler, doc, filler, tokens(1, 3, seed=7)), 1)
    documents = torch.tensor([[0] * 4 + [-1] * 2 + [1] * 7 + [-1] * 2 + [2] * 3])
    with torch.no_grad():
        alone = lm(doc, prefill_passes=passes).logits
        in_pack = lm(packed, document_ids=documents, prefill_passes=passes, use_cache=False).logits[:, 6:13]
        assert (in_pack - alone).abs().max() < 1e-11
        for pad in range(1, 5):
            zeros = torch.zeros(1, pad, dtype=torch.long)
            mask = torch.tensor([[0] * pad + [1] * 7])
            padded = lm(torch.cat((zeros, doc), 1), attention_mask=mask, prefill_passes=passes).logits[
                :, pad:
            ]
            assert (padded - alone).abs().max() < 1e-11


def test_inputs_that_contradict_each_other_are_refused() -> None:
    lm, row = fp32(), tokens(1, 4)
    with pytest.raises(ValueError, match="attention_mask has shape"):
        lm(row, attention_mask=torch.ones(1, 5))
    with pytest.raises(ValueError, match="exactly one"):
        lm(row, inputs_embeds=torch.zeros(1, 4, 24))
    with torch.no_grad():
        cache = cache_of(lm(row))
        with pytest.raises(ValueError, match="document_ids"):
            lm(row, document_ids=torch.zeros(1, 4, dtype=torch.int32), **{CACHE_FIELD: cache})
        with pytest.raises(ValueError, match="filled by another model"):
            fp32(k=2)(row, **{CACHE_FIELD: cache})


# ------------------------------------------------------------------------------- without a prompt, offloaded


def test_without_a_prompt_text_begins_with_the_start_token() -> None:
    """No prompt, an empty one, and a row of padding beside a real one: as if the start had been given."""
    lm = fp32(bos_token_id=5, prefill="exact")
    want, _ = greedy(lm, torch.tensor([[5]]), 6)
    more = {"max_new_tokens": 6, **GREEDY}
    assert torch.equal(lm.generate(**more)[:, 1:], want)
    nothing = torch.zeros(2, 0)  # as a tokenizer makes it of "", a float
    for given in ({}, {"attention_mask": nothing}):
        assert torch.equal(lm.generate(nothing, **given, **more)[:, 1:], want.expand(2, -1))
        assert torch.equal(lm.generate(input_ids=nothing, **given, **more)[:, 1:], want.expand(2, -1))
    row = tokens(1, 4)
    batch = torch.cat((torch.zeros_like(row), row))
    mask = torch.tensor([[0] * 4, [1] * 4])
    out = lm.generate(batch, attention_mask=mask, **more)
    assert torch.equal(out[0, 4:], want[0])
    assert torch.equal(out[1, 4:], greedy(lm, row, 6)[0][0])
    assert mask.sum() == 4, "the caller's tensors stay as they were"
    assert (batch[0] == 0).all()


def test_without_a_start_token_an_empty_prompt_is_refused() -> None:
    lm = fp32()
    for given in ({}, {"inputs": torch.zeros(1, 0)}):
        with pytest.raises(ValueError, match=r"a prompt is empty.*bos_token_id"):
            lm.generate(**given, max_new_tokens=2, **GREEDY)
    with pytest.raises(ValueError, match="rows are empty"):
        lm(torch.zeros(1, 0, dtype=torch.long))


@pytest.mark.parametrize("how", ["call", "generation config", "schedule"])
def test_guidance_evaluates_its_negative_prompt_by_the_same_settings(how: str) -> None:
    """Against the formula, with both branches exact; by the defaults the negative one would be another."""
    lm = fp32(prefill_passes=1)
    row, negative = tokens(1, 6), tokens(1, 17, seed=3)
    more = {"prefill": "exact"} if how == "call" else {}
    if how == "generation config":
        lm.generation_config.prefill = "exact"
    elif how == "schedule":
        more = {"schedule": Schedule.exact()}
    out = lm.generate(
        row,
        negative_prompt_ids=negative,
        guidance_scale=1.5,
        max_new_tokens=3,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
        **GREEDY,
    )
    for i, scores in enumerate(out.scores):
        new = out.sequences[:, 6 : 6 + i]
        with torch.no_grad():
            with_prompt, without = (
                lm(torch.cat((start, new), 1), prefill="exact").logits[:, -1].log_softmax(-1)
                for start in (row, negative)
            )
            other = lm(torch.cat((negative, new), 1)).logits[:, -1].log_softmax(-1)
        assert (scores - (1.5 * with_prompt - 0.5 * without)).abs().max() < 1e-4
        assert i > 0 or (other - without).abs().max() > 1e-3


def test_a_file_s_settings_for_another_kind_of_prefill_do_not_stand_in_the_way() -> None:
    lm = fp32(prefill_passes=1)
    row = tokens(1, 17)
    exact = greedy(lm, row, 3, prefill="exact")[1]
    lm.generation_config.prefill_passes = 2
    assert torch.equal(greedy(lm, row, 3, prefill="exact")[1], exact)
    assert not torch.equal(greedy(lm, row, 3)[1], exact)


@pytest.mark.parametrize("start", [True, False])
def test_weights_on_disk_generate_the_same_text(tmp_path, start: bool) -> None:
    """With a padded vocabulary, with and without a prompt: nothing is made on the weights' device."""
    lm = fp32(tokenizer_size=30, bos_token_id=5)
    lm.save_pretrained(tmp_path)
    there = WhiteMatterForCausalLM.from_pretrained(
        tmp_path, device_map={"model": "disk", "lm_head": "cpu"}, offload_folder=tmp_path / "weights"
    )
    assert there.device.type == "meta"
    given = {} if start else {"inputs": tokens(2, 5) % 30}
    want = lm.generate(**given, max_new_tokens=5, **GREEDY)
    assert torch.equal(there.generate(**given, max_new_tokens=5, **GREEDY), want)
