"""Softmax over whole and split dims."""

import pytest
import torch
import torch.nn.functional as F

from tests.spatial.cases import Case, Op, as_in_one_process, one
from tests.spatial.values import SHAPE, as_in_torch, found, on_all_meshes, scores

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

test_as_in_one_process = as_in_one_process(__name__, CASES)
test_unusual_values_and_dtypes_as_in_torch = as_in_torch(__name__, OVER_FLOATS, HALVES, INTEGERS)


def _without_a_dim(world: int) -> list[str]:
    op = lambda x: [F.softmax(x, None), F.log_softmax(x[0], None), F.softmin(x[0])]  # noqa: E731
    return found({"softmax": (op, [scores(*SHAPE)], [])}, 1e-12, world)


@pytest.mark.filterwarnings("ignore")
def test_the_dim_that_torch_chooses() -> None:
    assert not on_all_meshes(_without_a_dim)
