"""Running sums, products and extremes; differences and areas."""

import torch
from torch import Tensor

from tests.spatial.cases import Case, Op, as_in_one_process, one, small
from tests.spatial.values import as_in_torch, found, on_all_meshes


def some_zeros(x: Tensor) -> Tensor:
    """Zeros in some rows, two in one, and one in the last row of a part."""
    y = x.clone()
    y[0, 0, 1, 2], y[0, 0, 1, 5], y[1, 1, -1, -1], y[1, 0, 0, 0] = 0, 0, 0, 0
    return y


PLACES = torch.linspace(0, 1, 11, dtype=torch.float64) ** 2

CASES: dict[str, Case] = {
    "cumsum": one(lambda x: [x.cumsum(3), x.cumsum(2), x.cumsum(1), (x * 1).cumsum_(3)]),
    "cumprod": one(lambda x: [x.cumprod(3), x.cumprod(-2), x.cumprod(1), (x * 1).cumprod_(2), x.sin().cumprod(0)]),
    "cumprod with zeros": one(lambda x: [some_zeros(x).cumprod(d) for d in range(4)]),
    "cummax, cummin": one(lambda x: [*x.cummax(3), *x.cummin(2), *x.cummax(1), *x.relu().cummin(3),
                                     *x.relu().cummax(2)]),
    "logcumsumexp": one(lambda x: [x.logcumsumexp(3), x.logcumsumexp(2), x.logcumsumexp(1)]),
    "of tokens": small(lambda x: [x.flatten(2).cumprod(2), *x.flatten(2).cummax(2), x.flatten().logcumsumexp(0)]),
    "diff": small(lambda x: [x.diff(prepend=x[..., :1]), x.diff(2, 2, x[:, :, 3:5], x * 2),
                             x.diff(dim=3, append=x.sin()), x.diff(0, prepend=x),
                             x.diff(prepend=torch.zeros(2, 4, 7, 2, dtype=torch.float64))]),
    "diff, dist": one(lambda x: [x.diff(), x.diff(n=2, dim=2), x.dist(x.sin()), x.diff(dim=1)]),
    "more differences than rows": one(lambda x: x.diff(9, 1)),
    "areas": small(lambda x: [torch.trapezoid(x), torch.trapezoid(x, dx=0.3, dim=2), torch.trapz(x, dim=1),
                              torch.cumulative_trapezoid(x), torch.cumulative_trapezoid(x, dx=2, dim=2),
                              torch.trapezoid(x, x.sin()), torch.cumulative_trapezoid(x, x.sin(), dim=-2),
                              torch.trapezoid(x, PLACES), torch.cumulative_trapezoid(x, PLACES), torch.trapz(x, x[0])]),
    "areas over learned places": Case(lambda x, p: [torch.trapezoid(x, p), torch.cumulative_trapezoid(x, p, dim=3)],
                                      whole=((11,),), sizes=((7, 11),)),
}  # fmt: skip
OVER_FLOATS: dict[str, Op] = {
    "along whole dims": lambda x: [x.cumprod(1), x.logcumsumexp(1)],
    "cumsum": lambda x: [x.cumsum(3), x.cumsum(2), x.cumsum(1), x.cumsum(3, dtype=torch.float32)],
    "running products": lambda x: [x.cumprod(3), x.cumprod(2), x.cumprod(1), x.flatten(2).cumprod(2)],
    "running extremes": lambda x: [t for d in (1, 2, 3) for t in (*x.cummax(d), *x.cummin(d), *x.relu().cummax(d))],
    "running powers": lambda x: [x.logcumsumexp(3), x.logcumsumexp(2), x.flatten(1).logcumsumexp(1)],
    "areas": lambda x: [torch.trapezoid(x), torch.cumulative_trapezoid(x, dim=2), x.diff(prepend=x, append=x)],
}  # fmt: skip
HALVES: dict[str, Op] = {
    "running": lambda x: [x.sign().cumprod(3), *x.cummax(3), *x.cummin(2), (x / 100).logcumsumexp(2)],
}  # fmt: skip
INTEGERS: dict[str, Op] = {
    "running": lambda x: [x.cumprod(3), *x.cummax(3), *x.cummin(2), x.diff(prepend=x), (x + 0).cumsum_(3),
                          torch.trapezoid(x, x * 3), torch.cumulative_trapezoid(x, x * 3, dim=2)]
    if x.dtype != torch.bool else [x.cumprod(2), x.diff(append=x), *x.cummax(3)],
    "of one row": lambda x: [*x[:1, :1, :1].cummin(3), *x[:1, :1, :, :1].cummax(2)],
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)
test_unusual_values_and_dtypes_as_in_torch = as_in_torch(__name__, OVER_FLOATS, HALVES, INTEGERS)


def _vanishing(world: int) -> list[str]:
    """1e200 first, then 1e-200 again and again: a part's own product would be zero."""
    x = torch.full((1, 1, 3, 9), 1e-200, dtype=torch.float64)
    x[..., 0], x[..., 5] = 1e200, 1e250
    return found({"vanishing": (lambda x: x.detach().cumprod(3), [x], [])}, 0.0, world)


def test_products_neither_vanish_nor_overflow_sooner_than_in_torch() -> None:
    assert not on_all_meshes(_vanishing)
