"""How a command line ends: one line, the right code, and quiet when nobody reads."""

import ast
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from wm_ds import errors

ROOT = Path(__file__).parent.parent
# Runs without wm_ds, to prove that an export needs none.
ALONE = {"standalone.py"}


class Bad(errors.WmError, ValueError):
    pass


def fail_with(error: BaseException):
    def command(_: list[str] | None) -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (Bad("a.yaml: no such key\nat all"), "error: a.yaml: no such key at all\n"),
        (
            FileNotFoundError(2, "No such file or directory", "x.json"),
            "error: x.json: No such file or directory\n",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), "error: Broken pipe\n"),  # another process's, not ours
    ],
)
def test_an_error_is_one_line(capfd, error, line):
    assert errors.run_cli(fail_with(error)) == 1
    assert errors.run_cli(fail_with(error), refused=2) == 2
    assert capfd.readouterr().err == line * 2


def test_codes(capsys):
    assert errors.run_cli(lambda _: None) == 0
    assert errors.run_cli(lambda argv: len(argv), ["a", "b", "c"]) == 3
    assert errors.run_cli(fail_with(KeyboardInterrupt()), interrupted="stopped; go on with x") == 130
    assert capsys.readouterr().err == "error: stopped; go on with x\n"


def test_a_fault_of_this_program_keeps_its_traceback():
    with pytest.raises(ZeroDivisionError):
        errors.run_cli(lambda _: 1 // 0)


def shell(body: str, command: str) -> subprocess.CompletedProcess:
    """`command` with PROGRAM for a program whose command has this body."""
    program = (
        "import sys, time\nfrom wm_ds.errors import run_cli\n"
        f"def command(_):\n    {body}\n"
        "sys.exit(run_cli(command))\n"
    )
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        ["bash", "-c", f'{command}; echo "${{PIPESTATUS[0]}}"'],
        env=buffered | {"PROGRAM": program, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("time.sleep(0.2); print('done')", "0"),  # its work was over: what is lost is for nobody
        ("while True: print('more' * 1000)", "141"),  # would go on for ever
    ],
)
def test_nobody_reads(body, code):
    result = shell(body, '"$PYTHON" -c "$PROGRAM" | true')
    assert (result.stdout, result.stderr) == (f"{code}\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_result_that_cannot_be_written_is_an_error():
    result = shell("print('result')", '"$PYTHON" -c "$PROGRAM" > /dev/full')
    assert result.stdout == "1\n"
    assert result.stderr == "error: standard output: No space left on device\n"


def test_every_entry_ends_through_run_cli():
    """Whatever can be started by name: the tools, and the modules of `python -m wm_ds.…`."""
    entries = [*(ROOT / "tools").glob("*.py"), *(ROOT / "wm_ds").rglob("*.py")]
    entries = [path for path in entries if '__name__ == "__main__"' in path.read_text()]
    assert len(entries) > 15
    for path in entries:
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert "run_cli" in calls or path.name in ALONE, path


def test_every_exception_has_the_base():
    """Read from the source: what derives from an exception of Python's derives from WmError, too."""
    for path in [*(ROOT / "tools").glob("*.py"), *(ROOT / "wm_ds").rglob("*.py")]:
        if path.parent.name == "model" or path.name == "errors.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                if {"Exception", "RuntimeError", "ValueError", "OSError"} & set(bases):
                    assert bases[0] == "WmError", f"{path}: {node.name}"
