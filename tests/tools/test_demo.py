"""The demo's bookkeeping: what is used again, what is made anew. The chain itself is `make demo`."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools import demo as demo_tool


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty project folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make(output: Path, name: str, inputs: bytes, *, rest: tuple[str, ...] = ()) -> bool:
    """One run of a demo of a step and those after it; whether the first had to run."""
    demo = demo_tool.Demo()
    needed = demo.step(name, [output], inputs)
    if needed:
        output.touch()
        demo.done(name)
    for other in rest:
        demo.step(other, [])
    return needed


def test_valid_output_is_used_again(place, capsys):
    output = place / "out"
    assert make(output, "text", b"one")
    capsys.readouterr()
    assert not make(output, "text", b"one")
    assert "still valid, used again" in capsys.readouterr().out
    output.unlink()
    assert make(output, "text", b"one")  # the state says valid, the file is gone


def test_whatever_changes_all_that_follows_is_made_again(place):
    def chain(text: bytes) -> list[bool]:
        demo = demo_tool.Demo()
        needed = []
        for name, inputs in (("text", text), ("tokenizer", b""), ("training", b"")):
            needed.append(demo.step(name, [], inputs))
            demo.done(name)
        return needed

    assert chain(b"one") == [True, True, True]
    assert chain(b"one") == [False, False, False]
    assert chain(b"two") == [True, True, True]


def test_code_that_training_does_not_use_leaves_it_valid(place):
    def chain(changed: str | None) -> list[bool]:
        demo = demo_tool.Demo()
        if changed:
            path = next(p for p in demo.code if p.name == changed)
            demo.code[path] += b"# changed"
        needed = []
        for name in ("training", "export"):
            needed.append(demo.step(name, []))
            demo.done(name)
        return needed

    assert chain(None) == [True, True]
    assert chain("export.py") == [False, True]
    chain(None)
    assert chain("loss.py") == [True, True]


def test_own_text_that_is_missing_is_one_line(place):
    result = subprocess.run(
        [sys.executable, str(demo_tool.ROOT / "tools" / "demo.py")],
        capture_output=True,
        text=True,
        env={"DEMO_TEXT": str(place / "nowhere.txt"), "PATH": "/usr/bin:/bin"},
    )
    assert result.returncode == 1
    assert result.stderr.strip() == f"error: DEMO_TEXT={place / 'nowhere.txt'} does not exist"


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"text": 3.5}'])
def test_damaged_notes_are_no_notes(place, capsys, content):
    demo_tool.STATE.parent.mkdir(parents=True)
    demo_tool.STATE.write_bytes(content)
    assert demo_tool.Demo().state == {}
    assert "is damaged: every step is made again" in capsys.readouterr().out


def test_failing_step_ends_the_demo(place, capsys):
    demo = demo_tool.Demo()
    demo.step("text", [])
    with pytest.raises(demo_tool.DemoError, match="the demo stopped in step 1"):
        demo.run("python", "-c", "raise SystemExit(3)")
    assert "python -c 'raise SystemExit(3)'" in capsys.readouterr().out
    assert demo_tool.Demo().state == {}
