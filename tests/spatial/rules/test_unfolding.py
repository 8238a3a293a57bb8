"""unfold and fold."""

import pytest
import torch.nn.functional as F

from tests.spatial.cases import Case, one, require_the_numbers_of_one_process

CASES: dict[str, Case] = {
    "unfold": one(lambda x: F.unfold(x, 3, padding=1)),
    "unfold with stride": one(lambda x: F.unfold(x, (2, 3), (1, 2), (0, 1), (2, 1))),
    "fold of unfold": one(lambda x: F.fold(F.unfold(x, 3, padding=1, stride=2).sin(), x.shape[2:], 3, 1, 1, 2)),
    "Tensor.unfold": one(lambda x: x.unfold(3, 5, 2).sin().sum(-1)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name: str) -> None:
    require_the_numbers_of_one_process(__name__, name)
