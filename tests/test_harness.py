"""Scores for lm-evaluation-harness: against direct sums, at any batch size, against the stock backend."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoTokenizer

from tests import exported
from wm_ds import evaluate, harness, trained
from wm_ds.memory import StorageTracker
from wm_ds.model import Schedule, WhiteMatterConfig, WhiteMatterForCausalLM

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


def make_lm(model, tokenizer, batch: int, schedule=None) -> harness.ScheduledLM:
    return harness.ScheduledLM(model, tokenizer, batch_size=batch, schedule=schedule)


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
    lm = harness.ScheduledLM.__new__(harness.ScheduledLM)
    lm._model, lm.schedule, lm._device, lm._rank = model, None, torch.device("cpu"), 0
    lm._max_length, lm.batch_size_per_gpu, lm.scored, lm.said = 2048, 1, 0, time.monotonic()
    row = tokens[0].tolist()
    found = {}
    for name, evaluation in {
        "perplexity": lambda: evaluate.mean_loss(model, [batch], None, torch.device("cpu"))[0] * 2048,
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
    from wm_ds import export

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
