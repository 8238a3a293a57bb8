"""Medians, quantiles, k-th and most frequent values, along split dims and over all elements."""

import torch
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, as_in_one_process, one, raised, small
from tests.spatial.sent import bytes_sent
from tests.spatial.values import as_in_torch

SEVERAL = torch.tensor([0.0, 0.3, 0.99, 1.0], dtype=torch.float64)
WAYS = ("linear", "lower", "higher", "midpoint", "nearest")


def scaled(pred: Tensor, target: Tensor) -> Tensor:
    """Predicted depth brought to the scale of the measured one by their medians over valid pixels."""
    mask = target.detach() > 0.1
    shift, scale = pred[mask].median(), (pred[mask] - pred[mask].median()).abs().mean()
    return ((pred[mask] - shift) / scale - target[mask] / target[mask].median()).abs().mean()


CASES: dict[str, Case] = {
    "of what a mask picked": Case(scaled, ((2, 4), (2, 4))),
    "where one rank has none": one(lambda x: [(y := x.sort(-1).values)[y > y.median()].median(),
                                              y[y >= y.max()].median()]),
    "median": one(lambda x: [x.median(), *x.median(3), *x.median(2, True), *x.nanmedian(-1), x.relu().median()]),
    "nanmedian": one(lambda x: [x.nanmedian(), *x.nanmedian(2), *x.median(1), x.flatten().median(), *x[0].median(0)]),
    "kthvalue": one(lambda x: [*x.kthvalue(3), *x.kthvalue(7, 2, True), *torch.kthvalue(x, 1, dim=1)]),
    "mode": one(lambda x: [*x.mode(), *x.round().mode(2, True), *torch.mode(x.sign(), dim=-1)]),
    "of tokens": small(lambda x: [*x.flatten(2).median(2), *x.flatten(2).kthvalue(9), *x.flatten().kthvalue(8, 0, True),
                                  *x.flatten().mode(), x.flatten(2).quantile(0.3, 2)]),
    "quantile": one(lambda x: [x.quantile(0.3), x.quantile(0.5, 3), x.nanquantile(0.9, 2, True), x.quantile(1.0, 1),
                               x.quantile(SEVERAL), x.quantile(SEVERAL, 2, keepdim=True), x.quantile(SEVERAL, -1),
                               x.quantile(SEVERAL, keepdim=True), x.nanquantile(0.2, keepdim=True)]),
    "interpolations": small(lambda x: [x.quantile(SEVERAL, d, interpolation=way) for way in WAYS for d in (None, 3)]),
    "a learned quantile": Case(lambda x, q: [x.quantile(q.sigmoid(), 3), x.quantile(q.sigmoid())], whole=((3,),),
                               sizes=((7, 11),)),
}  # fmt: skip
OVER_FLOATS: dict[str, Op] = {
    "middle": lambda x: [x.median(), x.nanmedian(), *x.median(3), *x.median(2, True), *x.nanmedian(3), *x.nanmedian(2),
                         x.relu().median(), (-x).median(), (x * 0).nanmedian(), (x / 0).median(),
                         *x.flatten().median(0)],
    "k-th and most frequent": lambda x: [*x.kthvalue(2, 3), *x.kthvalue(5, 2, True), *x.mode(3), *x.mode(2),
                                         *x.flatten(2).mode(), *x.flatten(2).kthvalue(30)],
    "quantiles": lambda x: [f(x, 0.4, dim, interpolation=way) for f in (torch.quantile, torch.nanquantile)
                            for way in WAYS for dim in (None, 2, 3)],
}  # fmt: skip
HALVES: dict[str, Op] = {
    "middle": lambda x: [x.median(), x.nanmedian(), *x.median(3), *x.kthvalue(9, 3), *x.mode(3), *x.nanmedian(2)],
}  # fmt: skip
INTEGERS: dict[str, Op] = {
    "middle": lambda x: [x.median(), x.nanmedian(), *x.median(3), *x.kthvalue(2, 3), *x.mode(2), *x.flatten(2).mode()]
    if x.dtype != torch.bool else list(x.mode(3)),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)
test_unusual_values_and_dtypes_as_in_torch = as_in_torch(__name__, OVER_FLOATS, HALVES, INTEGERS)


def _extremes() -> list[bool]:
    found = []
    for dtype in (torch.int64, torch.int32, torch.int8, torch.float64, torch.float32, torch.float16):
        limits: torch.iinfo | torch.finfo = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        for value in (limits.min, limits.max, 1):
            x = torch.full((1, 1, 3, 5), value, dtype=dtype)
            x[0, 0, 0] = 0
            found.append(torch.equal(ff.shard(x, mesh(1, 2)).median(), x.median()))
    return found


def test_the_largest_and_smallest_numbers_are_medians_too() -> None:
    assert all(map(all, rank_group(2).run(_extremes)))


def _refusals(split: bool) -> list[str]:
    x: Tensor = torch.ones(2, 3, 6, 8)
    x = ff.shard(x, mesh(1, 2)) if split else x
    return raised((
        lambda: (x > 0).median(), lambda: x.kthvalue(9), lambda: x.quantile(1.5), lambda: x.median(7),
        lambda: x.quantile(0.5, 3, interpolation="x"), lambda: x.long().quantile(0.5), lambda: (x * 1j).median(),
    ))  # fmt: skip


def test_what_torch_refuses_is_refused_on_all_ranks() -> None:
    assert rank_group(2).run(_refusals, True) == [_refusals(False)] * 2


def _sent(whole: bool) -> tuple[int, int]:
    x = torch.randn(4, 100, 200, generator=torch.Generator().manual_seed(1))
    return bytes_sent(lambda x: x.median() if whole else x.median(2).values, x)


def test_the_median_of_all_sends_counts_alone() -> None:
    for forward, backward in rank_group(2).run(_sent, True):
        assert forward < 8 * 256 * 8 + 20 * 300 and backward < 300


def test_medians_along_a_split_dim_send_half_of_the_part() -> None:
    for forward, backward in rank_group(2).run(_sent, False):
        assert forward < 4 * 100 * 100 * 4 // 2 + 400 * (4 + 8) + 8 * 256 and backward < 400 * 4 + 300
