"""Groups of parameters: in the order of backward, of one dtype, not too large."""

import pytest
import torch

from fullframe.horovod.gradient_groups import grouped, named_parameters_of

A, B, C = (torch.zeros(10) for _ in range(3))  # 40 bytes each
D = torch.zeros(5, dtype=torch.float64)


def ids(groups: list[list[torch.Tensor]]) -> list[list[str]]:
    names = {id(t): n for n, t in zip("ABCD", (A, B, C, D), strict=True)}
    return [[names[id(tensor)] for tensor in group] for group in groups]


def test_neighbours_up_to_the_limit_the_last_first() -> None:
    assert ids(grouped([A, B, C], None, 80)) == [["C", "B"], ["A"]]
    assert ids(grouped([A, B, C], None, 0)) == [["C"], ["B"], ["A"]]
    assert ids(grouped([A, D, B, C], None, 80)) == [["C", "B"], ["D"], ["A"]]


def test_groups_that_are_asked_for() -> None:
    assert ids(grouped([A, B, C], 2, 80)) == [["C"], ["A", "B"]]
    assert ids(grouped([A, B, C, D], [[A, C]], 80)) == [["D"], ["B"], ["A", "C"]]
    with pytest.raises(ValueError, match="only appear once"):
        grouped([A, B], [[A], [A, B]], 80)


def test_names() -> None:
    assert list(named_parameters_of([{"params": [A]}, {"params": [B]}], None).values()) == [
        "allreduce.noname.0",
        "allreduce.noname.1",
    ]
    assert named_parameters_of([{"params": [B]}], [("a", A), ("b", B)]) == {B: "b"}
