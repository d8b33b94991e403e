"""The page of a run: complete, harmless, small, and readable in a browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.report_run import make_run
from tools import report

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    """A run with all that there is to show, and one of a model without a pool."""
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder / "one"), make_run(folder / "two", lr=1e-3, pool=False)


def made(tmp_path: Path, *folders: Path) -> str:
    output = tmp_path / "report.html"
    assert report.main([*map(str, folders), "--output", str(output)]) == 0
    return output.read_text()


class Checker(HTMLParser):
    """Every element that is opened is closed in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_everything_of_a_run_is_on_its_page(runs, tmp_path, capsys):
    text = made(tmp_path, runs[0])
    assert "report.html: 1 run, " in capsys.readouterr().out
    checker = Checker()
    checker.feed(text)
    assert checker.open == []
    for title in ("Loss", "Learning rate", "Residual of each pass", "Gain of the loop", "hellaswag, acc"):
        assert f"<figcaption>{title}</figcaption><svg" in text
    assert "400&nbsp;of&nbsp;400" in text
    assert text.count('<svg class="map"') == 12
    assert "channel 3, state 3: " in text
    for words in (
        "a spike of 9.1 sigma",
        "skipped: loss is nan",
        "the disk is full",
        "a stage ends at step 200",
    ):
        assert words in text
    assert "another start goes on after step 200" in text
    assert "optim.lr = 0.003" in text
    assert "To be, or" in text


def test_nothing_of_a_run_can_act_on_the_page_or_call_out(runs, tmp_path):
    text = made(tmp_path, runs[0])
    assert text.count("<script>") == 1  # its own
    assert "&lt;script&gt;alert(400)&lt;/script&gt;" in text
    assert "node&lt;1&gt;" in text
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:,)""", text)
    assert "http" not in text.replace("http://www.w3.org", "")
    assert "@import" not in text
    assert "url(" not in text


def test_several_runs_show_what_differs(runs, tmp_path):
    text = made(tmp_path, *runs)
    table = text[text.index("What differs") : text.index("Curves")]
    assert "<td>optim.lr</td><td>0.003</td><td>0.001</td>" in table
    assert table.count("<tr>") == 2
    assert 'data-label="one, training"' in text
    assert 'data-label="two, training"' in text
    assert "No router maps" in text
    same = made(tmp_path, runs[0], shutil.copytree(runs[0], tmp_path / "copy"))
    assert "the runs have the same settings" in same


def test_a_long_run_has_a_small_page(tmp_path):
    text = made(tmp_path, make_run(tmp_path / "long", steps=100_000))
    assert len(text) < 250_000
    assert len(made(tmp_path, make_run(tmp_path / "short", steps=2_000))) > 0.5 * len(text)


def test_a_run_that_has_only_begun(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("model: {family: vanilla}\n")
    text = made(tmp_path, run)
    assert text.count('class="empty"') > 8
    assert "<td>–</td>" in text
    (run / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 5.0, "attempt": 1}) + "\n")
    assert "<figcaption>Loss</figcaption><svg" in made(tmp_path, run)


def test_damaged_rows_cost_themselves_only(runs, tmp_path):
    run = shutil.copytree(runs[0], tmp_path / "run")
    for name, lines in {
        "evaluations.jsonl": '{"step": 1}\n[1]\n{"step": 2, "tasks": {"a": {"acc": "x", "f1": 0.5}}}\n{"st',
        "samples.jsonl": '{"step": 5, "samples": "none"}\n\xff\n',
        "metrics.jsonl": '{"step": 1, "loss": 5.0, "router_share": {"key": [[1]], "value": 3}, "gain": 7}\n',
    }.items():
        (run / name).write_text(lines)
    text = made(tmp_path, run)
    assert "<figcaption>a, f1</figcaption><svg" in text
    assert "No router maps" in text


def test_what_is_no_run_is_refused(runs, tmp_path, capsys):
    output = tmp_path / "report.html"
    for folders, said in (
        ([tmp_path / "nowhere"], "nowhere is no run: there is no such folder"),
        ([tmp_path], "is no run: it has no config.yaml"),
        ([runs[0], runs[0]], "is named twice"),
    ):
        assert report.main([*map(str, folders), "--output", str(output)]) == 1
        assert said in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_draws_it_without_a_complaint(runs, tmp_path, width):
    """Every curve gets its place, nothing is wider than the window, and hovering shows values."""
    page = tmp_path / "page.html"
    probe = """<script>
    const charts = [...document.querySelectorAll("svg.chart")];
    const boxes = [...document.querySelectorAll("polyline")].map((line) => line.getBoundingClientRect());
    const box = charts[0].getBoundingClientRect();
    charts[0].dispatchEvent(new PointerEvent("pointermove", {bubbles: true,
      clientX: box.left + box.width / 2, clientY: box.top + box.height / 2}));
    document.title = JSON.stringify({charts: charts.length, drawn: boxes.every((b) => b.width > 50),
      wide: document.documentElement.scrollWidth - innerWidth,
      tip: document.getElementById("tip").textContent});
    </script></body>"""
    page.write_text(made(tmp_path, *runs).replace("</body>", probe))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [
        f"--window-size={width},900",
        "--dump-dom",
        f"--user-data-dir={tmp_path}/profile",
        f"file://{page}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    title = re.search(r"<title>(.*?)</title>", done.stdout)[1].replace("&quot;", '"')
    found = json.loads(title)
    assert found["charts"] == 11
    assert found["drawn"]
    assert found["wide"] <= 0
    assert re.match(r"step 17\d\none, training: 3\.\d+ nats\n", found["tip"])
