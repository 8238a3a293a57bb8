"""Writing at index tensors along whole dims."""

import pytest
import torch
from torch import Tensor

from tests.spatial.cases import Case, require_the_numbers_of_one_process, small


def labels(x: Tensor) -> Tensor:
    return (x[:, :1].detach().abs() * 5).long() % 4


CASES: dict[str, Case] = {
    "one hot by scatter": small(lambda x: torch.zeros_like(x).scatter_(1, labels(x), 1.0)),
    "scatter into a whole map": small(lambda x: torch.zeros(x.shape, dtype=x.dtype).scatter(1, labels(x), 1.0)),
    "scatter of a source": small(lambda x: x.scatter(1, labels(x), x[:, :1] * 3)),
    "scatter_add": small(lambda x: x.scatter_add(1, labels(x), x[:, 1:2])),
    "scatter_reduce": small(lambda x: x.scatter_reduce(1, labels(x), x[:, 1:2], "amax")),
    "index_add": small(lambda x: x.index_add(1, torch.tensor([2, 0]), x[:, :2].sin(), alpha=2)),
    "index_copy": small(lambda x: (x * 1).index_copy_(1, torch.tensor([2, 0]), x[:, :2].sin())),
    "index_fill": small(lambda x: x.index_fill(1, torch.tensor([2, 0]), 7.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name: str) -> None:
    require_the_numbers_of_one_process(__name__, name)
