"""Softmax over whole and split dims."""

import pytest
import torch
import torch.nn.functional as F

from tests.spatial.cases import Case, Op, one, require_the_numbers_of_one_process
from tests.spatial.values import (
    HALF_KINDS,
    INTEGER_KINDS,
    SHAPE,
    floats,
    found,
    halves,
    integers,
    on_all_meshes,
    scores,
)

CASES: dict[str, Case] = {
    "softmax over channels": one(lambda x: [x.softmax(1), F.log_softmax(x, 1)]),
    "softmax over pixels": one(lambda x: [x.softmax(3), F.log_softmax(x, 2), x.flatten(2).softmax(-1)]),
}  # fmt: skip
OVER_FLOATS: dict[str, Op] = {
    "softmax": lambda x: [x.softmax(3), x.softmax(2), x.flatten(2).softmax(2), F.softmin(x, 3)],
    "log_softmax": lambda x: [x.log_softmax(3), F.log_softmax(x, 2), torch.log_softmax(x.flatten(2), 2)],
}  # fmt: skip
HALVES: dict[str, Op] = {
    "exponentials": lambda x: [x.softmax(3), x.log_softmax(2), x.logsumexp(3), x.softmax(3, dtype=torch.float32)],
}  # fmt: skip
INTEGERS: dict[str, Op] = {
    "exponentials": lambda x: [x.logsumexp(3)] if x.dtype != torch.bool else [],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name: str) -> None:
    require_the_numbers_of_one_process(__name__, name)


@pytest.mark.parametrize("name", OVER_FLOATS)
def test_infinities_nan_ties_and_zeros_go_through_as_in_torch(name: str) -> None:
    assert not on_all_meshes(floats, __name__, name)


@pytest.mark.parametrize("kind", HALF_KINDS)
@pytest.mark.parametrize("name", HALVES)
def test_short_floats_are_added_up_as_widely_as_in_torch(name: str, kind: str) -> None:
    assert not on_all_meshes(halves, __name__, name, kind)


@pytest.mark.parametrize("kind", INTEGER_KINDS)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_give_torchs_numbers_and_dtypes(name: str, kind: str) -> None:
    assert not on_all_meshes(integers, __name__, name, kind)


def _without_a_dim(world: int) -> list[str]:
    op = lambda x: [F.softmax(x, None), F.log_softmax(x[0], None), F.softmin(x[0])]  # noqa: E731
    return found({"softmax": (op, [scores(*SHAPE)], [])}, 1e-12, world)


@pytest.mark.filterwarnings("ignore")
def test_the_dim_that_torch_chooses() -> None:
    assert not on_all_meshes(_without_a_dim)
