"""Charts: what is kept of a long series, where a point is drawn, round ticks."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from wm_ds.report import chart
from wm_ds.report.chart import Chart, Series, draw, envelope, log_ticks, short, ticks


def test_a_long_series_keeps_its_ends_and_every_peak():
    points = [(float(x), float(x % 7)) for x in range(100_000)]
    points[54_321] = (54_321.0, 1e6)
    points[77_777] = (77_777.0, -1e6)
    kept = envelope(points, columns=100)
    assert len(kept) <= 2 * 100 + 2
    assert {points[0], points[-1], points[54_321], points[77_777]} <= set(kept)
    assert kept == sorted(kept)
    assert envelope(points[:50], columns=100) == points[:50]


def test_points_are_drawn_where_the_scale_says():
    text = draw(Chart("Loss", [Series("a", [(0.0, 1.0), (50.0, 3.0), (100.0, 2.0)])]))
    root = ET.fromstring(text.replace("&nbsp;", " "))
    svg = next(node for node in root.iter("svg") if node.get("class") == "chart")
    plot = next(node for node in svg.iter("svg") if node.get("class") == "plot")
    width, height = float(plot.get("width")), float(plot.get("height"))
    y0, y1 = float(svg.get("data-y0")), float(svg.get("data-y1"))
    line = next(plot.iter("polyline"))
    drawn = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    read = [(x / width * 100, y1 - y / height * (y1 - y0)) for x, y in drawn]
    assert read == [pytest.approx(p, abs=0.02) for p in [(0, 1), (50, 3), (100, 2)]]


def test_a_logarithmic_axis_leaves_out_what_has_no_logarithm():
    text = draw(Chart("Residual", [Series("", [(1.0, 0.1), (2.0, 0.0), (3.0, 0.001)])], log=True))
    assert len(re.search(r'points="([^"]+)"', text)[1].split()) == 2
    assert 'data-log="1"' in text


def test_a_spike_is_cut_where_a_chart_says_so():
    points = [(float(x), 2.0 + x % 5 / 10) for x in range(300)]
    points[200] = (200.0, 1e5)
    for cut, top in ((True, 10.0), (False, 1e6)):
        text = draw(Chart("Loss", [Series("", points)], cut=cut))
        assert float(re.search(r'data-y1="([^"]+)"', text)[1]) < top
        assert ("Values above the frame are cut." in text) == cut


def test_nothing_to_draw_says_why():
    assert "not yet" in draw(Chart("Scores", [Series("a", [])], why_empty="not yet"))


@pytest.mark.parametrize("value", [0.0, 5.0, -3.0])
@pytest.mark.parametrize("log", [True, False])
def test_constant_and_single_values_have_a_frame(value, log):
    for points in ([(3.0, value)], [(1.0, value), (2.0, value)]):
        text = draw(Chart("One", [Series("", points)], log=log))
        assert "nan" not in text
        assert ("<polyline" in text) == (value > 0 or not log)


def test_ticks_are_round_and_few():
    assert ticks(0, 100, 5) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.0003, 0.003, 5) == [0.001, 0.002, 0.003]
    assert log_ticks(1e-4, 1.0) == [1e-4, 1e-3, 1e-2, 1e-1, 1.0]
    assert log_ticks(0.15, 0.6) == [0.2, 0.5]
    for low, high in ((1, 1.0001), (-5e8, 3e9), (1e-12, 2e-12)):
        found = ticks(low, high, 5)
        assert 2 <= len(found) <= 6
        assert all(low <= tick <= high * (1 + 1e-9) for tick in found)
    assert [short(v) for v in (1500, 2e6, 0.00012, 0)] == ["1.5k", "2M", "0.00012", "0"]
    assert chart.WIDTH > chart.LEFT
