"""Which spec several operands get."""

import warnings

import pytest
import torch

import fullframe as ff
from fullframe.errors import MeshError
from fullframe.ranks.mesh import init_mesh, spatial_of
from fullframe.spatial.operands import aligned, alike, merged, require_one_mesh, shells_in, united
from fullframe.spatial.tensor import wrap
from tests.exactness import mesh, relative
from tests.rank_group import rank_group
from tests.spatial.fake import on_height, on_width, spatial, spec
from tests.spatial.sent import elements_sent

EVEN, LEFT = (0, 3, 6), (0, 2, 6)


def test_the_largest_operand_decides_and_the_shape_is_broadcast() -> None:
    with spatial(1, 2) as on:
        large = wrap(torch.zeros(4, 3), spec(on, (4, 6), on_width(EVEN, 1)))
        row = wrap(torch.zeros(2), spec(on, (6,), on_width(LEFT, 0)))
        deep = torch.zeros(5, 1, 1)
        assert merged([row, large]) is large.spec
        assert merged([large, torch.zeros(6)]) is large.spec
        both = merged([row, large, deep])
        assert both.shape == (5, 4, 6) and both.placements == (on_width(EVEN, 2),)


def test_operands_split_along_different_dims_are_united() -> None:
    rows, columns = on_height(EVEN, 0), on_width(EVEN, 1)
    assert united([[columns], [rows]]) == (rows, columns)
    assert united([[columns], [on_width(LEFT, 0)]]) == (columns,)  # the first that is split over an axis decides
    assert united([[columns], [on_height(EVEN, 1)]]) == (columns,)  # and over a dim


def test_alike_at_whatever_boundaries() -> None:
    assert alike(on_width(EVEN, 1), on_width(LEFT, 1))
    assert not alike(on_width(EVEN, 1), on_width(EVEN, 0))
    assert not alike(on_width(EVEN, 1), on_width((0, 3, 7), 1))
    assert not alike(on_width(EVEN, 1, outer=2), on_width(EVEN, 1, inner=2))


def test_a_whole_operand_is_cut_where_the_spec_is() -> None:
    with spatial(1, 2, rank=1) as on:
        wanted = spec(on, (2, 6), on_width(LEFT, 1))
        whole = torch.arange(12).view(2, 6)
        assert torch.equal(aligned(whole, wanted), whole[:, 2:])
        assert torch.equal(aligned(whole[0], wanted), whole[0, 2:])
        assert aligned(whole[:, :1], wanted).shape == (2, 1)
        number = torch.tensor(3)
        assert aligned(number, wanted) is number
        shell = wrap(whole[:, 2:], wanted)
        assert torch.equal(aligned(shell, wanted), whole[:, 2:])
        assert list(shells_in([shell, {"a": number}], 3)) == [shell]


def _turned(height: int, width: int) -> tuple[int, float, float]:
    """What `x * x.mT` sends, and how far it and its gradient are off; no warning is given."""
    whole = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, split = (whole.clone().requires_grad_() for _ in range(2))
    shell = ff.shard(split, mesh(height, width))
    (expected := x * x.mT * 2).sin().sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sent = elements_sent(lambda: shell * shell.mT)
        (got := shell * shell.mT + shell.mT * shell).sin().sum().backward()
    assert isinstance(got, ff.SpatialTensor) and x.grad is not None and split.grad is not None
    return sent, relative(expected, got.full()), relative(x.grad, split.grad)


def test_a_split_that_meets_another_dims_changes_dims_and_is_not_gathered() -> None:
    for height, width in ((1, 2), (2, 1), (1, 3)):
        ranks = height * width
        for sent, *errors in rank_group(ranks).run(_turned, height, width):
            assert sent == 2 * 3 * 12 * 12 * (ranks - 1) // ranks**2, sent
            assert max(errors) < 1e-12


def test_tensors_of_two_meshes_do_not_meet() -> None:
    with spatial(1, 2) as wide:
        first = spec(wide, (2, 6), on_width(EVEN, 1))
        second = spec(spatial_of(init_mesh(2, 1)), (6, 2), on_height(EVEN, 0))
        require_one_mesh(first, first)
        with pytest.raises(MeshError, match=r"height 1 x width 2 and height 2 x width 1"):
            require_one_mesh(first, second)


def _of_sparse() -> list[str]:
    """What becomes of calls of a split map and a sparse matrix: their refusals, or "" where they are exact."""
    x, found = torch.arange(48.0).view(6, 8), []
    coo = torch.eye(6).to_sparse()
    for call in (
        lambda x: coo @ x,
        lambda x: torch.mm(coo, x),
        lambda x: torch.eye(8).to_sparse() @ x.mT,
        lambda x: torch.mv(torch.ones(4, 48).to_sparse(), x.flatten()),
        lambda x: torch.sparse.mm(coo, x),
        lambda x: torch.bmm(torch.stack([coo, coo]), torch.stack([x, x])),
        lambda x: coo.to_sparse_csr() @ x,
        lambda x: coo * x[:, :6],
        lambda x: coo.clone().requires_grad_() @ x,
    ):
        for split in (ff.shard(x, mesh(1, 2)), ff.shard(x, mesh(1, 2)) * 1):
            try:
                found.append("" if torch.equal(ff.full(call(split)), call(x)) else "other numbers")
            except ff.UnsupportedOp as refusal:
                found.append(refusal.reason)
    return found


def test_sparse_operands_are_multiplied_by_whole_or_refused_by_name() -> None:
    for found in rank_group(2).run(_of_sparse):
        assert found[:4] == [""] * 4 and all("sparse" in reason for reason in found[4:])
