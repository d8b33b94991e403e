"""The harness's vLLM backend gives the scores of its stock backend, which runs the export's own code."""

import json
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path

import exports
import pytest

TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{gold}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def folder(engines, tmp_path_factory):
    """The trained export, which is asked to read prompts exactly by its own configuration."""
    folder = tmp_path_factory.mktemp("lm_eval") / "export"
    shutil.copytree(engines.folder("trained"), folder)
    entry = json.loads((folder / "config.json").read_text()) | {"prefill": "exact"}
    (folder / "config.json").write_text(json.dumps(entry))
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """A folder of tasks on lines of this project's own documents, which the model has seen."""
    root = tmp_path_factory.mktemp("tasks")
    text = (exports.CODE.parents[1] / "docs" / "model.md").read_text()
    lines = [line for line in text.splitlines() if 60 < len(line) < 110][:12]
    draw = random.Random(0)
    records = []
    # Texts that fit into one window: of longer ones the harness cuts windows one token shorter for vLLM.
    for line in lines:
        choices = [line[40:], *(other[40:] for other in draw.sample(lines, 2))]
        records.append(
            {"question": line[:40], "choices": choices, "answer": 0, "gold": line[40:50], "text": line * 2}
        )
    data = root / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "num_fewshot": 0,
        }
        (root / f"{name}.yaml").write_text(json.dumps(common | task))  # JSON is YAML
    return root


def scores(backend, arguments, tasks, out):
    """Task -> metric -> value, and the log-likelihood of every request in order."""
    command = [
        sys.executable, "-m", "lm_eval", "run", "--model", backend, "--model_args", arguments,
        "--tasks", ",".join(TASKS), "--include_path", str(tasks), "--output_path", str(out), "--log_samples",
        *(["--device", "cpu", "--batch_size", "4"] if backend == "hf" else ["--batch_size", "auto"]),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(next(Path(out).rglob("results_*.json")).read_text())["results"]
    samples = {}
    for name in TASKS:
        rows = [json.loads(line) for line in next(Path(out).rglob(f"samples_{name}_*.jsonl")).open()]
        samples[name] = [row["filtered_resps"] for row in sorted(rows, key=lambda row: row["doc_id"])]
    return results, samples


def test_equal_scores(folder, tasks, tmp_path):
    hf = f"pretrained={folder},trust_remote_code=True,dtype=float32"
    vllm = f"pretrained={folder},dtype=float32,enforce_eager=True,max_num_seqs=8,block_size=32"
    stock, theirs = scores("hf", hf, tasks, tmp_path / "hf")
    mine, ours = scores("vllm", vllm, tasks, tmp_path / "vllm")
    for task, metrics in stock.items():
        for name, value in metrics.items():
            if isinstance(value, float):
                assert math.isclose(mine[task][name], value, rel_tol=1e-4, abs_tol=1e-4), (task, name)
    assert ours["answer"] == theirs["answer"]
    for name in ("choice", "rolling"):
        for row, other in zip(ours[name], theirs[name], strict=True):
            assert log_likelihoods(row) == pytest.approx(log_likelihoods(other), rel=1e-4, abs=1e-3)
    assert 0 < stock["rolling"]["bits_per_byte,none"] < 4  # a trained model: 8 bits are noise


def log_likelihoods(responses):
    """The numbers among a sample's responses."""
    return [float(entry[0] if isinstance(entry, list) else entry) for entry in responses]
