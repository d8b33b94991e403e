"""Passes to exact evaluation, on a small model."""

import json
import re
from itertools import pairwise

import pytest

from tests.support import exported
from tools import measure_convergence as tool


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return exported.make_run(tmp_path_factory.mktemp("converged"), seq_len=32)


def measured(run, options: str) -> dict:
    output = run / "convergence"
    assert tool.main([str(run), *options.split(), "--output", str(output)]) == 0
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return json.loads(output.with_suffix(".json").read_text())


@pytest.fixture(scope="module")
def report(run):
    options = "--sequences 1 --groups 1 8 32 --chunks 16 --max-passes 4 --relaxation 0.9 --starts embedding"
    return measured(run, options)


def test_every_schedule_is_there(report):
    names = [entry["name"] for entry in report["schedules"]]
    plain = ["Jacobi", "cyclic g=8", "cyclic g=32", "chunked 16 g=8", "wavefront 16 g=8"]
    assert names == plain + [f"{name}, relaxed 0.9" for name in plain]


def test_as_many_groups_as_tokens_are_exact_in_one_pass(report):
    """g = T is exact left-to-right evaluation: one pass of 32 steps, no excess."""
    entry = next(e for e in report["schedules"] if e["name"] == "cyclic g=32")
    assert entry["reached"]["passes"] == 1
    assert entry["reached"]["steps"] == 32
    assert entry["reached"]["excess"] == pytest.approx(0, abs=1e-5)


def test_passes_converge_and_cost_what_they_do(report):
    """Four passes of g=8 are exact at T=32, so cyclic g=8 is reached; a pass has eight steps."""
    entry = next(e for e in report["schedules"] if e["name"] == "cyclic g=8")
    reached = entry["reached"]
    assert reached is not None
    assert abs(reached["excess"]) <= 0.01
    assert all(abs(p["excess"]) > 0.01 for p in entry["passes"][:-1])
    assert [p["steps"] for p in entry["passes"]] == [8 * p["passes"] for p in entry["passes"]]
    assert 0 < reached["flops"] < 4 * report["exact"]["flops"]
    assert len(entry["residuals"]) == reached["passes"]
    for entry in report["schedules"]:
        assert all(0 < after < before for before, after in pairwise(entry["residuals"])), entry["name"]
    assert reached["speedup_over_exact"] == pytest.approx(report["exact"]["seconds"] / reached["seconds"])


def test_starts_are_an_axis(run, capsys):
    """A sweep is one step more, unless nobody reads its start; three starts give three perplexities."""
    starts = "--starts embedding layerwise layerwise-embedding --every-pass"
    report = measured(run, f"--sequences 1 --groups 1 32 --chunks --max-passes 2 --relaxation 1 {starts}")
    names = [entry["name"] for entry in report["schedules"]]
    notes = ["", ", layerwise start", ", layerwise-embedding start"]
    assert names == [f"{name}{note}" for note in notes for name in ("Jacobi", "cyclic g=32")]
    found = dict(zip(names, report["schedules"]))
    assert all(len(entry["passes"]) == 2 for entry in found.values())
    firsts = [found[f"Jacobi{note}"]["passes"][0] for note in notes]
    assert [first["steps"] for first in firsts] == [1, 2, 2]
    assert len({round(first["perplexity"], 6) for first in firsts}) == 3
    exact = [found[f"cyclic g=32{note}"] for note in notes]
    assert [entry["reached"]["steps"] for entry in exact] == [32] * 3
    assert [entry["reached"]["flops"] for entry in exact] == [exact[0]["reached"]["flops"]] * 3
    shown = capsys.readouterr().out
    assert re.search(r"^excess after passes +1 +2$", shown, re.MULTILINE)
    assert len(re.findall(r"^(?:Jacobi|cyclic).*%$", shown, re.MULTILINE)) == 6


def test_a_folder_needs_data(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "whitematter"}')
    assert tool.main([str(tmp_path)]) == 1
    assert re.fullmatch(r"error: .* say with --data.*\n", capsys.readouterr().err)
