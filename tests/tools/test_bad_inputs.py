"""Every program, given what is not there or is not what it reads: one line, no traceback."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What stands in the place of each program's input is BAD, of its output OUT.
COMMANDS = {
    "tools.average_checkpoints": ["BAD", "--last", "3", "--output", "OUT"],
    "tools.count_flops": ["BAD"],
    "tools.export_hf": ["BAD", "--output", "OUT"],
    "tools.import_hf": ["BAD", str(ROOT / "configs/demo.yaml"), "run.dir=OUT"],
    "tools.inspect_shards": ["BAD"],
    "tools.measure_convergence": ["BAD"],
    "tools.pack_data": ["--input", "BAD", "--tokenizer", "BAD", "--output", "OUT"],
    "tools.plan_memory": ["BAD", "--gpus", "8", "--gpu-memory", "80"],
    "tools.plot_run": ["BAD", "--output", "OUT"],
    "tools.reshape_checkpoint": ["BAD", "--list"],
    "tools.train_tokenizer": ["--input", "BAD", "--output", "OUT", "--vocab-size", "300"],
    "wm_ds.evaluate.__main__": ["perplexity", "BAD", "--data", "BAD"],
    "wm_ds.train": ["BAD", "--dry-run"],
}
NAMES = ("config.yaml", "config.json", "manifest.json", "metrics.jsonl", "tokenizer.json", "history.json")
BYTES = bytes(range(256)) * 4


def make(kind: str, folder: Path) -> Path:
    """A bad input of one kind."""
    path = folder / kind
    if kind == "an empty file":
        path.touch()
    elif kind == "bytes":
        path.write_bytes(BYTES)
    elif kind == "an empty folder":
        path.mkdir()
    elif kind in ("a folder of bytes", "a folder of lists"):
        (path / "checkpoints").mkdir(parents=True)
        for name in (*NAMES, "checkpoints/latest"):
            (path / name).write_bytes(BYTES if kind == "a folder of bytes" else b"[1]\n")
    elif kind == "a model of an unknown type":
        path.mkdir()
        (path / "config.json").write_text('{"model_type": "nonsense"}')
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "nothing there",
        "an empty file",
        "bytes",
        "an empty folder",
        "a folder of bytes",
        "a folder of lists",
        "a model of an unknown type",
    ],
)
@pytest.mark.parametrize("program", COMMANDS)
def test_a_bad_input_is_one_line_that_names_it(tmp_path, capsys, program, kind):
    bad, out = make(kind, tmp_path), tmp_path / "out"
    words = [word.replace("BAD", str(bad)).replace("OUT", str(out)) for word in COMMANDS[program]]
    code = importlib.import_module(program).main(words)
    lines = capsys.readouterr().err.strip().splitlines()
    assert code in (1, 2), lines
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], lines
    assert str(bad) in lines[-1]


def test_a_damaged_manifest_of_the_data_that_is_planned_for(tmp_path, capsys):
    """plan_memory and the dry run read the data that the configuration names, where there is some."""
    (tmp_path / "manifest.json").write_bytes(BYTES)
    config = str(ROOT / "configs/demo.yaml")
    for program, options in (
        ("tools.plan_memory", ["--gpus", "8", "--gpu-memory", "80"]),
        ("wm_ds.train", ["--dry-run"]),
    ):
        words = [config, f"data.train={tmp_path}", f"data.holdout={tmp_path}", *options]
        assert importlib.import_module(program).main(words) in (1, 2)
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith(f"error: {tmp_path}/manifest.json")
