"""A product's gradient takes one way where the whole tensor holds a zero, another where it does not."""

import math

import torch
from torch import Tensor

from tests.exactness import differences
from tests.rank_group import rank_group


def largest_difference(with_zero: bool, dim: int) -> float:
    x = torch.rand(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
    x[..., 3:] = -math.inf
    if with_zero:
        x[1, 2, 0] = 0  # on the first rank alone

    def product(x: Tensor) -> Tensor:
        return torch.prod(x, dim, keepdim=dim < 0)

    return max(differences(product, [x], [], 1, 2).values())


def test_a_zero_on_another_rank_keeps_infinities_from_becoming_nan() -> None:
    for with_zero in (True, False):
        for dim in (0, 1, -2):
            apart = rank_group(2).run(largest_difference, with_zero, dim)
            assert max(apart) < 1e-9, (with_zero, dim, apart)
