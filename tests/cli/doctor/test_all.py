"""`fullframe doctor` alone."""

import json
from pathlib import Path

import pytest

from fullframe.cli.application import run
from fullframe.cli.doctor.all import most_useful
from fullframe.doctor.judgement.judge import by_severity
from fullframe.doctor.probes import kinds


def test_three_sentences_about_different_kinds_the_worst_first() -> None:
    found = [kinds.UNUSED.found("u"), kinds.DRIFTED.found("d"), kinds.UNUSED.found("v"), kinds.STARVES.found("s")]
    sentences = most_useful(by_severity([*found, kinds.SOUGHT_IN_VAIN.found("w")]))
    assert [sentence[:13] for sentence in sentences] == ["1. d (FF303):", "2. u (FF311):", "3. s (FF324):"]
    (only,) = most_useful([found[0]._replace(fix="Sum there.")])
    assert only.endswith(": Sum there.")
    (only,) = most_useful([])
    assert "fullframe verify" in only


def test_json_is_one_list_of_all_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fullframe.cli.doctor.env.DoctorEnv.findings", lambda self: [kinds.UNUSED.found("u")])
    (tmp_path / "train.py").write_text("import torch\nstate = torch.load('a.pt')\n")
    assert run(["doctor", "--json"]) == 1
    assert sorted(found["code"] for found in json.loads(capsys.readouterr().out)) == ["FF196", "FF311"]


@pytest.mark.slow
def test_what_applies_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MASTER_PORT", "80")
    (tmp_path / "train.py").write_text("import torch\n")
    assert run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "env: this machine" in out and "nothing found in 1 file\n" in out and "there is no recipe.py here" in out
    assert "1. MASTER_PORT=80 (FF213)" in out
    assert run(["doctor", "--json"]) == 1
    assert "FF213" in [finding["code"] for finding in json.loads(capsys.readouterr().out)]
