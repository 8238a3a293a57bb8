"""The page in a real browser: nothing logged, nothing fetched, plots there, nothing wider than the screen."""

from pathlib import Path

import pytest

from fullframe.observation.report.page import names_of, page, write_report
from fullframe.observation.run_files import read_run
from tests.observation.browser import CHROMIUM, opened
from tests.observation.report.test_pictures import noise
from tests.observation.run_writer import good_run, records, troubled_run, write_run

in_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; .ci/run installs it as root")


def test_the_page_holds_all_it_needs(tmp_path: Path) -> None:
    out = write_report([read_run(good_run(tmp_path / "run"))], tmp_path / "report.html")
    text = out.read_text()
    assert out.stat().st_size < 200_000
    for word in ("http:", "https:", "@import", "url(", '<link rel="stylesheet', " src="):
        assert word not in text, word
    assert [path.name for path in tmp_path.iterdir() if "report" in path.name] == ["report.html"], (
        "nothing half written"
    )


def test_a_long_run_makes_no_long_page(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", metrics=records(60_000))
    assert len(page([read_run(path)])) < 300_000


def test_names_differ_where_folders_do(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / a / "run", metrics=[]) for a in ("a", "b")]
    assert names_of([read_run(path) for path in paths]) == ["a/run", "b/run"]
    assert names_of([read_run(paths[0])] * 2) == ["run (1)", "run (2)"]
    assert names_of([read_run(paths[0])]) == ["run"]


@in_browser
def test_it_opens_without_an_error_or_a_request(tmp_path: Path) -> None:
    good, troubled = good_run(tmp_path / "good"), troubled_run(tmp_path / "troubled")
    noise(good / "depth.png", 300, 200)
    bare = write_run(tmp_path / "bare", metrics=records(1))
    for name, folders in (("one", [good]), ("two", [good, troubled]), ("bare", [bare])):
        out = write_report([read_run(folder) for folder in folders], tmp_path / f"{name}.html")
        with opened(out) as seen:
            widths = []
            for width in (1400, 420):
                seen.resize(width)
                widths.append(seen.evaluate("document.documentElement.scrollWidth"))
            plots = seen.evaluate(
                "[...document.querySelectorAll('.plot svg')].map(s => s.getBoundingClientRect().width)"
            )
            loaded = seen.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
            assert widths[0] <= 1400 and widths[1] <= 420, f"{name}: no sideways scrolling"
            assert plots and min(plots) > 200 and loaded
            assert seen.said == []
            assert [address for address in seen.asked_for if not address.startswith("data:")] == [out.as_uri()]


@in_browser
def test_the_browser_check_can_fail(tmp_path: Path) -> None:
    out = tmp_path / "bad.html"
    out.write_text('<script>console.log("hello"); lost()</script><img src="http://127.0.0.1:9/x.png">')
    with opened(out) as seen:
        assert any("hello" in text for text in seen.said) and any("lost" in text for text in seen.said)
        assert "http://127.0.0.1:9/x.png" in seen.asked_for


@in_browser
def test_hovering_tells_the_numbers_and_the_switch_turns_dark(tmp_path: Path) -> None:
    out = write_report([read_run(good_run(tmp_path / "good"))], tmp_path / "report.html")
    colour = "getComputedStyle(document.body).backgroundColor"
    with opened(out) as seen:
        frame = seen.evaluate(
            "(({x, y, width}) => ({x, y, width}))(document.querySelector('.field').getBoundingClientRect())"
        )
        seen.move_mouse(frame["x"] + frame["width"] * (99 / 299), frame["y"] + 50)
        assert "step 100" in seen.evaluate("document.querySelector('.tip').textContent")
        assert seen.evaluate("document.querySelector('.tip').hidden") is False
        light = seen.evaluate(colour)
        seen.evaluate("document.querySelector('.theme').click()")
        dark = seen.evaluate(colour)
        assert light != dark
        seen.evaluate("document.querySelector('.theme').click()")
        assert seen.evaluate(colour) == light
        seen.resize(1400, dark=True)
        seen.evaluate("delete document.documentElement.dataset.theme")
        assert seen.evaluate(colour) == dark, "as the system wants it, without a click"
        assert seen.said == []
