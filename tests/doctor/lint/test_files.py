"""Many files at once."""

from pathlib import Path

import pytest

from fullframe.doctor.lint import files
from fullframe.doctor.lint.catalog import RULES
from fullframe.doctor.lint.files import check_file, check_files, mend_files
from tests.doctor.lint.samples import training

SOURCE = "import torch.nn.functional as F\n" + training("total += loss", "total = 0\n")
ON = [rule for rule in RULES.values() if rule.kind.default]


def test_one_process_and_many_find_the_same_in_the_same_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / f"{name}.py" for name in "abcde"]
    for path in paths:
        path.write_text(SOURCE)
    monkeypatch.setattr(files, "_MANY", 99)
    one = check_files(paths, ON)
    monkeypatch.setattr(files, "_MANY", 1)
    assert check_files(paths, ON) == one
    assert [(f.path, f.code) for f in one] == [(str(path), "FF101") for path in paths]


def test_a_file_that_is_no_text_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"import torch\n\xff\xfe")
    (found,) = check_file(tmp_path / "a.py", ["FF101"])
    assert found.code == "FF100" and "cannot be read" in found.message


def test_only_the_rules_that_were_chosen_run(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("\ufeff" + SOURCE, encoding="utf-8")
    assert [f.code for f in check_file(tmp_path / "a.py", ["FF101"])] == ["FF101"]
    assert check_file(tmp_path / "a.py", ["FF102"]) == []


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_files_are_mended_in_place_and_keep_their_line_ends_and_encoding(tmp_path: Path, encoding: str) -> None:
    path, cookie = tmp_path / "a.py", f"# coding: {encoding.removesuffix('-sig')}\n"
    source = f"{cookie}# größe\n{SOURCE}".replace("\n", "\r\n")
    path.write_bytes(source.encode(encoding))
    found = check_files([path], [RULES["FF101"], RULES["FF157"]])
    assert mend_files(found) == {str(path): 1}
    assert [f.code for f in check_files([path], [RULES["FF101"], RULES["FF157"]])] == ["FF157"]
    assert path.read_bytes() == source.replace("+= loss", "+= loss.detach()").encode(encoding)
