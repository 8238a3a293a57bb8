"""Whole tables read by split indices, whole boundaries, whole sets."""

from unittest import mock

import pytest
import torch
from torch import Tensor

import fullframe as ff
from fullframe.spatial.rules import tables
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, as_in_one_process, small


def labels(x: Tensor, classes: int = 4) -> Tensor:
    """(N, H, W) classes, some of them counted from the end."""
    return (x[:, 0].detach() * 5).long() % classes - 2


def table(op, *shape: int) -> Case:  # type: ignore[no-untyped-def]
    return Case(op, whole=(shape,), sizes=((7, 11),))


def ordered(*shape: int) -> Tensor:
    return (
        torch.linspace(-2, 2, torch.Size(shape).numel(), dtype=torch.float64).view(*shape[1:], shape[0]).movedim(-1, 0)
    )


def argsort(x: Tensor) -> Tensor:
    """As a whole tensor."""
    return (x.full() if isinstance(x, ff.SpatialTensor) else x).argsort(-1)


CASES: dict[str, Case] = {
    "class weights": table(lambda x, w: w[labels(x)] * x[:, 1], 4),
    "rows of a table": table(lambda x, w: w[labels(x)].permute(0, 3, 1, 2) + x, 4, 4),
    "columns of a table": table(lambda x, w: w[:, labels(x)], 3, 4),
    "two split indices": table(lambda x, w: w[labels(x), labels(x[:, 1:])], 4, 4),
    "two apart": table(lambda x, w: w[labels(x), :, labels(x[:, 1:])], 4, 3, 4),
    "a split index beside a whole one": table(lambda x, w: w[torch.arange(2)[:, None, None], labels(x)], 2, 4),
    "a number, a slice, a new dim": table(lambda x, w: w[1, None, labels(x), 1:], 2, 4, 3),
    "rows by their numbers": table(lambda x, w: w.index_select(1, labels(x).flatten() % 4), 3, 4),
    "take": table(lambda x, w: torch.take(w, labels(x) + 5) + w.take(labels(x)), 3, 4),
    "gather from a table": table(lambda x, w: w.expand(2, 4, -1, -1).gather(1, (labels(x) % 4)[:, None]), 20, 64),
    "take_along_dim": table(lambda x, w: torch.take_along_dim(w, (labels(x) % 4)[:, None], 1), 1, 4, 1, 1),
    "searchsorted": small(lambda x: torch.searchsorted(torch.linspace(-2, 2, 5, dtype=x.dtype), x)),
    "searchsorted, a row of each": small(
        lambda x: torch.searchsorted(ordered(6, 2, 4, 7).permute(1, 2, 3, 0).contiguous(), x, right=True)
    ),
    "searchsorted by a sorter": small(
        lambda x: torch.searchsorted(torch.tensor([1.0, -1, 0], dtype=x.dtype), x, sorter=torch.tensor([1, 2, 0]))
    ),
    "searchsorted in split rows": small(
        lambda x: torch.searchsorted(x.permute(0, 2, 3, 1).sort(-1).values, x.permute(0, 2, 3, 1), side="right")
    ),
    "bucketize": small(lambda x: torch.bucketize(x, torch.linspace(-2, 2, 5, dtype=x.dtype), right=True)),
    "isin": small(lambda x: [torch.isin(labels(x), torch.tensor([1, -2])), torch.isin(labels(x), 1, invert=True)]),
    "isin a split set": small(lambda x: [torch.isin(torch.arange(-5, 5), labels(x)),
                                         torch.isin(torch.arange(-5, 5), labels(x), invert=True)]),
    "isin of split elements": small(lambda x: torch.isin(labels(x, 9), labels(x[:, :, :2, 1:4], 9)) * x[:, 0]),
    "searchsorted in rows split themselves": small(lambda x: [
        torch.searchsorted(x[0, 0, 0].sort().values, x.flatten(2)) * x.flatten(2),
        torch.searchsorted(x.sort(-1).values, x.sin(), right=True) * x,
        torch.searchsorted(x[0], x[0].sin(), sorter=x[0].argsort(-1)) * x,
        torch.searchsorted(x[0, 0], torch.zeros(x.shape[2], 2).to(x), sorter=argsort(x[0, 0])) + x.sum(),
        torch.bucketize(torch.tensor([0.1, 9.0]), x[0, 0, :, 0].sort().values) * x.sum()]),
    "bucketize by split boundaries": small(lambda x: torch.bucketize(x, x[0, 0, :, 1].sort().values) * x),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)


def _refused() -> int:
    rows = ff.shard(torch.arange(12.0).view(1, 1, 1, 12), mesh(1, 2))
    for call in (
        lambda: torch.searchsorted(rows, rows),
        lambda: torch.bucketize(rows, rows[0, 0, 0]),
    ):
        with pytest.raises(ff.UnsupportedOp), mock.patch.object(tables, "FEW", 0):
            call()
    return 1


def test_large_split_tables_are_refused_by_name() -> None:
    assert rank_group(2).run(_refused) == [1, 1]
