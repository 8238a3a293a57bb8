"""RANK and WORLD_SIZE, as launchers set them and as they are left over."""

import pytest

from fullframe.errors import MeshError
from fullframe.processes.place import launched_place


@pytest.mark.parametrize(
    ("rank", "world", "place"), [(None, None, None), ("1", None, None), (None, "2", None), ("1", "2", (1, 2))]
)
def test_a_place_is_both_numbers(monkeypatch, rank, world, place):
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert launched_place() == place


@pytest.mark.parametrize(("rank", "world"), [("x", "2"), ("", ""), ("5", "2"), ("-1", "2"), ("0", "0")])
def test_what_is_no_place_is_named(monkeypatch, rank, world):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(MeshError, match=f"RANK={rank!r} and WORLD_SIZE={world!r}, which is no rank of a job; unset"):
        launched_place()
