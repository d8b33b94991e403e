"""Scores for lm-evaluation-harness: against direct sums, at any batch size, against the stock backend."""

import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

from tests.support import exported
from wm_ds import trained
from wm_ds.evaluate import __main__ as evaluate
from wm_ds.evaluate import harness
from wm_ds.evaluate.perplexity import EvaluationError, mean_loss
from wm_ds.evaluate.scheduled_lm import ScheduledLM
from wm_ds.evaluate.tasks import Question, scoring_schedule
from wm_ds.model import Schedule, WhiteMatterConfig, WhiteMatterForCausalLM
from wm_ds.plan.storage_tracker import StorageTracker

EOS = 256


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return exported.make_run(tmp_path_factory.mktemp("scored"))


@pytest.fixture(scope="module")
def tokenizer(run):
    return AutoTokenizer.from_pretrained(run.parent / "tokenizer")


@pytest.fixture(scope="module")
def model(run):
    return trained.find(run).load(torch.float32)


def make_lm(model, tokenizer, batch: int, schedule=None) -> ScheduledLM:
    return ScheduledLM(model, tokenizer, batch_size=batch, schedule=schedule)


def requests(count: int = 40) -> list[tuple[str, str]]:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 30))) for _ in range(2 * count)]
    return [(words[i].strip() or "x", " " + (words[i + 1].strip() or "y")) for i in range(0, 2 * count, 2)]


def loglikelihood(lm, pairs):
    return lm.loglikelihood([SimpleNamespace(args=pair) for pair in pairs], disable_tqdm=True)


def by_hand(model, tokenizer, context: str, continuation: str, schedule=None) -> tuple[float, bool]:
    """One request alone, from whole logits, in double precision."""
    before = tokenizer.encode(context, add_special_tokens=False) or [EOS]
    both = tokenizer.encode(context + continuation, add_special_tokens=False)
    after = both[len(before) :] if context else both
    ids = torch.tensor([before + after])
    with torch.no_grad():
        logits = model(ids[:, :-1], schedule=schedule).logits[0, len(before) - 1 :].double()
    picked = torch.log_softmax(logits, dim=1).gather(1, torch.tensor(after)[:, None])
    return float(picked.sum()), bool((logits.argmax(dim=1) == torch.tensor(after)).all())


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


QUESTIONS = {
    "arc_easy/test": {
        "question": "{a}",
        "choices": {"text": ["{b}", "{c}"], "label": ["A", "B"]},
        "answerKey": "B",
    },
    "openbookqa/test": {
        "question_stem": "{a}",
        "choices": {"text": ["{b}", "{c}"], "label": ["A", "B"]},
        "answerKey": "A",
    },
    "hellaswag/validation": {
        "activity_label": "{b}",
        "ctx_a": "{a}.",
        "ctx_b": "he",
        "ctx": "{a}. he",
        "endings": ["{a}", "{b}", "{c}", "x"],
        "label": "2",
    },
    "winogrande/validation": {
        "sentence": "{a} because _ was {b}.",
        "option1": "Ann",
        "option2": "Bob",
        "answer": "2",
    },
    "boolq/validation": {"question": "is {a}", "passage": "{b} {c}.", "label": 1},
    "lambada/lambada_test": {"text": "one two three four five six seven {a}"},
    "wikitext2/test_pages": {"page": " = {a} = \n \n {b} {c} . \n"},
    "piqa/validation": {"goal": "{a}", "sol1": "{b}", "sol2": "{c}", "label": 1},
}
QUESTIONS["arc_challenge/test"] = QUESTIONS["arc_easy/test"]


def local_data(folder: Path, count: int = 2) -> Path:
    """A few records of every task of the suite, in the layout of real ones: columns as the Hub has them."""
    rng = random.Random(0)
    for path, record in QUESTIONS.items():
        lines = []
        for _ in range(count):
            line = json.dumps(record)
            for letter in "abc":
                line = line.replace(f"{{{letter}}}", "".join(rng.choices("abcdef", k=rng.randint(3, 9))))
            lines.append(line + "\n")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{path}.jsonl").write_text("".join(lines))
    return folder


