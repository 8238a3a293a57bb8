"""`fullframe jobs`: the table, JSON, and changes as lines."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fullframe.cli.application import run
from fullframe.cli.jobs import Jobs
from fullframe.processes.whole_files import replace_text

ROOT = Path(__file__).parents[2]


def written(folder: Path, state: str, **facts: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = {"state": state, "pid": os.getpid(), "host": socket.gethostname(), "steps": 100, "batch_size": 4}
    replace_text(folder / "run.json", json.dumps(known | facts))  # as a run does, for it may be read meanwhile


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "runs" / "first", "running", prediction={"peak_bytes": 2**31})
    (tmp_path / "runs" / "first" / "observed").mkdir()
    (tmp_path / "runs" / "first" / "observed" / "rank0.jsonl").write_text(f'{{"peak_bytes": {3 * 2**30}}}\n')
    (tmp_path / "runs" / "first" / "metrics.jsonl").write_text('{"step": 7, "loss": 0.25, "step_seconds": 0.5}\n')
    written(tmp_path / "runs" / "[bold]second", "failed", reason="KeyError: 'x'")
    return tmp_path / "runs"


def test_the_table(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Jobs().run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["runs/[bold]second", "failed"]
    assert lines[1].endswith("KeyError: 'x'")
    assert lines[2].split() == ["runs/first", "running", "7/100", "0.25", "8", "3.00", "(2.00)"]
    assert lines[3] == "2 runs: 1 running, 1 failed"


def test_a_name_with_a_newline_is_one_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(runs / "new\nline", "finished")
    assert Jobs().run() == 0
    assert capsys.readouterr().out.splitlines()[3].split() == ["runs/new\\nline", "finished"]


def test_a_long_warning_gives_way(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(runs / "first", "failed", reason="RuntimeError: " + "a long story " * 30)
    assert Jobs().run() == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(line for line in lines if "7/100" in line)[1:5] == ["failed", "7/100", "0.25", "8"]


def test_json_and_filters(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["jobs", "runs", "--state", "failed", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["run"], row["state"], row["reason"]) == ("runs/[bold]second", "failed", "KeyError: 'x'")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none"], "there is no folder none"),
        (["--state", "ready"], "'ready' is none of"),
        (["--json", "--follow"], "leave out --follow"),
        (["--every", "0"], "greater than 0"),
    ],
)
def test_what_is_wrong_is_said(runs: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["jobs", *words]) == 2
    assert said in capsys.readouterr().err


def test_changes_are_followed_as_lines(runs: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "fullframe", "jobs", "--follow", "--every", "0.2", "--match", "first"],
        cwd=runs.parent,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/src"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline().split(maxsplit=1)[1] == "runs/first: running\n"
        written(runs / "first", "stopped", reason="by SIGTERM")
        assert process.stdout.readline().split(maxsplit=1)[1] == "runs/first: stopped (by SIGTERM)\n"
        process.terminate()
