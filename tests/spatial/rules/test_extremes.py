"""Largest and smallest values and where they are: ties, infinities, NaN, integers."""

import torch

from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, aminmax, as_in_one_process, one
from tests.spatial.sent import bytes_sent
from tests.spatial.values import as_in_torch

CASES: dict[str, Case] = {
    "max along a split dim": one(lambda x: [*x.max(3), *x.min(2, keepdim=True), *x.relu().max(3), x.argmin(2)]),
    "argmax of all": one(lambda x: [x.argmax(), x.flatten(1).argmax(1)]),
    "of tokens": one(lambda x: [*x.flatten(2).max(2), *x.flatten(1).min(1, True), x.flatten(1).argmax(),
                                *x.relu().flatten(2).min(2), x.flatten(2).transpose(1, 2).argmin(1, True)]),
    "amax, amin": one(lambda x: [x.amax((2, 3)), x.amin(-1, True), x.max(), x.relu().amax((1, 2, 3)), x.amax(1)]),
    "max over channels": one(lambda x: x.max(1).values + x.min(1).values),
}  # fmt: skip
OVER_FLOATS: dict[str, Op] = {
    "amax": lambda x: [x.amax((2, 3)), x.amax(3, True), x.amax(), x.amin((1, 2)), x.amin((0, 3)), x.amin()],
    "max": lambda x: [x.max(), x.min(), x.flatten(2).max(), x.relu().max(), x.relu().min()],
    "max along a dim": lambda x: [*x.max(3), *x.min(2, keepdim=True), *x.relu().max(3), *x.relu().min(2)],
    "max along tokens": lambda x: [*x.flatten(2).max(2), *x.flatten(1).min(1), *x.relu().flatten(2).min(2),
                                   x.relu().flatten(1).argmin(), x.flatten(2).argmax(), x.flatten(2).argmin(2)],
    "aminmax": lambda x: [*aminmax(x), *aminmax(x, dim=3), *aminmax(x, dim=2, keepdim=True)],
    "argmax": lambda x: [x.argmax(), x.argmin(), x.argmax(3), x.argmin(2, True), x.argmax(keepdim=True),
                         x.relu().argmax(), x.flatten(2).argmax(2), x.flatten(1).argmin()],
}  # fmt: skip
HALVES: dict[str, Op] = {
    "extremes": lambda x: [x.amax(3), *x.max(2), x.max(), *aminmax(x), x.argmin(), x.argmax(3)],
}  # fmt: skip
INTEGERS: dict[str, Op] = {
    "extremes": lambda x: [x.amax((2, 3)), x.amin(3), x.amin(), x.max(), x.min(), *aminmax(x), *x.max(3), *x.min(2)],
    "positions": lambda x: [x.argmax(), x.argmin(3), x.argmax(keepdim=True)] if x.dtype != torch.bool else [],
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)
test_unusual_values_and_dtypes_as_in_torch = as_in_torch(__name__, OVER_FLOATS, HALVES, INTEGERS)


def _sent() -> list[tuple[int, int]]:
    x = torch.randn(2, 3, 50, 60, generator=torch.Generator().manual_seed(1))
    return [
        bytes_sent(lambda x: x.flatten(2).max(2).values, x),
        bytes_sent(lambda x: x.detach().flatten(1).argmax(), x),
    ]


def test_of_tokens_the_extremes_are_sent_alone() -> None:
    for sent in rank_group(2).run(_sent):
        assert all(forward < 1000 and backward < 1000 for forward, backward in sent)
