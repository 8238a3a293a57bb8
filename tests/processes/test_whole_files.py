"""A file that is replaced has the old text or the new one."""

import pytest

from fullframe.processes.whole_files import replace_text


def test_the_text_is_replaced_and_nothing_is_left_beside_it(tmp_path):
    path = tmp_path / "run.json"
    replace_text(path, "old")
    replace_text(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_put_in_place_leaves_the_old(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("old")
    (tmp_path / "run.json.partial").mkdir()
    with pytest.raises(OSError):
        replace_text(path, "new")
    assert path.read_text() == "old"


def test_what_cannot_be_put_in_place_is_removed(tmp_path):
    path = tmp_path / "run.json"
    path.mkdir()
    with pytest.raises(OSError):
        replace_text(path, "new")
    assert list(tmp_path.iterdir()) == [path]
