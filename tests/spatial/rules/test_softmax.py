"""Softmax over whole and split dims."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.spatial.cases import Case, Op, one, require_the_numbers_of_one_process
from tests.spatial.values import SHAPE, found, on_all_meshes, scores, tables

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


@pytest.mark.parametrize(("run", "args"), tables(OVER_FLOATS, HALVES, INTEGERS))
def test_unusual_values_and_dtypes_as_in_torch(run: Any, args: tuple[str, ...]) -> None:
    assert not on_all_meshes(run, __name__, *args)


def _without_a_dim(world: int) -> list[str]:
    op = lambda x: [F.softmax(x, None), F.log_softmax(x[0], None), F.softmin(x[0])]  # noqa: E731
    return found({"softmax": (op, [scores(*SHAPE)], [])}, 1e-12, world)


@pytest.mark.filterwarnings("ignore")
def test_the_dim_that_torch_chooses() -> None:
    assert not on_all_meshes(_without_a_dim)
