"""Sweeps as words, and what is remembered of a launch."""

from pathlib import Path

import pytest

from fullframe.errors import LaunchError
from fullframe.launching.job import read_launch, runs_of, slug


def test_a_sweep_is_every_combination() -> None:
    runs = runs_of(["lr=1e-3,3e-4", "size=(1,2),'a,b'"])
    assert [run.values for run in runs] == [
        ("lr=1e-3", "size=(1,2)"),
        ("lr=1e-3", "size='a,b'"),
        ("lr=3e-4", "size=(1,2)"),
        ("lr=3e-4", "size='a,b'"),
    ]
    assert [run.place for run in runs[:2]] == ["0000-lr=1e-3,size=_1,2_", "0001-lr=1e-3,size=_a,b_"]
    assert [run.place for run in runs_of([])] == ["."]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lr"], "no sweep"),
        (["l-r=1,2"], "no sweep"),
        (["lr="], "empty value"),
        (["lr=1,,2"], "empty value"),
        (["lr=1", "lr=2"], "lr twice"),
        (["lr=1,1"], "a value twice"),
    ],
)
def test_what_is_no_sweep_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        runs_of(words)


def test_a_slug_is_a_file_name_on_any_system() -> None:
    assert slug("a/b c;$(x)") == "a_b_c_x_"
    assert slug("") == "_"
    assert len(slug("x" * 300)) == 80


def test_a_launch_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_launch(tmp_path) == {}
    for text in ("[]", "{", ""):
        (tmp_path / "launch.json").write_text(text)
        assert read_launch(tmp_path) == {}
