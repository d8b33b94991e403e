"""Scores for lm-evaluation-harness: against direct sums, at any batch size, against the stock backend."""

import random
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from tests.support import exported
from tests.support.scoring import EOS, by_hand, make_lm
from wm_ds import trained
from wm_ds.evaluate.perplexity import EvaluationError, mean_loss
from wm_ds.evaluate.scheduled_lm import ScheduledLM
from wm_ds.evaluate.tasks import Question, scoring_schedule
from wm_ds.model import Schedule, WhiteMatterConfig, WhiteMatterForCausalLM
from wm_ds.plan.storage_tracker import StorageTracker


def requests(count: int = 40) -> list[tuple[str, str]]:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 30))) for _ in range(2 * count)]
    return [(words[i].strip() or "x", " " + (words[i + 1].strip() or "y")) for i in range(0, 2 * count, 2)]


def loglikelihood(lm, pairs):
    return lm.loglikelihood([SimpleNamespace(args=pair) for pair in pairs], disable_tqdm=True)


def test_scores_do_not_depend_on_the_batch(model, tokenizer):
    pairs = requests()
    expected = [by_hand(model, tokenizer, *pair) for pair in pairs]
    for batch in (1, 3, 16, 40):
        found = loglikelihood(make_lm(model, tokenizer, batch), pairs)
        assert [f[0] for f in found] == pytest.approx([e[0] for e in expected], abs=1e-4)
        assert [f[1] for f in found] == [e[1] for e in expected]


def test_greedy_flag_is_true_for_the_most_probable_continuation(model, tokenizer):
    ids = tokenizer.encode("abc", add_special_tokens=False)
    lm = make_lm(model, tokenizer, 2)
    for _ in range(3):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1, :256].argmax()))
    with torch.no_grad():
        free = bool(
            (model(torch.tensor([ids[:-1]])).logits[0, 2:].argmax(dim=1) == torch.tensor(ids[3:])).all()
        )
    scored = lm._loglikelihood_tokens([(None, ids[:3], ids[3:]), (None, ids[:3], [7, 7])], disable_tqdm=True)
    assert scored[0][1] is free
    assert scored[1][1] is False


def test_schedule_is_the_one_asked_for(model, tokenizer):
    pairs = requests(6)
    few, exact = Schedule.cyclic(2, 1), Schedule.exact()
    scores = {}
    for schedule in (few, exact):
        scores[schedule] = loglikelihood(make_lm(model, tokenizer, 4, schedule), pairs)
        expected = [by_hand(model, tokenizer, *pair, schedule) for pair in pairs]
        assert [s[0] for s in scores[schedule]] == pytest.approx([e[0] for e in expected], abs=1e-4)
    assert max(abs(a[0] - b[0]) for a, b in zip(scores[few], scores[exact])) > 1e-2


def test_a_model_that_runs_once_is_scored_in_one_pass(tmp_path, tokenizer):
    once = trained.find(exported.make_run(tmp_path, family="fusedkv")).load(torch.float32)
    pairs = requests(6)
    assert scoring_schedule(once.config, Question(tmp_path, [])) is None
    scores = loglikelihood(make_lm(once, tokenizer, 4), pairs)
    for pair, (score, greedy) in zip(pairs, scores, strict=True):
        expected, best = by_hand(once, tokenizer, *pair)
        assert score == pytest.approx(expected, abs=1e-4)
        assert greedy == best
    with pytest.raises(EvaluationError, match="--passes, --groups and --exact are for models that iterate"):
        scoring_schedule(once.config, Question(tmp_path, [], passes=2))


def test_stock_backend_gives_the_same(model, tokenizer):
    """`lm_eval --model hf` runs the model's own forward, with padding unmasked on the right."""
    pairs = requests(12)
    stock = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=5, add_bos_token=False)
    assert stock.max_length == model.config.max_position_embeddings == 64
    ours, theirs = loglikelihood(make_lm(model, tokenizer, 5), pairs), loglikelihood(stock, pairs)
    assert [o[0] for o in ours] == pytest.approx([t[0] for t in theirs], abs=1e-4)
    assert [o[1] for o in ours] == [t[1] for t in theirs]


def test_empty_context_is_one_separator(model, tokenizer):
    """There is no BOS; the prefix is the id that ended documents in training, once."""
    found = loglikelihood(make_lm(model, tokenizer, 1), [("", "abc")])
    assert found[0][0] == pytest.approx(by_hand(model, tokenizer, "", "abc")[0], abs=1e-4)


def test_joins_never_leave_nothing_to_score(model, tokenizer):
    pairs = [("Q: x", " "), ("Q:", " yes"), ("a ", "b"), ("ab", "c")]
    assert all(score < 0 for score, _ in loglikelihood(make_lm(model, tokenizer, 4), pairs))


