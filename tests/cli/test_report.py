"""`fullframe report`: where the page goes, and what is said."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fullframe.cli.application import run
from fullframe.cli.report import write_at_end, written
from fullframe.processes.lock import is_held
from fullframe.training.run_file import LOCK
from tests.observation.run_writer import good_run, records, troubled_run, write_lines, write_run


def test_one_run_and_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, troubled = good_run(tmp_path / "good"), troubled_run(tmp_path / "troubled")
    assert run(["report", str(good)]) == 0
    assert capsys.readouterr().out == f"{good}/report.html\n" and (good / "report.html").exists()
    assert run(["report", str(good), str(troubled)]) == 0
    assert capsys.readouterr().out == f"{good}/comparison.html\n"
    assert "2 runs side by side" in (good / "comparison.html").read_text()
    assert run(["report", str(troubled), "--out", str(tmp_path / "page.html"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"] == str(tmp_path / "page.html") and Path(found["report"]).exists()
    assert found["runs"][0]["state"] == "failed" and found["runs"][0]["findings"][0]["level"] == "bad"


def test_wrong_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = good_run(tmp_path / "good")
    for arguments, said in (
        ([], "error: name a run directory"),
        ([str(tmp_path / "missing")], "error: there is no run directory"),
        ([str(good), "--out", str(tmp_path / "no" / "page.html")], "error: cannot write"),
    ):
        assert run(["report", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith(said) and len(error.splitlines()) == 1


def test_a_report_that_fails_does_not_undo_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = good_run(tmp_path / "good")
    (path / "report.html").mkdir()
    write_at_end(path, json_only=False)
    assert capsys.readouterr().out.startswith("warning: no report was written: ")
    (path / "report.html").rmdir()
    write_at_end(path, json_only=True)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"report: {path}/report.html\n")


def test_a_run_that_took_a_step_is_told_from_one_that_did_not(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    before = written(path)
    assert written(path) == before
    write_lines(path / "metrics.jsonl", records(1))
    assert written(path) != before


def test_a_run_that_was_refused_beside_another_writes_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = good_run(tmp_path / "run")
    script = f"from fullframe.processes.lock import ProcessLock; lock = ProcessLock({str(path / LOCK)!r}); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as other:
        while not is_held(path / LOCK):
            assert other.poll() is None
        write_at_end(path, json_only=False)
        assert capsys.readouterr().out == "" and not (path / "report.html").exists()
        other.communicate(b"\n")
    write_at_end(path, json_only=False)
    assert (path / "report.html").exists()
