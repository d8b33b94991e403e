"""The whole chain, each program taking what the one before has written: pack, train, go on, export, evaluate.

From a folder that is not the repository, without a word on DeepSpeed, under a umask that hides files.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support import exported, toy_corpus
from tools import export_hf, inspect_shards, plot_run, reshape_checkpoint
from wm_ds import train
from wm_ds.evaluate import __main__ as evaluate
from wm_ds.run.metrics_file import read_metrics

pytestmark = pytest.mark.alone  # trains

HELD_OUT = 4


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory, under a umask of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "WM_ATTEMPT"):
        monkeypatch.delenv(name, raising=False)
    mask = os.umask(0o027)
    yield tmp_path
    os.umask(mask)


def launch(*words: str) -> int:
    """Train in a fork, which need not import anything again: DeepSpeed can begin once in a process."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            code = train.main(["run.yaml", *words])
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_every_program_takes_what_the_one_before_has_written(place, capfd):
    tokenizer = toy_corpus.byte_tokenizer(Path("tokenizer"))
    texts = toy_corpus.write_jsonl(Path("texts/a.jsonl"), toy_corpus.numbered(60))
    options = ("--seq-len", 24, "--holdout", HELD_OUT, "--holdout-by", "document")
    assert toy_corpus.pack(Path("packed"), [texts], tokenizer, *options) == 0
    assert inspect_shards.main(["packed", "--verify"]) == 0
    raw = {
        "run": {"dir": "runs/a", "deterministic": True},
        "model": exported.MODEL | {"num_groups": 4, "vocab_size": None},
        "data": {"train": "packed"},
        "batch": {"global_batch": 4, "micro_batch": 2},
        "optim": {"lr": 1e-2, "warmup": 1},
        "precision": "fp32",
        "steps": 3,
        "evaluate": {"every": None, "sequences": HELD_OUT},
    }
    Path("run.yaml").write_text(yaml.safe_dump(raw))
    assert launch("run.time_limit_minutes=0.0001") == 0
    assert json.loads(Path("runs/a/stopped").read_text())["step"] == 1
    assert launch() == 0
    assert json.loads(Path("runs/a/done").read_text())["step"] == 3
    assert reshape_checkpoint.main(["runs/a", "--verify"]) == 0

    assert export_hf.main(["runs/a", "--output", "export", "--dtype", "float32"]) == 0
    command = ["perplexity", "export", "--data", "packed", "--exact", "0", "--json", "numbers/a.json"]
    assert evaluate.main(command) == 0
    assert plot_run.main(["runs/a", "--output", "curves.png"]) == 0
    assert Path("curves.png").read_bytes().startswith(b"\x89PNG")
    assert [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")] == []

    rows = read_metrics(Path("runs/a/metrics.jsonl"))
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    (trained,) = [row for row in json.loads(Path("numbers/a.json").read_text())["rows"] if row["as_trained"]]
    last = [row["holdout_loss"] for row in rows if "holdout_loss" in row][-1]
    assert trained["loss"] == pytest.approx(last, abs=1e-5), "the export is what was trained"

    # No library has given a file or a folder a mode of its own.
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in place.rglob("*") if not path.is_symlink()}
    assert {p: oct(m) for p, m in modes.items() if m != (0o750 if p.is_dir() else 0o640)} == {}
