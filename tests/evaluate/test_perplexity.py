"""Held-out perplexity against sums computed another way."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from tests.support import exported
from wm_ds import trained
from wm_ds.data.sequences import PackedSequences
from wm_ds.engine.loss import TokenLoss
from wm_ds.evaluate import __main__ as evaluate
from wm_ds.evaluate import perplexity
from wm_ds.export import export
from wm_ds.families import build_model

OPTIONS = {
    "step": None,
    "data": None,
    "split": "holdout",
    "sequences": None,
    "passes": None,
    "exact": 3,
    "tolerance": 1e-6,
    "batch": 3,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def report(run) -> dict:
    return evaluated(run)


def evaluated(source: Path, **options: object) -> dict:
    question = perplexity.Question(source=source, **{**OPTIONS, **options})
    return perplexity.evaluate(question, perplexity.alone())


def losses(report: dict) -> dict[str, float]:
    return {row["schedule"]: row["loss"] for row in report["rows"]}


def documents(run: Path, rows: int) -> list[torch.Tensor]:
    """Ids of every document, or part of one, in the first held-out rows."""
    found = []
    sequences = PackedSequences(run.parent / "packed", "holdout")
    for i in range(rows):
        row = sequences[i]
        for number in range(int(row.document_ids.max()) + 1):
            found.append(row.input_ids[row.document_ids == number])
    return found


@torch.no_grad()
def test_exact_row_equals_decoding_documents_one_token_at_a_time(run, report):
    """Each document alone, each token with the cache of those before it: no packing, mask or schedule."""
    model = trained.find(run).load(torch.float32)
    total, tokens = 0.0, 0
    for ids in documents(run, 3):
        cache = None
        for position in range(len(ids) - 1):
            out = model(ids[position : position + 1][None], past_key_values=cache, use_cache=True)
            cache = out.past_key_values if "past_key_values" in out else out.cache
            total -= torch.log_softmax(out.logits[0, -1].double(), dim=0)[ids[position + 1]].item()
            tokens += 1
    row = next(row for row in report["rows"] if row["schedule"].startswith("exact"))
    assert row["tokens"] == tokens
    assert row["loss"] == pytest.approx(total / tokens, abs=1e-5)


def test_rows_of_the_table(report):
    """1 .. trained + 1 passes, the trained one marked; converged and exact agree where they must."""
    by_name = losses(report)
    names = list(by_name)
    assert names[:4] == [
        "cyclic, g=8, 1 pass",
        "cyclic, g=8, 2 passes",
        "cyclic, g=8, 3 passes, as trained",
        "cyclic, g=8, 4 passes",
    ]
    assert len({round(by_name[name], 7) for name in names[:4]}) == 4  # the passes differ on this model
    kinds = [(row["kind"], row["as_trained"], row["beside_exact"]) for row in report["rows"]]
    plain = ("cyclic", False, False)
    assert kinds == [
        *(plain, plain, ("cyclic", True, False), plain),
        *(("converged", False, False), ("cyclic", True, True), ("exact", False, True)),
    ]
    assert all(row["perplexity"] == pytest.approx(math.exp(row["loss"])) for row in report["rows"])
    everything = losses(report | evaluated(Path(report["source"]), exact=8))
    assert everything["until converged to 1e-06"] == pytest.approx(
        everything["exact, on 8 sequences"], abs=1e-5
    )


def test_batch_size_does_not_matter(run, report):
    """To rounding: this model's random weights amplify that of fp32 to some 1e-6, so fp64 tells the rule."""
    assert losses(evaluated(run, batch=8)) == pytest.approx(losses(report), abs=2e-5)
    one, eight = (losses(evaluated(run, batch=batch, dtype="float64", exact=1)) for batch in (1, 8))
    assert one == pytest.approx(eight, abs=1e-10)
    assert one["cyclic, g=8, 1 pass"] == pytest.approx(losses(report)["cyclic, g=8, 1 pass"], abs=2e-5)


def test_unigram_entropy(run, report):
    """Over the targets: every document's tokens but its first, parts of documents counted as documents."""
    targets = torch.cat([ids[1:] for ids in documents(run, 8)])
    p = torch.bincount(targets).double() / len(targets)
    assert report["unigram_entropy"] == pytest.approx(-(p[p > 0] * p[p > 0].log()).sum().item(), rel=1e-9)
    assert report["rows"][0]["tokens"] == len(targets)


