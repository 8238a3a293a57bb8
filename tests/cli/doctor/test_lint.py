"""`fullframe doctor lint` as it is called."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fullframe.cli.application import run
from fullframe.cli.doctor.lint import Lint
from tests.doctor.lint.samples import training

BAD = "import torch.nn.functional as F\n" + training("total += loss", "total = 0\n")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text(BAD)
    (tmp_path / "good.py").write_text("import torch\n")
    return tmp_path


def test_exit_codes_are_those_of_linters(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "lint", "good.py"]) == 0
    assert run(["doctor", "lint", "bad.py"]) == 1
    assert run(["doctor", "lint"]) == 1
    assert run(["doctor", "lint", "none.py"]) == 2
    assert "there is no file or folder none.py" in capsys.readouterr().err
    assert run(["doctor", "lint", "--select", "E501"]) == 2
    with pytest.raises(SystemExit) as ended:
        run(["doctor", "lint", "--formats", "json"])
    assert ended.value.code == 2


def test_a_file_that_is_not_about_torch_is_not_called_clean(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "notes.py").write_text("for x in loader\n    step(x)\n")
    assert run(["doctor", "lint", "notes.py"]) == 0 and run(["doctor", "lint", "notes.py", "good.py"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "nothing found in 1 file; none imports torch, so none was looked at",
        "nothing found in 2 files",
    ]


def test_formats(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "lint"]) == 1
    assert capsys.readouterr().out.startswith("bad.py:10:5: FF101 ")
    assert run(["doctor", "lint", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    assert set(found) == {"code", "path", "line", "column", "message", "fix"}
    assert run(["doctor", "lint", "good.py", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    assert run(["doctor", "lint", "--format", "sarif"]) == 1
    assert json.loads(capsys.readouterr().out)["version"] == "2.1.0"
    assert run(["doctor", "lint", "--json", "--format", "sarif"]) == 2
    assert "leave one out" in capsys.readouterr().err


def test_options_and_settings_choose_rules_and_files(folder: Path) -> None:
    assert run(["doctor", "lint", "--ignore", "FF101"]) == 0
    assert run(["doctor", "lint", "--ignore", "FF102,FF101"]) == 0
    assert run(["doctor", "lint", "--select", "FF102", "FF103"]) == 0
    assert run(["doctor", "lint", "--exclude", "bad.*"]) == 0
    (folder / "pyproject.toml").write_text('[tool.fullframe.lint]\nexclude = ["bad.py"]\n')
    assert Lint().run() == 0
    (folder / "pyproject.toml").write_text('[tool.fullframe.lint]\nselect = ["FF102"]\n')
    assert Lint().run() == 0
    assert Lint(select=("FF101",)).run() == 1


def test_what_is_mended_is_no_longer_found(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "lint", "--fix"]) == 0
    printed = capsys.readouterr()
    assert "bad.py: 1 mended" in printed.err and "nothing found in 2 files" in printed.out
    assert "total += loss.detach()" in (folder / "bad.py").read_text()


def test_the_repositorys_own_examples_and_benchmarks_are_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    assert run(["doctor", "lint", "examples", "benchmarks"]) == 0


def test_no_torch_is_loaded(folder: Path) -> None:
    code = "import sys\nfrom fullframe.cli.doctor.lint import Lint\nassert Lint().run() == 1\n"
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
