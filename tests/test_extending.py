"""The worked examples of docs/extending.md: each patch applies to this tree, and its program runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()


def examples() -> dict[str, str]:
    """Heading and text of every example."""
    parts = re.split(r"^## (A new .*)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def test_there_are_four():
    assert list(examples()) == [
        "A new model family",
        "A new schedule",
        "A new optimizer rule",
        "A new input format",
    ]


@pytest.mark.long
@pytest.mark.parametrize("name", examples())
def test_an_example_applies_and_runs(name, tmp_path):
    text = examples()[name]
    for folder in ("wm_ds", "tools", "tests/support", "configs", "ds_configs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    patch = "".join(blocks(text, "diff"))
    touched = set(re.findall(r"^\+\+\+ b/(\S+)", patch, flags=re.MULTILINE))
    assert 1 <= len(touched) <= 3, f"{name} touches {sorted(touched)}: make it two or three places"
    assert all(f"`{path}`" in text for path in touched), f"the text does not name all of {sorted(touched)}"
    # -C1: a neighbouring line that changed does not make an example wrong
    apply = ["git", "apply", "-C1", "-"]
    done = subprocess.run(apply, input=patch, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, f"{name}: its patch does not apply any more\n{done.stdout}{done.stderr}"
    (program,) = blocks(text, "python")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{name}: its program fails\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