@pytest.fixture(scope="module")
def learned(tmp_path_factory) -> Path:
    """A run whose weights have been trained for a while, as those are that anybody evaluates."""
    run = exported.make_run(tmp_path_factory.mktemp("learned"))
    lm = build_model(trained.Trained(run, run).hf_config(), seed=0)
    rows = PackedSequences(run.parent / "packed", "train")
    loss, optimizer = TokenLoss(lm.train()), torch.optim.AdamW(lm.parameters(), lr=5e-3)
    losses = []
    for step in range(40):
        batch = [rows[(8 * step + i) % len(rows)] for i in range(8)]
        names = ("input_ids", "labels", "document_ids")
        inputs = {name: torch.stack([torch.as_tensor(getattr(row, name)) for row in batch]) for name in names}
        value = loss(**inputs) / (inputs["labels"] != -100).sum()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert losses[-1] < losses[0] - 2
    exported.save(run, lm.eval(), 40)
    return run


@pytest.fixture(scope="module")
def learned_report(learned) -> dict:
    return evaluated(learned, batch=1, tolerance=1e-5)


def test_the_value_is_the_same_at_any_batch_size(learned, learned_report):
    for batch in (3, 8):
        other = evaluated(learned, batch=batch, tolerance=1e-5)
        assert values(other) == pytest.approx(values(learned_report), rel=1e-6)
        assert [row["tokens"] for row in other["rows"]] == [row["tokens"] for row in learned_report["rows"]]


@pytest.mark.long
@pytest.mark.alone
def test_the_value_is_the_same_on_two_ranks(learned, learned_report, tmp_path):
    """8 rows in batches of 3 do not divide over two ranks: the rest is filler that counts nothing."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "wm_ds.evaluate", "perplexity", str(learned), "--batch", "3", "--exact", "3"]
    command += ["--tolerance", "1e-5", "--json", str(tmp_path / "report.json")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    other = json.loads((tmp_path / "report.json").read_text())
    assert values(other) == pytest.approx(values(learned_report), rel=1e-6)
    assert [row["tokens"] for row in other["rows"]] == [row["tokens"] for row in learned_report["rows"]]
    assert "3 passes, as trained" in result.stdout


def values(report: dict) -> dict[str, float]:
    return {row["schedule"]: row["perplexity"] for row in report["rows"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exports_keep_the_perplexity(learned, learned_report, tmp_path, monkeypatch, dtype):
    """Within 0.1% of the run's own, also where weights are rounded and all is computed in bf16."""
    monkeypatch.setattr(export, "check", lambda *_: 0.0)  # other tests are about that
    source = trained.find(learned)
    folder = export.export(source, tmp_path / "out", dtype=getattr(torch, dtype), max_shard_size=10**9)
    data = learned.parent / "packed"
    other = evaluated(folder, data=data, tolerance=1e-2, dtype=dtype, exact=1)
    name = "cyclic, g=8, 3 passes, as trained"
    assert values(other)[name] == pytest.approx(values(learned_report)[name], rel=1e-3)


@pytest.mark.long
def test_folder_gives_the_same_numbers_as_its_run(run, report, tmp_path):
    source = trained.find(run)
    folder = export.export(source, tmp_path / "out", dtype=torch.float32, max_shard_size=10**9)
    other = evaluated(folder, data=run.parent / "packed")
    assert losses(other) == pytest.approx(losses(report), abs=1e-7)
    with pytest.raises(perplexity.EvaluationError, match="say with --data"):
        evaluated(folder)


@pytest.mark.parametrize("family", ["vanilla", "cla"])
def test_without_passes_there_is_one_row(tmp_path, family):
    run = exported.make_run(tmp_path, family=family)
    report = evaluated(run)
    assert list(losses(report)) == ["one pass"]
    model = trained.find(run).load(torch.float32)
    total, tokens = 0.0, 0
    with torch.no_grad():
        for ids in documents(run, 8):
            logits = model(ids[None], past_key_values=DynamicCache(), use_cache=True).logits[0, :-1].double()
            total -= torch.log_softmax(logits, dim=1).gather(1, ids[1:, None]).sum().item()
            tokens += len(ids) - 1
    assert losses(report)["one pass"] == pytest.approx(total / tokens, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["RUN", "--step", "3"], "no checkpoint of step 3"),
        (["RUN", "--data", "nowhere"], "is not a packed data set"),
        (["RUN", "--batch", "0"], "--batch 0 must be at least 1"),
        (["RUN", "--sequences", "0"], "--sequences 0 must be at least 1"),
    ],
)
def test_bad_input_is_one_line(run, capsys, arguments, words):
    arguments = [str(run) if argument == "RUN" else argument for argument in arguments]
    assert evaluate.main(["perplexity", *arguments]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert words in error
    assert "\n" not in error
