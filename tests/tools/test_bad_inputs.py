"""Every program, given what is not there or is not what it reads: one line, no traceback."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = ROOT / "tests/fixtures/old_run"

# What stands in the place of each program's input is BAD, of its output OUT.
COMMANDS = {
    "tools.average_checkpoints": ["BAD", "--last", "3", "--output", "OUT"],
    "tools.chat": ["BAD", "a prompt"],
    "tools.check_export": ["BAD"],
    "tools.count_flops": ["BAD"],
    "tools.export_hf": ["BAD", "--output", "OUT"],
    "tools.import_hf": ["BAD", str(ROOT / "configs/demo.yaml"), "run.dir=OUT"],
    "tools.upcycle": ["BAD", str(ROOT / "configs/demo.yaml"), "run.dir=OUT"],
    "tools.inspect_shards": ["BAD"],
    "tools.measure_convergence": ["BAD"],
    "tools.pack_data": ["--input", "BAD", "--tokenizer", "BAD", "--output", "OUT"],
    "tools.plan_memory": ["BAD", "--gpus", "8", "--gpu-memory", "80"],
    "tools.plot_run": ["BAD", "--output", "OUT"],
    "tools.reshape_checkpoint": ["BAD", "--list"],
    "tools.report": ["BAD", "--output", "OUT"],
    "tools.runs": ["BAD"],
    "tools.sweep": ["BAD", "--plan"],
    "tools.train_tokenizer": ["--input", "BAD", "--output", "OUT", "--vocab-size", "300"],
    "wm_ds.evaluate.__main__": ["perplexity", "BAD", "--data", "BAD"],
    "wm_ds.plan.operators": ["BAD"],
    "wm_ds.train": ["BAD", "--dry-run"],
}
READS_PIPES = ("tools.count_flops", "tools.plan_memory", "wm_ds.train")
NAMES = ("config.yaml", "config.json", "manifest.json", "metrics.jsonl", "tokenizer.json", "history.json")
BYTES = bytes(range(256)) * 4


def make(kind: str, folder: Path) -> Path:
    """A bad input of one kind."""
    path = folder / kind
    if kind == "a link to nothing":
        path.symlink_to(folder / "nowhere")
    elif kind == "a link to itself":
        path.symlink_to(path)
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a file that may not be read":
        path.write_text("{}")
        path.chmod(0)
    elif kind == "an empty file":
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
        "a link to nothing",
        "a link to itself",
        "a pipe",
        "a file that may not be read",
    ],
)
@pytest.mark.parametrize("program", COMMANDS)
def test_a_bad_input_is_one_line_that_names_it(tmp_path, capsys, program, kind):
    if kind == "a pipe" and program in READS_PIPES:
        pytest.skip("reads a configuration from a pipe, as from `<(…)`, and waits for who writes it")
    if kind == "a file that may not be read" and os.geteuid() == 0:
        pytest.skip("root may read every file")
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


def one_line(capsys: pytest.CaptureFixture[str], program: str, words: list[str], *, code: int = 1) -> str:
    """What the program says in its one line."""
    assert importlib.import_module(program).main(words) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], lines
    return lines[-1]


# OUT lies below a file, so that nothing can be written there.
OUTPUTS = {
    "tools.export_hf": ["run", "--output", "OUT"],
    "tools.inspect_shards": ["packed", "--histogram", "--png", "OUT"],
    "tools.pack_data": ["--input", "run.yaml.txt", "--tokenizer", "packed/tokenizer", "--output", "OUT"],
    "tools.plot_run": ["run", "--output", "OUT"],
    "tools.report": ["run", "--output", "OUT"],
    "tools.reshape_checkpoint": ["run/checkpoints/step_00000002", "--ranks", "1", "--out", "OUT"],
    "tools.train_tokenizer": ["--input", "run.yaml.txt", "--output", "OUT", "--vocab-size", "300"],
}


@pytest.mark.parametrize("program", OUTPUTS)
def test_an_output_that_cannot_be_written_is_one_line_that_names_it(tmp_path, capsys, monkeypatch, program):
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    Path("run.yaml.txt").write_text("The winter of our discontent.\n" * 300)
    Path("file").write_text("")
    words = ["file/out.png" if word == "OUT" else word for word in OUTPUTS[program]]
    assert "file" in one_line(capsys, program, words)
    assert Path("file").read_text() == ""


@pytest.mark.parametrize("kind", ["nothing there", "a link to nothing", "a link to itself", "a pipe"])
def test_the_demos_own_text(tmp_path, capsys, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DEMO_TEXT", str(make(kind, tmp_path)))
    assert str(tmp_path / kind) in one_line(capsys, "tools.demo", [])


@pytest.mark.parametrize("kind", ["an empty file", "bytes", "a link to nothing"])
def test_the_folder_of_compiled_helpers(tmp_path, capsys, monkeypatch, kind):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(make(kind, tmp_path)))
    said = one_line(capsys, "tools.build_extensions", [])
    assert str(tmp_path / kind) in said
    assert "set TORCH_EXTENSIONS_DIR to a folder that you can write" in said


@pytest.mark.parametrize("kind", ["an empty file", "bytes", "a link to nothing", "a pipe"])
def test_the_folder_of_fetched_texts(tmp_path, capsys, kind):
    bad = make(kind, tmp_path)
    for words in (["--output", str(tmp_path / "x.jsonl"), "--downloads", str(bad)], ["--output", f"{bad}/x"]):
        assert str(bad) in one_line(capsys, "tools.fetch_text", words)
    assert not (tmp_path / "x.jsonl").exists()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank on a CPU, and the signals as before."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("wm_ds.run.launch_check.ASKED_FOR_CPU", True)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "localhost"}, "MASTER_PORT is not set"),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "any"}, "MASTER_PORT='any' in the environment must be"),
        ({"RANK": "0"}, "LOCAL_RANK, WORLD_SIZE missing"),
        (
            {"MASTER_ADDR": "x", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "4.0"},
            "LOCAL_WORLD_SIZE='4.0' in the",
        ),
    ],
)
def test_the_check_of_the_nodes_started_by_hand(tmp_path, capsys, monkeypatch, alone, variables, said):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert said in one_line(capsys, "wm_ds.run.launch_check", ["--run-dir", str(tmp_path)], code=72)


@pytest.mark.parametrize("kind", ["an empty file", "a link to nothing", "a pipe"])
def test_the_check_of_the_nodes_names_a_run_directory_that_is_none(
    tmp_path, capsys, monkeypatch, alone, kind
):
    from wm_ds.distributed.process_group import free_port

    bad = make(kind, tmp_path)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert importlib.import_module("wm_ds.run.launch_check").main(["--run-dir", str(bad)]) == 72
    said = capsys.readouterr()
    assert f"{bad} cannot be written: " in said.out
    assert "Traceback" not in said.err


def test_every_program_has_its_bad_inputs():
    """A new one comes with its own."""
    listed = {*COMMANDS, "tools.demo", "tools.build_extensions", "tools.fetch_text", "wm_ds.run.launch_check"}
    programs = {f"tools.{path.stem}" for path in (ROOT / "tools").glob("*.py")}
    for path in (ROOT / "wm_ds").rglob("*.py"):
        if '__name__ == "__main__"' in path.read_text():
            programs.add(".".join(path.relative_to(ROOT).with_suffix("").parts))
    # Runs inside exports; prints a page; the batch script's, which read the environment; a sweep's own.
    others = {
        "wm_ds.export.standalone",
        "wm_ds.config.reference",
        "wm_ds.run.rendezvous",
        "wm_ds.run.attempt",
        "wm_ds.sweep.measure",
    }
    assert programs - others == listed
