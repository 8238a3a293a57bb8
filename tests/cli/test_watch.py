"""`fullframe watch`: wrong use is one line, and a run or the GPUs are told as asked."""

import json
import sys
from pathlib import Path

import pytest

from fullframe.cli.application import run
from fullframe.cli.watch import Watch
from fullframe.errors import RunError
from tests.observation.fake_nvml import GIB, FakeNvml
from tests.observation.run_writer import good_run


def test_a_finished_run_is_shown_and_told_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = good_run(tmp_path / "run")
    assert run(["watch", str(path), "--once"]) == 0
    assert "step 300/300" in capsys.readouterr().out
    assert run(["watch", str(path)]) == 0  # no terminal: its last line, and the end
    assert capsys.readouterr().out.endswith("finished\n")
    assert run(["watch", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_wrong_use_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", "missing"]) == 2
    assert capsys.readouterr().err == "error: there is no run directory missing; check the path\n"
    with pytest.raises(RunError, match="--every must be greater than 0, got 0"):
        Watch(run_dir=str(good_run(tmp_path / "run")), every=0.0).run()


def test_gpus(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([{1: 3 * GIB}]))
    assert run(["watch", "gpus"]) == 0
    assert "3.5 GiB of 80 GiB" in capsys.readouterr().out
    assert run(["watch", "gpus", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["processes"][0]["pid"] == 1


def test_no_driver_and_no_package_are_told_in_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], has_driver=False))
    assert run(["watch", "gpus"]) == 2
    assert capsys.readouterr().err.startswith("error: no NVIDIA driver on this machine answers")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert run(["watch", "gpus"]) == 2
    assert capsys.readouterr().err == "error: GPU processes need nvidia-ml-py; pip install 'fullframe[gpus]'\n"
