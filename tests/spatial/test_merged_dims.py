"""Dims merged from split and other dims, in whatever order, under functions that need their elements' places."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fullframe as ff
from fullframe.errors import UnsupportedOp
from tests.exactness import differences, mesh
from tests.rank_group import rank_group
from tests.spatial.rules.test_masks import FOLLOWERS

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows by columns": lambda x: x[0, 0].flatten(),
    "columns by rows": lambda x: x[0, 0].t().flatten(),
    "columns, rows, channels": lambda x: x[0].permute(2, 1, 0).flatten(),
}
AT = torch.tensor([2, 1, 4])
MORE: dict[str, Callable[[Tensor], Any]] = {
    "bincount": lambda p: torch.bincount((p * 9).long()),
    "weighted": lambda p: torch.bincount((p * 9).long(), p.detach()),
    "histc": lambda p: p.detach().histc(5), "bucketize": lambda p: torch.bucketize(p, AT.sort().values / 5),
    "table": lambda p: torch.arange(10.0)[(p * 9).long()] * p, "outer": lambda p: torch.outer(p, p)[3],
    "kron": lambda p: torch.kron(p[:4], p[:3]), "half the largest": lambda p: p.topk(p.numel() // 2).values,
    "pool": lambda p: F.max_pool1d(p[None, None], 3, return_indices=True), "glu": lambda p: F.glu(p[:40], 0),
    "unpool": lambda p: F.max_unpool1d(*F.max_pool1d(p[None, None], 2, return_indices=True), 2),
    "cosine_similarity": lambda p: F.cosine_similarity(p, p.sin(), 0), "rfft": lambda p: torch.fft.rfft(p).abs(),
    "local_response_norm": lambda p: F.local_response_norm(p[None, :, None], 3),
    "shift": lambda p: torch.fft.fftshift(p),
    "cross_entropy": lambda p: F.cross_entropy(p[None], AT[:1]), "triu": lambda p: p.view(1, -1).triu(2),
    "slice_scatter": lambda p: torch.slice_scatter(p, p.new_ones(4), 0, 2, 6),
    "renorm": lambda p: p[None].renorm(2, 1, 0.3),
    "scatter_add": lambda p: p.new_zeros(5).scatter_add(0, (p.detach() * 4).long(), p), "masked": lambda p: p[p > 0.5],
    "index_put": lambda p: p.new_zeros(5).index_put(((p.detach() * 4).long(),), p, accumulate=True),
    "places": lambda p: p[torch.where(p > 0.5)], "gather by itself": lambda p: p.gather(0, (p.detach() * 4).long()),
    "embedding": lambda p: F.embedding((p.detach() * 4).long(), torch.eye(5).double()) * p[:, None],
}  # fmt: skip
FUNCTIONS = {name: op for family in (*FOLLOWERS.values(), MORE) for name, op in family.items()}


def _differences(height: int, width: int) -> dict[tuple[str, str], Any]:
    x = torch.rand(2, 3, 9, 14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found: dict[tuple[str, str], Any] = {}
    for form, merge in FORMS.items():
        for name, op in FUNCTIONS.items():

            def run(x: Tensor, op: Any = op, merge: Any = merge) -> list[Tensor]:  # numbers are compared as well
                results = tree_leaves(op(merge(x)))
                return [t if t.is_floating_point() and t.requires_grad else t * x.sum() for t in results]

            try:
                found[form, name] = max(differences(run, [x], [], height, width).values())
            except UnsupportedOp as refused:
                found[form, name] = str(refused)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("height", "width"), [(1, 2), (2, 2)])
def test_places_in_merged_dims(height: int, width: int) -> None:
    for found in rank_group(height * width).run(_differences, height, width, timeout_seconds=250):
        wrong = {key: error for key, error in found.items() if isinstance(error, str) or not error <= 1e-9}
        assert not wrong, wrong


def _written_in_place() -> None:
    """A function in place that runs on a copy in runs of rows returns what it was given, and writes to its base."""
    x = torch.rand(1, 2, 9, 14, dtype=torch.float64)
    split = ff.shard(x, mesh(1, 2)) * 1
    rows = split[0, 0].flatten().view(1, -1)
    expected = x[0, 0].reshape(1, -1).triu_(5)
    assert rows.triu_(5) is rows
    assert torch.equal(split.full()[0, 0].view(1, -1), expected) and torch.equal(split.full()[0, 1], x[0, 1])


def test_what_is_written_in_place_is_returned() -> None:
    rank_group(2).run(_written_in_place)
