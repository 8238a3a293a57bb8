"""Kinds come in one order, unknown ones last."""

from fullframe.observation.kinds import KINDS, in_order, name_of


def test_known_kinds_come_first_in_their_order() -> None:
    assert in_order(["x", "backward", "data", "x", "y"], KINDS) == ["data", "backward", "x", "y"]
    assert in_order([], KINDS) == []


def test_names_are_for_people() -> None:
    assert (name_of("all_reduce"), name_of("other_processes"), name_of("data")) == (
        "all-reduce",
        "other processes",
        "data",
    )
