"""cumsum."""

import pytest
import torch

from tests.spatial.cases import Case, Op, one, require_the_numbers_of_one_process
from tests.spatial.values import floats, on_all_meshes

CASES: dict[str, Case] = {
    "cumsum": one(lambda x: [x.cumsum(3), x.cumsum(2), x.cumsum(1)]),
}  # fmt: skip
OVER_FLOATS: dict[str, Op] = {
    "cumsum": lambda x: [x.cumsum(3), x.cumsum(2), x.cumsum(1), x.cumsum(3, dtype=torch.float32)],
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name: str) -> None:
    require_the_numbers_of_one_process(__name__, name)


@pytest.mark.parametrize("name", OVER_FLOATS)
def test_infinities_nan_ties_and_zeros_go_through_as_in_torch(name: str) -> None:
    assert not on_all_meshes(floats, __name__, name)
