"""Histograms, counts and different values of whole tensors."""

import torch
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, Op, aminmax, as_in_one_process, one, raised
from tests.spatial.sent import bytes_sent
from tests.spatial.values import as_in_torch

EDGES = torch.tensor([-2.0, -0.5, 0.1, 3.0], dtype=torch.float64)


def labels(x: Tensor) -> Tensor:
    return (x.detach() * 3).abs().long()


def constant(op: Op) -> Op:
    """Torch has no gradient of it."""
    return lambda x: op(x.detach())


CASES: dict[str, Case] = {
    "histc": one(lambda x: [x.histc(), x.histc(7, -1, 2), torch.histc(x.sign().abs(), 3), x[0, 0].histc(5, 1, max=1)]),
    "histogram": one(constant(lambda x: [
        *x.histogram(9), *x.histogram(4, range=(-1.0, 0.5)), *x.histogram(EDGES, density=True),
        *torch.histogram(x, 5, weight=x.exp(), density=True)])),
    "bincount": one(lambda x: [labels(x).flatten().bincount(), labels(x).flatten().bincount(minlength=40),
                               torch.bincount(labels(x).flatten(), x.detach().flatten()),
                               torch.bincount(labels(x)[0, 0].flatten(), labels(x)[1, 0].flatten(), 3)]),
    "unique": one(constant(lambda x: [
        x.unique(), *torch.unique(labels(x), return_inverse=True, return_counts=True),
        *torch.unique(x.round(), return_counts=True), labels(x)[0, 0].unique(sorted=False),
        *labels(x).flatten(1).unique(return_inverse=True)])),
    "unique_consecutive": one(constant(lambda x: [
        x.sign().unique_consecutive(), *(x.sign() > 9).unique_consecutive(return_counts=True),
        *torch.unique_consecutive(labels(x) // 2, return_inverse=True, return_counts=True)])),
    "count_nonzero": one(lambda x: [labels(x).count_nonzero(), labels(x).count_nonzero((0, 3)), *aminmax(x, dim=2)]),
    "unique slices": one(lambda x: [
        p for t, d in ((labels(x)[0, 0] % 2, 0), (labels(x)[0, 0] % 2, 1), (labels(x)[:, :2].flatten(2).mT, 1),
                       (labels(x)[0, 0, 0], 0), (labels(x).round(), 1))
        for p in t.unique(return_inverse=True, return_counts=True, dim=d)]),
}  # fmt: skip
OVER_FLOATS: dict[str, Op] = {
    "counts": lambda x: [x.histc(5, -1, 1), x.detach().histogram(EDGES).hist, x.count_nonzero(), x.count_nonzero(3)],
    "unique": constant(lambda x: [*x.unique(return_inverse=True, return_counts=True),
                                  *x.unique_consecutive(return_inverse=True, return_counts=True)]),
}  # fmt: skip
INTEGERS: dict[str, Op] = {
    "counts": lambda x: [x.flatten().bincount(), x.count_nonzero(2)] if x.dtype == torch.uint8 else [],
    "unique": lambda x: [*x.unique(return_inverse=True, return_counts=True),
                         *x.unique_consecutive(return_inverse=True, return_counts=True)],
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)
test_unusual_values_and_dtypes_as_in_torch = as_in_torch(__name__, OVER_FLOATS, {}, INTEGERS)


def _refusals(split: bool) -> list[str]:
    x = torch.arange(96.0).view(1, 2, 6, 8)
    x = ff.shard(x, mesh(1, 2)) if split else x
    return raised((
        lambda: x.long().flatten().sub(4).bincount(), lambda: x.flatten().bincount(), lambda: x.long().bincount(),
        lambda: x.long().flatten().bincount(x.flatten()[1:]), lambda: x.long().flatten().bincount(minlength=-1),
        lambda: (x / 0).histc(3), lambda: x.histc(3, 2, 1), lambda: x.long().histc(3), lambda: (x / 0).histogram(3),
        lambda: x.histc(0), lambda: x.histogram(3, weight=x[..., 1:]),
        lambda: x.requires_grad_().histogram(3).hist.sum().backward(), lambda: x.unique().sum().backward(),
        lambda: x.unique_consecutive().sum().backward(),
    ))  # fmt: skip


def test_what_torch_refuses_is_refused_on_all_ranks() -> None:
    assert rank_group(2).run(_refusals, True) == [_refusals(False)] * 2


def _sent() -> list[int]:
    x = torch.randn(4, 100, 200, generator=torch.Generator().manual_seed(1))
    few = labels(x)
    return [
        bytes_sent(op, value)[0]
        for op, value in (
            (lambda x: x.histc(50), x), (lambda x: x.flatten().bincount(), few),
            (lambda x: x.unique(return_inverse=True, return_counts=True)[0], few),
        )
    ]  # fmt: skip


def test_counts_are_sent_and_no_map() -> None:
    for sent in rank_group(2).run(_sent):
        assert max(sent) < 2000