def test_rolling_windows_score_each_token_once(model, tokenizer):
    lm = make_lm(model, tokenizer, 3)
    lm._max_length = 8
    text = "abcdefghijklmnopqrst"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 20
    windows = [([EOS], ids[:8]), (ids[7:8], ids[8:16]), (ids[11:16], ids[16:20])]
    total, scored = 0.0, 0
    for context, continuation in windows:
        row = torch.tensor([(context + continuation)[-9:]])
        with torch.no_grad():
            logits = model(row[:, :-1]).logits[0, -len(continuation) :].double()
        total += float(torch.log_softmax(logits, dim=1).gather(1, torch.tensor(continuation)[:, None]).sum())
        scored += len(continuation)
    assert scored == 20
    found = lm.loglikelihood_rolling([SimpleNamespace(args=(text,))], disable_tqdm=True)
    assert found == pytest.approx([total], abs=1e-4)


def test_long_requests_lose_their_left(model, tokenizer):
    context, continuation = "x" * 100 + "abc", "def"
    found = loglikelihood(make_lm(model, tokenizer, 1), [(context, continuation)])
    assert found[0][0] == pytest.approx(by_hand(model, tokenizer, context[-62:], continuation)[0], abs=1e-4)


def token_by_token(model, windows: list[tuple[list[int], list[int]]]) -> float:
    """Sum over the windows' continuations, from the logits of each window alone."""
    total = 0.0
    for context, continuation in windows:
        with torch.no_grad():
            logits = model(torch.tensor([(context + continuation)[:-1]])).logits[0, len(context) - 1 :]
        picked = torch.log_softmax(logits.double(), dim=1).gather(1, torch.tensor(continuation)[:, None])
        total += float(picked.sum())
    return total


def test_continuations_longer_than_the_rows_score_every_token_once(model, tokenizer):
    """In windows of eight behind the context's last token, as rolling perplexity does; the others as ever."""
    lm = make_lm(model, tokenizer, 2)
    lm._max_length = 8
    ids = [(7 * i) % 250 for i in range(30)]
    cases = {
        (3, 9): [(ids[2:3], ids[3:11]), (ids[3:11], ids[11:12])],
        (1, 16): [(ids[:1], ids[1:9]), (ids[8:9], ids[9:17])],
        (3, 8): [(ids[2:3], ids[3:11])],
        (6, 4): [(ids[1:6], ids[6:10])],
        (2, 3): [(ids[:2], ids[2:5])],
        (0, 3): [([EOS], ids[:3])],
        (3, 0): [],
    }
    wanted = [(None, ids[:c], ids[c : c + n]) for c, n in cases]
    found = lm._loglikelihood_tokens(wanted, disable_tqdm=True)
    expected = [token_by_token(model, windows) for windows in cases.values()]
    assert [score for score, _ in found] == pytest.approx(expected, abs=1e-4)
    assert found[-1] == (0.0, True)
    assert lm.cuts == {lm.WINDOWS: 2, lm.CONTEXT: 2}


def test_the_greedy_flag_of_windows_needs_all_of_them(model, tokenizer):
    lm = make_lm(model, tokenizer, 1)
    lm._max_length = 4
    best: list[int] = [5]
    for length in range(6):  # each token the most probable one in its window, [0, 4] or [2, 6]
        start = 0 if length < 4 else 2
        with torch.no_grad():
            best.append(int(model(torch.tensor([best[start:]])).logits[0, -1].argmax()))
    assert lm._loglikelihood_tokens([(None, best[:1], best[1:])], disable_tqdm=True)[0][1]
    last, first = [*best[:-1], best[-1] ^ 1], [best[0], best[1] ^ 1, *best[2:]]
    for other in (last, first):
        assert not lm._loglikelihood_tokens([(None, other[:1], other[1:])], disable_tqdm=True)[0][1]


def test_requests_that_hold_nothing_do_not_end_the_suite(model, tokenizer):
    pairs = [("", ""), (" ", "abc"), ("", "abc"), ("abc", "")]
    found = loglikelihood(make_lm(model, tokenizer, 4), pairs)
    assert found[0] == found[3] == (0.0, True)
    assert found[1][0] == pytest.approx(by_hand(model, tokenizer, "", " abc")[0], abs=1e-4)
    assert found[2][0] == pytest.approx(by_hand(model, tokenizer, "", "abc")[0], abs=1e-4)


