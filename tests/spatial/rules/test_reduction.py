"""Sums, means, products, any and all: infinities, NaN, dtypes."""

import math

import torch
from torch import Tensor

from tests.exactness import differences
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, aminmax, as_in_one_process, one
from tests.spatial.values import as_in_torch, found

CASES: dict[str, Case] = {
    "sum": one(lambda x: [x.sum(), x.sum((0, 2)), x.sum(-1, keepdim=True), x.sum(1)]),
    "mean": one(lambda x: [x.mean(), x.mean((2, 3)), x.mean(-1), x.mean(1, keepdim=True)]),
    "any, all": one(lambda x: [(x > 1).any(), (x > -9).all(3), x.argmax(1), torch.count_nonzero(x > 0)]),
    "of distributions": one(lambda x: torch.distributions.Normal(x, 2.0).log_prob(x.sin())),
    "prod, nansum, nanmean": one(
        lambda x: [x.prod(3), x.prod(1), x.nansum((2, 3)), x.nanmean(2), x.tanh().exp().prod()]
    ),
    "aminmax, equal, allclose": one(lambda x: [*aminmax(x), x * torch.equal(x, x), x * (not torch.allclose(x, -x))]),
}  # fmt: skip
OVER_FLOATS: dict[str, Op] = {
    "sum": lambda x: [x.sum(), x.sum((2, 3)), x.nansum(3), x.nansum(), x.sum(2, dtype=torch.float32)],
    "mean": lambda x: [x.mean(), x.mean((2, 3)), x.nanmean(3), x.nanmean(), x.mean(2, dtype=torch.float32)],
    "prod": lambda x: [x.prod(3), x.prod(2, keepdim=True), x.prod(), x.prod(1)],
    "written over": lambda x: [x.var(3, True).add_(1e-5).sqrt_(), x.mean(2).mul_(2), x.cumsum(3).neg_(),
                               x.sum(2).add_(1), torch.var_mean(x, 3)[1].mul_(3), x.max(3).values.mul_(2)],
    "comparisons": lambda x: [x * torch.equal(x, x), x * torch.allclose(x, x), x * torch.allclose(x, x[:1]),
                              x * torch.allclose(x * 0, x[:, :1] * 0), x * torch.equal(x, x[:1]),
                              x * torch.allclose(x, x, equal_nan=True)],
}  # fmt: skip
HALVES: dict[str, Op] = {
    "sums": lambda x: [x.sum((2, 3)), x.nansum(3), x.sum(), x.sum(2, dtype=torch.float32), x.cumsum(3), x.cumsum(2)],
    "means": lambda x: [x.mean(), x.mean((2, 3)), x.mean(3, dtype=torch.float64), x.nanmean(3)],
    "prod": lambda x: [(x / 100).prod(3), (x / 100).prod()],
}  # fmt: skip
INTEGERS: dict[str, Op] = {
    "sums": lambda x: [x.sum(), x.sum(3), x.cumsum(3), *_cumulated(x), x.prod(3), x.count_nonzero(), x.nansum(3)],
    "sums of a dtype": lambda x: [x.sum(3, dtype=torch.int32), x.sum(2, dtype=torch.float16),
                                  x.sum(3, dtype=torch.bool), x.mean(3, dtype=torch.float32),
                                  x.sum((2, 3), dtype=torch.uint8), x.prod(2, dtype=torch.bool)],
    "any, all": lambda x: [x.any(), x.all(), x.any(3), x.all(2, keepdim=True), (x * 0).any(), x.any(1),
                           (x * 0 + 1).all()],
}  # fmt: skip


def _cumulated(x: Tensor) -> list[Tensor]:
    return [] if x.dtype == torch.bool else [x.cumsum(2, dtype=x.dtype)]


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_unusual_values_and_dtypes_as_in_torch = as_in_torch(__name__, OVER_FLOATS, HALVES, INTEGERS)


def _large(world: int) -> list[str]:
    """Of which each rank's share is too large for a mailbox."""
    x = torch.randn(4, 64, 512, 6, generator=torch.Generator().manual_seed(9))
    ops: dict[str, Op] = {
        "values": lambda x: [x.amax(3), *(x * 99).short().max(3), x.logsumexp(3), x.softmax(3), x.cumsum(3)],
    }
    return found({name: (op, [x], []) for name, op in ops.items()}, 3e-6, world)


def test_large_messages_of_any_dtype() -> None:
    assert not [wrong for found in rank_group(2).run(_large, 2) for wrong in found]


def _prod_beside_infinities(with_zero: bool, dim: int) -> float:
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
            apart = rank_group(2).run(_prod_beside_infinities, with_zero, dim)
            assert max(apart) < 1e-9, (with_zero, dim, apart)