def test_the_paper_suite_runs_on_local_files(run, model, tokenizer, tmp_path, capsys):
    """The harness's own prompts and metrics, without a network: some of them as computed by hand."""
    data = local_data(tmp_path / "data", count=6)
    out = tmp_path / "scores.json"
    assert evaluate.main(["lm-eval", str(run), "--data", str(data), "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report["schedule"] == "cyclic, g=8, 3 passes"
    results = report["results"]
    assert list(results) == list(harness.PAPER)
    right, likelihoods = 0, []
    for line in (data / "piqa" / "validation.jsonl").read_text().splitlines():
        row = json.loads(line)
        context = f"Question: {row['goal']}\nAnswer:"
        scores = [by_hand(model, tokenizer, context, f" {row[key]}")[0] for key in ("sol1", "sol2")]
        right += scores.index(max(scores)) == row["label"]
    assert results["piqa"]["acc"] == pytest.approx(right / 6)
    for line in (data / "lambada" / "lambada_test.jsonl").read_text().splitlines():
        context, _, last = json.loads(line)["text"].rpartition(" ")
        likelihoods.append(by_hand(model, tokenizer, context, f" {last}")[0])
    expected = torch.tensor(likelihoods).mean().neg().exp().item()
    assert results["lambada_openai"]["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert results["wikitext"]["word_perplexity"] > 1
    assert all(0 <= metrics["acc"] <= 1 for metrics in results.values() if "acc" in metrics)
    assert "wikitext" in capsys.readouterr().out


def arithmetic(folder: Path, **more) -> Path:
    """gsm8k's columns; returns the folder of all tasks' data."""
    lines = [
        {"question": f"What is {i} plus 2?", "answer": f"It is {i + 2}.\n#### {i + 2}"} | more
        for i in range(1, 4)
    ]
    (folder / "gsm8k").mkdir(parents=True, exist_ok=True)
    (folder / "gsm8k" / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_tasks_that_generate_report_every_filter(run, tmp_path, monkeypatch, capfd):
    """gsm8k asks for 256 tokens in rows of 64. Git is not asked about the folder, which is no checkout."""
    monkeypatch.chdir(tmp_path)
    data, out = arithmetic(tmp_path / "data"), tmp_path / "scores.json"
    command = ["lm-eval", str(run), "--tasks", "gsm8k", "--data", str(data), "--exact", "--json", str(out)]
    assert evaluate.main(command) == 0
    report = json.loads(out.read_text())
    assert report["schedule"].startswith("exact")
    assert set(report["results"]["gsm8k"]) == {"exact_match,strict-match", "exact_match,flexible-extract"}
    assert report["cuts"]["gsm8k"] == {
        ScheduledLM.ANSWER: 3,
        ScheduledLM.PROMPT: 3,
    }
    said = capfd.readouterr()
    assert "exact_match,flexible-extract" in said.out
    assert "gsm8k: 3 requests lost tokens on the left of the prompt" in said.out
    assert "fatal" not in said.err


def test_filtered_scores_are_right(run, model, tokenizer, tmp_path, monkeypatch):
    """A model that answers every question with 4: one of three is right."""
    data = arithmetic(tmp_path / "data")
    monkeypatch.setattr(HFLM, "generate_until", lambda self, requests, **_: [" #### 4"] * len(requests))
    scores = harness.run(make_lm(model, tokenizer, 2), ["gsm8k"], data=data)
    assert scores.results["gsm8k"] == pytest.approx(
        {"exact_match,strict-match": 1 / 3, "exact_match,flexible-extract": 1 / 3}
    )


def test_a_task_that_fails_does_not_end_the_others(run, tmp_path, capsys):
    data, out = local_data(tmp_path / "data"), tmp_path / "scores.json"
    file = data / "arc_easy" / "test.jsonl"
    first, second = file.read_text().splitlines()
    file.write_text(first + "\n" + second.replace('"answerKey": "B"', '"answerKey": "Z"') + "\n")
    command = ["lm-eval", str(run), "--tasks", "arc_easy", "piqa", "--data", str(data), "--json", str(out)]
    assert evaluate.main(command) == 1
    said = capsys.readouterr()
    assert "error: task arc_easy failed: " in said.err
    assert "piqa" in said.out
    assert "Traceback" not in said.err
    report = json.loads(out.read_text())
    assert list(report["results"]) == ["piqa"]
    assert list(report["errors"]) == ["arc_easy"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [('"question"', '"query"', "'question' is undefined"), ('{"question"', "{question", "Missing a name")],
)
def test_data_that_cannot_be_read_is_refused_before_any_scoring(run, tmp_path, capsys, old, new, words):
    data = local_data(tmp_path / "data")
    file = data / "arc_easy" / "test.jsonl"
    file.write_text(file.read_text().replace(old, new))
    assert evaluate.main(["lm-eval", str(run), "--tasks", "piqa", "arc_easy", "--data", str(data)]) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    last = said.err.strip().splitlines()[-1]
    assert last.startswith("error: task arc_easy cannot be opened: ")
    assert words in last


def test_no_number_is_an_error():
    with pytest.raises(harness.HarnessError, match="no number for odd"):
        harness.numbers("odd", {"odd": {"alias": "odd", "acc_stderr,none": "N/A"}})
    assert harness.numbers("few", {"few": {"f1,all": 0.5, "acc,none": 1, "sample_len": 3}}) == {
        "few": {"f1,all": 0.5, "acc": 1.0}
    }


def test_only_one_process_scores(run, monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert evaluate.main(["lm-eval", str(run), "--tasks", "piqa"]) == 2
    assert "error: lm-eval runs as one process" in capsys.readouterr().err


def test_paper_suite_is_known_to_the_harness():
    assert harness.find_tasks(["paper", "piqa"]) == list(harness.PAPER)
    assert len(harness.PAPER) == 9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "no_such_task"], "has no task 'no_such_task'"),
        (["--tasks", "piqa", "--data", "nowhere"], "no local data for task piqa"),
        (["--tasks", "piqa", "--batch", "0"], "--batch 0 must be at least 1"),
        (["--tasks", "mmlu", "--data", "nowhere"], "mmlu is the name of several tasks"),
        (["--tasks", "ai2_arc", "--data", "nowhere"], "ai2_arc is the name of several tasks"),
    ],
)
def test_bad_input_is_one_line(run, capsys, arguments, words):
    assert evaluate.main(["lm-eval", str(run), *arguments]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    assert words in error


@pytest.mark.slow
def test_command_line_of_the_harness_gives_the_same(run, model, tokenizer, tmp_path):
    """`lm_eval --model hf --model_args pretrained=DIR,trust_remote_code=True` on the exported folder: every
    request's log-likelihood, and the metrics of `wm_ds.evaluate lm-eval`."""
    from wm_ds.export import export

    data = local_data(tmp_path / "data", count=12)
    source = trained.find(run)
    folder = export.export(
        source, tmp_path / "out", dtype=torch.float32, max_shard_size=10**9, say=lambda _: None
    )
    out = tmp_path / "ours.json"
    command = ["lm-eval", str(folder), "--tasks", "piqa", "--data", str(data), "--json", str(out)]
    assert evaluate.main(command) == 0
    (tmp_path / "tasks").mkdir()
    task = Path(harness.local_task("piqa", data, tmp_path / "tasks"))
    task.write_text(json.dumps(json.loads(task.read_text()) | {"task": "local_piqa"}))
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu", "--batch_size", "4"]
    command += ["--model_args", f"pretrained={folder},trust_remote_code=True", "--tasks", "local_piqa"]
    command += [
        "--include_path",
        str(task.parent),
        "--output_path",
        str(tmp_path / "theirs"),
        "--log_samples",
    ]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    theirs = json.loads(next((tmp_path / "theirs").rglob("results*.json")).read_text())
    ours = json.loads(out.read_text())["results"]["piqa"]
    assert theirs["results"]["local_piqa"]["acc,none"] == ours["acc"]
    assert theirs["results"]["local_piqa"]["acc_norm,none"] == ours["acc_norm"]
    samples = next((tmp_path / "theirs").rglob("samples*.jsonl")).read_text().splitlines()
    assert len(samples) == 12
    for sample in map(json.loads, samples):
        row = sample["doc"]
        for key, (score, _) in zip(("sol1", "sol2"), sample["filtered_resps"]):
            by_us = by_hand(model, tokenizer, f"Question: {row['goal']}\nAnswer:", f" {row[key]}")[0]
            assert float(score) == pytest.approx(by_us, abs=1e-4)
