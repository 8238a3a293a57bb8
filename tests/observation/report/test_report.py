"""`fullframe.report`: what a notebook shows, and what a script can ask."""

import json
from html import unescape
from pathlib import Path

import pytest

import fullframe as ff
from fullframe.errors import RunError
from tests.observation.run_writer import good_run, troubled_run


def test_a_notebook_shows_the_page_that_the_command_writes(tmp_path: Path) -> None:
    shown = ff.report(good_run(tmp_path / "good"))
    frame = shown._repr_html_()
    assert frame.startswith("<iframe ") and frame.endswith('"></iframe>') and frame.count("<") == 2
    assert unescape(frame.partition('srcdoc="')[2].removesuffix('"></iframe>')) == shown.html
    assert 'sandbox="allow-scripts"' in frame, "no access to the notebook's page"
    assert shown.html.startswith("<!doctype html>") and "good" in shown.html


def test_several_runs_and_what_needs_a_look(tmp_path: Path) -> None:
    good, troubled = good_run(tmp_path / "good"), troubled_run(tmp_path / "troubled")
    found = ff.report(good, str(troubled))
    assert "2 runs side by side" in found.html
    assert set(found.findings) == {"good", "troubled"}
    assert found.findings["troubled"][0].level == "bad"
    assert repr(found).startswith("Report(good: ") and len(repr(found)) < 100, "not the whole page"
    json.dumps([finding._asdict() for finding in found.findings["troubled"]])


def test_the_page_is_saved(tmp_path: Path) -> None:
    shown = ff.report(good_run(tmp_path / "good"))
    assert shown.save(tmp_path / "page.html").read_text() == shown.html
    with pytest.raises(RunError, match=r"cannot write .*; name another file"):
        shown.save(tmp_path / "no" / "page.html")


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="name a run directory"):
        ff.report()
    with pytest.raises(RunError, match="there is no run directory"):
        ff.report(tmp_path / "missing")
