"""Charts: what is drawn lies where the numbers say."""

import json
import math
import re
from html import unescape

import pytest

from fullframe.observation.report.charts import Line, Mark, Part, area_chart, bars, legend_of, line_chart


def points(path: str) -> list[tuple[float, float]]:
    numbers = [float(n) for n in re.findall(r"-?[\d.]+", path)]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def data_of(chart: str) -> dict:
    found = re.search(r'data-chart="([^"]*)"', chart)
    assert found is not None
    return json.loads(unescape(found[1]))


def test_a_line_goes_through_its_points() -> None:
    chart = line_chart("loss", [Line(name="a", steps=[1, 2, 3], values=[0, 5, 10], colour="red")], from_zero=True)
    (path,) = re.findall(r'class="line" style="stroke:red" d="([^"]*)"', chart)
    top = 1000 * (1 - 10 / 10.8)  # 8 % of room above the highest
    assert points(path) == [
        (0, 1000),
        (500, pytest.approx((1000 + top) / 2, abs=0.1)),
        (1000, pytest.approx(top, abs=0.1)),
    ]
    assert data_of(chart)["lines"][0]["points"] == [[1, 0], [2, 5], [3, 10]]
    assert ">10</span>" in chart and ">3</span>" in chart, "labels of both axes"


def test_gaps_a_single_point_and_nothing_at_all_are_drawn() -> None:
    gap = line_chart("a", [Line(name="a", steps=[1, 2, 3], values=[1, math.nan, 3], colour="red")])
    assert "nan" not in gap.lower().replace("nan,", "") and len(data_of(gap)["lines"][0]["points"]) == 2
    single = line_chart("a", [Line(name="a", steps=[7], values=[2.0], colour="red")])
    assert 'class="dot"' in single
    assert 'd=""' in line_chart("a", [Line(name="a", steps=[], values=[], colour="red")])


def test_what_is_above_the_frame_is_counted() -> None:
    values = [9.0, *[0.4] * 99]
    chart = line_chart("s", [Line(name="s", steps=range(100), values=values, colour="red")], from_zero=True)
    assert "1 above the frame" in chart


def test_layers_lie_on_each_other() -> None:
    layers = [("low", [1.0, 1.0], "blue"), ("high", [2.0, 4.0], "red")]
    chart = area_chart("memory", [0, 10], layers, marks=[Mark(name="limit 5", value=5.0)])
    low, high = (points(path) for path in re.findall(r'class="area"[^>]* d="([^"]*)Z"', chart))
    scale = data_of(chart)["y"][1]
    assert high[:2] == [
        (0, pytest.approx(1000 * (1 - 3 / scale), abs=0.1)),
        (1000, pytest.approx(1000 * (1 - 5 / scale), abs=0.1)),
    ]
    assert sorted(high[2:]) == sorted(low[:2]), "the upper one begins where the lower one ends"
    assert [line["name"] for line in data_of(chart)["lines"]] == ["low", "high", "total"]
    assert data_of(chart)["lines"][2]["points"] == [[0, 3], [10, 5]]
    assert ">limit 5</em>" in chart


def test_one_step_of_layers_fills_the_width() -> None:
    (path,) = re.findall(r' d="([^"]*)Z"', area_chart("m", [4], [("a", [2.0], "red")]))
    assert {x for x, _ in points(path)} == {0, 1000}


def test_bars_share_one_scale() -> None:
    half, whole = Part(name="a", value=1, text="1 s", colour="red"), Part(name="b", value=2, text="2 s", colour="blue")
    drawn = bars([("rank 0", [half], "1 s"), ("rank 1", [half, whole], "3 s")])
    assert re.findall(r"width:([\d.]+)%", drawn) == ["33.333", "33.333", "66.667"]
    assert 'title="b: 2 s"' in drawn
    marked = bars([("a", [whole], "")], most=4, mark=Mark(name="limit", value=3))
    assert "width:50.000%" in marked and "left:75.000%" in marked
    assert bars([]) == '<div class="bars"></div>'


def test_names_cannot_become_tags() -> None:
    bad = "<script>alert(1)</script>"
    chart = line_chart(bad, [Line(name=bad, steps=[1], values=[1.0], colour="red")], note=bad)
    chart += bars([(bad, [Part(name=bad, value=1, text=bad, colour="red")], bad)]) + legend_of({bad: "red"})
    assert "<script" not in chart
