"""Which rules run and which files are read."""

from pathlib import Path

import pytest

from fullframe.doctor.lint.catalog import RULES
from fullframe.doctor.lint.configuration import Configuration, configured, from_table
from fullframe.errors import LintError


def chosen(**settings: tuple[str, ...]) -> set[str]:
    return {rule.kind.code for rule in Configuration(**settings).rules()}


def test_codes_may_be_shortened() -> None:
    on = {code for code, rule in RULES.items() if rule.kind.default}
    assert chosen() == on
    assert chosen(select=("ALL",)) == set(RULES)
    assert chosen(select=("FF101",)) == {"FF101"}
    assert chosen(select=("FF10",)) == {code for code in RULES if code.startswith("FF10")}
    assert chosen(ignore=("FF10", "FF2")[:1]) == {code for code in on if not code.startswith("FF10")}
    assert chosen(extend_select=("FF112",)) == on | {"FF112"}
    assert chosen(select=("ALL",), ignore=("ALL",)) == set()


@pytest.mark.parametrize("code", ["FF9", "E501", "", "ff101"])
def test_a_code_that_begins_no_rule_is_refused(code: str) -> None:
    with pytest.raises(LintError, match="no rule"):
        Configuration(select=(code,)).rules()


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")


def test_files_below_a_folder_are_python_files_that_are_not_left_out(tmp_path: Path) -> None:
    write(tmp_path, "b.py", "a/c.py", "a/d.txt", ".venv/e.py", "a/__pycache__/f.py", "gen/g.py", "a/old_h.py")
    files = Configuration(exclude=("gen", "old_*.py")).files([tmp_path])
    assert [f.relative_to(tmp_path).as_posix() for f in files] == ["a/c.py", "b.py"]
    assert list(Configuration().files([tmp_path / "a/d.txt"])) == [tmp_path / "a/d.txt"]
    twice = [tmp_path / "a" / "c.py", tmp_path / "a" / ".." / "a" / "c.py", tmp_path / "a"]
    assert list(Configuration(exclude=("old_*.py",)).files(twice)) == [tmp_path / "a" / "c.py"]
    assert list(Configuration(exclude=("*/gen/*",)).files([tmp_path / "gen/g.py"])) == []


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LintError, match="there is no file or folder"):
        list(Configuration().files([tmp_path / "none.py"]))


def test_settings_come_from_the_nearest_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.fullframe.lint]\nignore = ["FF101"]\nextend-select = ["FF112"]\n')
    write(tmp_path, "a/b.py")
    assert configured([tmp_path / "a/b.py"]) == Configuration(ignore=("FF101",), extend_select=("FF112",))
    (tmp_path / "a/pyproject.toml").write_text("[project]\n")
    assert configured([tmp_path / "a/b.py"]) == Configuration()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.fullframe.lint]\nselects = []", "no setting 'selects'; there are exclude, extend-select"),
        ("[tool.fullframe.lint]\nselect = 'FF101'", "must be a list of strings, got 'FF101'"),
        ("[tool.fullframe.lint]\nselect = [101]", "must be a list of strings"),
        ("[tool.fullframe]\nlint = 3", "must be a table"),
        ("[tool", "cannot be read"),
    ],
)
def test_settings_that_are_wrong_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(LintError, match=said):
        configured([tmp_path])


def test_a_table_gives_a_configuration() -> None:
    assert from_table({"exclude": ["a", "b"]}, "x").exclude == ("a", "b")
