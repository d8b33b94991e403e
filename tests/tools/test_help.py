"""`--help` of every command is answered before anything heavy is imported, and does nothing else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [f"tools.{path.stem}" for path in sorted((ROOT / "tools").glob("*.py"))]
COMMANDS += ["wm_ds.train", "wm_ds.evaluate"]
HEAVY = ("torch", "transformers", "deepspeed", "datasets", "pyarrow", "lm_eval", "matplotlib")

# Every command in a fork of one interpreter, as `python -m COMMAND --help` runs it.
PROBE = f"""
import json, os, runpy, sys
found = {{}}
for name in {COMMANDS}:
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.argv, code = [name, "--help"], None
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code
        heavy = [module for module in {HEAVY} if module in sys.modules]
        os.write(writer, json.dumps([code, heavy]).encode())
        os._exit(0)
    os.close(writer)
    found[name] = json.loads(os.read(reader, 4096) or b"null")
    os.close(reader)
    os.wait()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("elsewhere")
    result = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, cwd=folder, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert not list(folder.iterdir())
    return json.loads(result.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_nothing_heavy(answers, command) -> None:
    assert answers[command] == [0, []]
