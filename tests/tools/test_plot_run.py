"""The picture of a run: what is drawn, and that it is drawn."""

import json
import re
from pathlib import Path

import pytest

from tools import plot_run


def make_run(folder: Path) -> Path:
    folder.mkdir()
    rows = []
    for step in range(1, 21):
        row = {"attempt": 1 + (step > 10), "step": step, "tokens": 100 * step, "loss": 5 - step / 10}
        row |= {"stage": 0 if step < 8 else 1, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_s": 50.0}
        if step == 4:
            row["loss"] = "nan"
        if step % 5 == 0:
            row["residuals"] = [0.5, 0.05, 0.005]
            rows.append({"attempt": row["attempt"], "step": step, "holdout_loss": 5.0})
        rows.append(row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_series_and_marks(tmp_path):
    rows = plot_run.place(plot_run.read_metrics(make_run(tmp_path / "run") / "metrics.jsonl"))
    loss = plot_run.series(rows, "loss", "tokens")
    assert len(loss) == 19  # the step without a number is a gap
    assert loss[0] == (100, 4.9)
    assert plot_run.series(rows, "holdout_loss", "tokens") == [
        (500, 5.0),
        (1000, 5.0),
        (1500, 5.0),
        (2000, 5.0),
    ]
    assert plot_run.resumes(rows, "tokens") == [1000]
    assert plot_run.resumes(rows, "step") == [10]
    assert plot_run.borders(rows, "tokens") == [700]
    assert plot_run.borders([{**row, "stage": 0} for row in rows], "step") == []
    assert list(plot_run.residuals(rows, "step")) == ["pass 1", "pass 2", "pass 3"]


def test_scores_of_downstream_tasks_are_drawn_at_their_steps(tmp_path, capsys):
    folder = make_run(tmp_path / "run")
    rows = [
        {
            "step": step,
            "tasks": {"piqa": {"acc": acc, "acc_stderr": 0.1}, "wikitext": {"word_perplexity": 90.0}},
        }
        for step, acc in ((5, 0.5), (10, 0.6))
    ]
    rows += [
        {"step": 15, "error": "no room"},
        {"rollback": True, "to": 5},
        {"step": 10, "tasks": rows[1]["tasks"]},
    ]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    placed = plot_run.place(plot_run.steps_of(folder))
    assert plot_run.scores(placed, "tokens") == {
        "piqa acc": [(500, 0.5), (1000, 0.6)],
        "wikitext word_perplexity": [(500, 90.0), (1000, 90.0)],
    }
    assert list(plot_run.kinds_of_scores({"run": placed}, "tokens").values()) == [
        ["piqa acc"],
        ["wikitext word_perplexity"],
    ]
    output = tmp_path / "with.png"
    assert plot_run.main([str(folder), "--output", str(output)]) == 0
    (folder / "evaluations.jsonl").unlink()
    without = tmp_path / "without.png"
    assert plot_run.main([str(folder), "--output", str(without)]) == 0
    assert output.read_bytes() != without.read_bytes()
    capsys.readouterr()


def test_png_of_several_runs(tmp_path, capsys):
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "two")]
    output = tmp_path / "curves.png"
    assert plot_run.main([*map(str, runs), "--output", str(output), "--text"]) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    width, height = (int.from_bytes(output.read_bytes()[at : at + 4], "big") for at in (16, 20))
    assert width < 2 * height, "five panels stand in two rows"
    assert "training loss of one over tokens" in capsys.readouterr().out


def test_sketch_falls_with_the_loss():
    lines = plot_run.sketch([(x, 10.0 - x) for x in range(10)], "loss", width=10, height=9).splitlines()
    assert lines[0] == "loss"
    assert [line.index("•") - line.index("│") for line in lines[1:11]] == list(range(1, 11))
    assert lines[1].strip().startswith("10.000")
    assert lines[10].strip().startswith("1.000")


@pytest.mark.parametrize("content", [None, "", '{"attempt": 1, "step": 1, "holdout_loss": 3.0}\n'])
def test_nothing_to_draw_is_one_line(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert plot_run.main([str(tmp_path)]) == 1
    assert re.fullmatch(r"error: .*metrics.jsonl is missing or has no step yet\n", capsys.readouterr().err)


def descend(folder: Path, first: int, last: int, *ancestors: tuple[Path, int]) -> Path:
    """A run of steps first .. last that descends from these."""
    folder.mkdir()
    steps = range(first, last + 1)
    rows = [{"attempt": 1, "step": s, "tokens": 100 * s, "loss": 5 - s / 10, "lr": 1e-3} for s in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chain = [{"run": str(run), "step": step} for run, step in ancestors]
    (folder / "history.json").write_text(json.dumps({"ancestry": chain}))
    return folder


def spans(runs: dict) -> dict[str, tuple[int, int]]:
    return {name: (rows[0]["step"], rows[-1]["step"]) for name, rows in runs.items()}


def test_a_family_is_drawn_from_its_first_ancestor_on(tmp_path, capsys):
    long = descend(tmp_path / "long", 1, 50)
    one = descend(tmp_path / "one", 21, 25, (long, 20))
    two = descend(tmp_path / "two", 31, 40, (long, 30))
    last = descend(tmp_path / "last", 36, 45, (long, 30), (two, 35))
    family = plot_run.family([one, last])
    assert spans(family) == {
        "long": (1, 30),
        "one (from long@20)": (20, 25),
        "two (from long@30)": (30, 35),
        "last (from two@35)": (35, 45),
    }
    assert all(plot_run.resumes(rows, "step") == [] for rows in family.values())
    assert spans(plot_run.family([one, long])) == {"long": (1, 50), "one (from long@20)": (20, 25)}
    assert plot_run.main([str(one), str(last), "--output", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    (long / "metrics.jsonl").unlink()
    capsys.readouterr()
    assert spans(plot_run.family([one])) == {"one (from long@20)": (21, 25)}
    assert re.fullmatch(
        r"an ancestor is not drawn: .*long/metrics.jsonl is missing .*\n", capsys.readouterr().err
    )
