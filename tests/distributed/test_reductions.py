"""Reductions, losses and what works along a dim: torch's numbers with infinities, NaN, ties, zeros, in every dtype."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.exactness import unlike
from tests.ranks import rank_group

Op = Callable[..., Any]
MESHES = [(1, 2), (2, 1), (2, 2), (1, 3)]
SHAPE = (2, 3, 5, 7)
inf, nan = math.inf, math.nan


def drawn() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def infinite() -> Tensor:
    x = drawn()
    x[0, 0, 1, 1], x[0, 1, 4, 6], x[1, 0, 0, 0], x[1, 0, 4, 5], x[1, 1, 2, 3:5] = inf, -inf, inf, -inf, inf
    return x


def with_nan() -> Tensor:
    x = infinite()
    x[0, 2, 4, 6], x[0, 0, 0, 5], x[1, 2, 1, 2:4] = nan, nan, nan
    return x


def masked() -> Tensor:
    """Scores with -inf on one rank's columns and rows, and one row of nothing else."""
    x = drawn()
    x[:, :2, :, :4], x[0, :, 3:], x[1, 2, 1] = -inf, -inf, -inf
    return x


def tied() -> Tensor:
    x = torch.randint(-1, 2, SHAPE, generator=torch.Generator().manual_seed(4)).double()
    return torch.where(x == 0, -x, x)


def constant() -> Tensor:
    x = torch.full(SHAPE, 0.1, dtype=torch.float64)  # of which no sum is exact
    x[0, 0] = 0
    x[0, 1] = 2
    return x


FLOATS = {f.__name__: f for f in (drawn, infinite, with_nan, masked, tied, constant)}
ORDERS = (2, 1, 0, inf, -inf, 3, 1.5, 0.5, -1, -2)

OVER_FLOATS: dict[str, Op] = {
    "amax": lambda x: [x.amax((2, 3)), x.amax(3, True), x.amax(), x.amin((1, 2)), x.amin((0, 3)), x.amin()],
    "max": lambda x: [x.max(), x.min(), x.flatten(2).max(), x.relu().max(), x.relu().min()],
    "max along a dim": lambda x: [*x.max(3), *x.min(2, keepdim=True), *x.relu().max(3), *x.relu().min(2)],
    "aminmax": lambda x: [*x.aminmax(), *x.aminmax(dim=3), *x.aminmax(dim=2, keepdim=True)],
    "argmax": lambda x: [x.argmax(), x.argmin(), x.argmax(3), x.argmin(2, True), x.argmax(keepdim=True),
                         x.relu().argmax(), x.flatten(2).argmax(2), x.flatten(1).argmin()],
    "sum": lambda x: [x.sum(), x.sum((2, 3)), x.nansum(3), x.nansum(), x.sum(2, dtype=torch.float32)],
    "mean": lambda x: [x.mean(), x.mean((2, 3)), x.nanmean(3), x.nanmean(), x.mean(2, dtype=torch.float32)],
    "prod": lambda x: [x.prod(3), x.prod(2, keepdim=True), x.prod(), x.prod(1)],
    "var": lambda x: [x.var((2, 3)), x.var(), x.var(3, correction=0), x.var(2, correction=7), x.var(correction=900)],
    "std": lambda x: [x.std((2, 3)), x.std(), x.std(3, correction=0), x.std(1), x.std(2, keepdim=True)],
    "var_mean": lambda x: [*torch.var_mean(x, (2, 3)), *torch.std_mean(x, 3, keepdim=True), *torch.std_mean(x)],
    "norms over a dim": lambda x: [torch.linalg.vector_norm(x, p, 3) for p in ORDERS],
    "norms over the plane": lambda x: [torch.linalg.vector_norm(x, p, (2, 3), True) for p in ORDERS],
    "norms": lambda x: [x.norm(), x.norm(p=1, dim=2), x.norm(3), x.norm(inf), x.dist(x * 0.5), x.dist(x, 1)],
    "normalize": lambda x: [F.normalize(x), F.normalize(x, dim=3), F.pairwise_distance(x, x.flip(1) + 1, keepdim=True)],
    "logsumexp": lambda x: [x.logsumexp((2, 3)), x.logsumexp(3, True), x.logsumexp(1)],
    "softmax": lambda x: [x.softmax(3), x.softmax(2), x.flatten(2).softmax(2), F.softmin(x, 3)],
    "log_softmax": lambda x: [x.log_softmax(3), F.log_softmax(x, 2), torch.log_softmax(x.flatten(2), 2)],
    "cumsum": lambda x: [x.cumsum(3), x.cumsum(2), x.cumsum(1), x.cumsum(3, dtype=torch.float32)],
    "along whole dims": lambda x: [x.cumprod(1), x.logcumsumexp(1), *x.sort(1), *torch.sort(x, dim=1, stable=True),
                                   *x.sort(1, True), *x.sort(descending=True, dim=0, stable=True), x.argsort(1),
                                   torch.argsort(x, stable=True, dim=1), x.msort(), *x.topk(2, 1), F.glu(x, 0)],
    "any, all": lambda x: [x.any(), x.all(), x.any(3), x.all(2, keepdim=True), x.count_nonzero((2, 3))],
    "comparisons": lambda x: [x * torch.equal(x, x), x * torch.allclose(x, x), x * torch.allclose(x, x[:1]),
                              x * torch.allclose(x * 0, x[:, :1] * 0), x * torch.equal(x, x[:1]),
                              x * torch.allclose(x, x, equal_nan=True)],
}  # fmt: skip