def generations(lm, prompts: list[str], **settings) -> list[str]:
    settings = {"until": ["q"], "do_sample": False, "temperature": 0.0, "max_gen_toks": 12} | settings
    made = [Instance("generate_until", {}, (prompt, settings), i) for i, prompt in enumerate(prompts)]
    return lm.generate_until(made, disable_tqdm=True)


PROMPTS = ["abc", "a much longer prompt than that", "x", "z" * 60]


def test_answers_are_the_stock_backend_s_at_any_batch_size(model, tokenizer):
    stock = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, add_bos_token=False)
    expected = generations(stock, PROMPTS)
    assert len(set(expected)) > 1
    for batch in (1, 3):
        lm = make_lm(model, tokenizer, batch)
        assert generations(lm, PROMPTS) == expected
        assert lm.cuts == {lm.PROMPT: 1}  # 60 + 12 tokens in rows of 64


def greedy(model, ids: list[int], count: int, schedule: Schedule) -> list[int]:
    """By whole forwards under the schedule, no cache."""
    for _ in range(count):
        with torch.no_grad():
            ids = [*ids, int(model(torch.tensor([ids]), schedule=schedule).logits[0, -1, :257].argmax())]
    return ids[-count:]


def test_the_schedule_reaches_answers(model, tokenizer):
    """An exact evaluation of all tokens at once is the prompt's exact evaluation and decoding behind it."""
    prompts = ["abcde fg", "hij kl mn"]
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    expected = [tokenizer.decode(greedy(model, row, 12, Schedule.exact())) for row in ids]
    assert generations(make_lm(model, tokenizer, 2, Schedule.exact()), prompts, until=[]) == expected
    few = make_lm(model, tokenizer, 2, Schedule.cyclic(1, 1))
    first = [greedy(model, row, 1, Schedule.cyclic(1, 1)) for row in ids]
    assert generations(few, prompts, until=[], max_gen_toks=1) == [tokenizer.decode(one) for one in first]
    assert generations(few, prompts, until=[]) != expected


def test_answers_as_long_as_the_rows_get_half_of_them(model, tokenizer):
    """The stock backend asserts here. An empty prompt is a separator."""
    lm = make_lm(model, tokenizer, 2)
    prompt = "ab" * 40
    found = generations(lm, [prompt, "", "c"], max_gen_toks=256, until=[])
    half = greedy_texts(model, tokenizer, [tokenizer.encode(prompt)[-32:], [EOS], tokenizer.encode("c")], 32)
    assert found == half
    assert lm.cuts == {lm.ANSWER: 3, lm.PROMPT: 1}
    assert generations(lm, ["c"], max_length=1000, until=[])[0].startswith(half[2])
    assert lm.cuts[lm.ANSWER] == 4


def greedy_texts(model, tokenizer, rows: list[list[int]], count: int) -> list[str]:
    """By transformers alone, a row at a time, with the prefill of the model's configuration."""
    texts = []
    for row in rows:
        ids = model.generate(torch.tensor([row]), max_new_tokens=count, do_sample=False)[0, len(row) :]
        text = tokenizer.decode(ids)
        texts.append(text.split("<|endoftext|>")[0])
    return texts


@torch.no_grad()
def test_evaluation_never_holds_whole_logits():
    """A whole model at the paper's vocabulary and length, both ways to evaluate it: everything that is alive
    at once, pool and states included, is a part of the 1.24 GB that the logits of one row would be."""
    config = WhiteMatterConfig(
        vocab_size=151_936,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_kv_channels=1,
        max_position_embeddings=2048,
        eos_token_id=0,
    )
    model = WhiteMatterForCausalLM(config).eval()
    tokens = torch.randint(151_936, (1, 2048))
    batch = {"input_ids": tokens, "labels": tokens.roll(-1, 1), "document_ids": torch.zeros_like(tokens)}
    lm = ScheduledLM.__new__(ScheduledLM)
    lm._model, lm.schedule, lm._device, lm._rank = model, None, torch.device("cpu"), 0
    lm._max_length, lm.batch_size_per_gpu, lm.scored, lm.said = 2048, 1, 0, time.monotonic()
    lm.cuts = Counter()
    row = tokens[0].tolist()
    found = {}
    for name, evaluation in {
        "perplexity": lambda: mean_loss(model, [batch], None, torch.device("cpu"))[0] * 2048,
        "lm-eval": lambda: -lm._loglikelihood_tokens([(None, row[:1], [*row[1:], row[0]])])[0][0],
    }.items():
        with StorageTracker(model.parameters()) as tracker:
            found[name] = evaluation()
        print(f"{name}: {tracker.peak / 1e6:.0f} MB at the worst moment")
        assert tracker.peak < 2048 * 151_936 * 4 / 2
    assert found["perplexity"] == pytest.approx(found["lm-eval"], rel=1e-5)
