"""The goldens of today's code are the pinned ones."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from tests.goldens import compare, probe

pytestmark = pytest.mark.alone

PINNED = Path(__file__).parent / "pinned.json"


def check(found: dict, pinned: dict) -> None:
    """Bitwise on the machine that pinned them; elsewhere what is not equal is near, and is said to be."""
    differing = compare.differing(pinned["goldens"], found["goldens"])
    if not differing:
        return
    if found["machine"] == pinned["machine"]:
        raise AssertionError(compare.describe(pinned["goldens"], found["goldens"], differing))
    far = [name for name in differing if not compare.near(pinned["goldens"][name], found["goldens"][name])]
    changed = {
        k: (v, found["machine"].get(k)) for k, v in pinned["machine"].items() if v != found["machine"].get(k)
    }
    assert not far, (
        f"{compare.describe(pinned['goldens'], found['goldens'], far)}\nnot pinned here: {changed}"
    )
    warnings.warn(
        f"{len(differing)} of {len(found['goldens'])} goldens are near the pinned ones and not equal: "
        f"they were pinned on another machine, {changed}; to compare on this one: python -m "
        "tests.goldens.compare REV",
        stacklevel=2,
    )


def test_the_quick_goldens():
    pinned = json.loads(PINNED.read_text())
    found = probe.run()
    assert found["goldens"].keys() <= pinned["goldens"].keys(), (
        "pin the new ones: python -m tests.goldens.compare --pin --all"
    )
    pinned["goldens"] = {name: pinned["goldens"][name] for name in found["goldens"]}
    check(found, pinned)


@pytest.mark.slow
def test_all_goldens():
    pinned = json.loads(PINNED.read_text())
    found = probe.run(everything=True)
    assert found["goldens"].keys() == pinned["goldens"].keys()
    check(found, pinned)