def _told(op: Op) -> Op:
    """The op's results, and whether each requires a gradient."""

    def told(*operands: Tensor) -> Any:
        results = [t for t in tree_leaves(op(*operands)) if isinstance(t, Tensor)]
        return [*results, *(torch.tensor(t.requires_grad) for t in results)]

    return told


def _found(cases: dict[str, tuple[Op, list[Tensor], list[Tensor]]], tolerance: float, world: int) -> list[str]:
    found = []
    for height, width in (mesh for mesh in MESHES if mesh[0] * mesh[1] == world):
        for name, (op, split, whole) in cases.items():
            wrong = unlike(_told(op), split, whole, height, width, tolerance)
            found += [f"{name} on {height}x{width}: {what}" for what in wrong]
    return found


def _on_all_meshes(function: Callable[..., list[str]], *args: Any) -> list[str]:
    answers = [rank_group(world).run(function, *args, world) for world in (2, 3, 4)]
    return [wrong for ranks in answers for found in ranks for wrong in found]


def _floats(name: str, world: int) -> list[str]:
    cases = {data: (OVER_FLOATS[name], [FLOATS[data]()], []) for data in FLOATS}
    return _found(cases, 1e-6 if name in ("sum", "mean", "cumsum") else 1e-12, world)


@pytest.mark.parametrize("name", OVER_FLOATS)
def test_non_finite_values_ties_and_zeros_go_through_as_in_torch(name: str) -> None:
    assert not _on_all_meshes(_floats, name)


HALVES: dict[str, Op] = {
    "sums": lambda x: [x.sum((2, 3)), x.nansum(3), x.sum(), x.sum(2, dtype=torch.float32), x.cumsum(3), x.cumsum(2)],
    "means": lambda x: [x.mean(), x.mean((2, 3)), x.mean(3, dtype=torch.float64), x.nanmean(3)],
    "spread": lambda x: [x.var((2, 3)), x.std(3), *torch.var_mean(x, 2), *torch.std_mean(x)],
    "norms": lambda x: [x.norm(), x.norm(3, 3), x.norm(1, 2), x.norm(inf), x.norm(0), x.dist(x * 0.5), F.normalize(x, dim=3),
                        F.pairwise_distance(x, x * 0.5), torch.linalg.vector_norm(x, 2, (2, 3), dtype=torch.float32)],
    "extremes": lambda x: [x.amax(3), *x.max(2), x.max(), *x.aminmax(), x.argmin(), x.argmax(3)],
    "exponentials": lambda x: [x.softmax(3), x.log_softmax(2), x.logsumexp(3), x.softmax(3, dtype=torch.float32)],
    "prod": lambda x: [(x / 100).prod(3), (x / 100).prod()],
    "losses": lambda x: [F.mse_loss(x / 50, x / 99), F.l1_loss(x, x / 2), F.huber_loss(x, x / 2), F.smooth_l1_loss(x, x / 2),
                         F.binary_cross_entropy_with_logits(x, x.sigmoid().detach()), F.cross_entropy(x, _classes(x)),
                         F.cross_entropy(x, _classes(x), label_smoothing=0.1), F.nll_loss(x, _classes(x))],
}  # fmt: skip
INTEGERS: dict[str, Op] = {
    "extremes": lambda x: [x.amax((2, 3)), x.amin(3), x.amin(), x.max(), x.min(), *x.aminmax(), *x.max(3), *x.min(2)],
    "sums": lambda x: [x.sum(), x.sum(3), x.cumsum(3), x.cumsum(2, dtype=x.dtype), x.prod(3), x.count_nonzero(), x.nansum(3),
                       x.sum(3, dtype=torch.int32), x.sum(2, dtype=torch.float16), x.mean(3, dtype=torch.float32),
                       x.sum((2, 3), dtype=torch.uint8), x.sum(3, dtype=torch.bool), x.prod(2, dtype=torch.bool)],
    "any, all": lambda x: [x.any(), x.all(), x.any(3), x.all(2, keepdim=True), (x * 0).any(), x.any(1), (x * 0 + 1).all()],
    "positions": lambda x: [x.argmax(), x.argmin(3), x.argmax(keepdim=True)] if x.dtype != torch.bool else [],
    "exponentials": lambda x: [x.logsumexp(3)] if x.dtype != torch.bool else [],
}  # fmt: skip


def _classes(x: Tensor) -> Tensor:
    classes = (x[:, 0].detach().abs().float() * 7).long() % 4
    return torch.where(classes == 3, -100, classes)


def _dtypes(name: str, kind: str, world: int) -> list[str]:
    dtype: torch.dtype = getattr(torch, kind)
    x = torch.randn((2, 4, 9, 301), generator=torch.Generator().manual_seed(5))
    if dtype.is_floating_point:
        return _found({kind: (HALVES[name], [(x * 100).to(dtype)], [])}, 2 * torch.finfo(dtype).eps, world)
    x = (x[:, :, :5, :7] * 99).to(torch.int64).to(dtype)
    x[0, 1], x[1, 0, :, 5:], x[1, 1] = 0, 0, 1
    return _found({kind: (INTEGERS[name], [x], [])}, 1e-6, world)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("name", HALVES)
def test_short_floats_are_added_up_as_widely_as_in_torch(name: str, kind: str) -> None:
    assert not _on_all_meshes(_dtypes, name, kind)


@pytest.mark.parametrize("kind", ["uint8", "int8", "int16", "int32", "int64", "bool"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_give_torchs_numbers_and_dtypes(name: str, kind: str) -> None:
    assert not _on_all_meshes(_dtypes, name, kind)
