"""`fullframe doctor env` as it is typed."""

import json

import pytest

from fullframe.cli.application import run
from fullframe.cli.doctor.env import DoctorEnv


def test_a_contradiction_is_found_and_printed_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MASTER_PORT", "80")
    assert run(["doctor", "env", "--processes", "1", "--json"]) == 1
    found = {finding["code"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["FF213"]["message"] == "MASTER_PORT=80" and found["FF213"]["severity"] == "error"


@pytest.mark.slow
def test_links_are_measured_and_what_cannot_be_checked_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert DoctorEnv(processes=3).run() in (0, 1)
    out = capsys.readouterr().out
    assert all(f"ranks {pair}: " in out for pair in ("0-1", "0-2", "1-2"))
    assert "not checked: GPUs" in out or "GPU 0" in out


def test_no_ranks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "env", "--processes", "0"]) == 2
    assert "--processes must be at least 1" in capsys.readouterr().err
