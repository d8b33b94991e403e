"""Tasks of lm-evaluation-harness: the paper's suite on local files, filters, failures, bad input."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lm_eval.models.huggingface import HFLM

from tests.support.scoring import by_hand, make_lm
from wm_ds import trained
from wm_ds.evaluate import __main__ as evaluate
from wm_ds.evaluate import harness
from wm_ds.evaluate.scheduled_lm import ScheduledLM

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


@pytest.mark.long
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
    folder = export.export(source, tmp_path / "out", dtype=torch.float32, max_shard_size=10**9)
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
