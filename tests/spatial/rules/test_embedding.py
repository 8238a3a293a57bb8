"""Tables that are looked up by split indices, and classes spread out."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Op
from tests.spatial.values import SHAPE, found, on_all_meshes, scores

TABLES: dict[str, Op] = {
    "one_hot": lambda x, w: [F.one_hot(_indices(x), 6), F.one_hot(_indices(x))],
    "embedding by frequency": lambda x, w: F.embedding(_indices(x), w, padding_idx=-2, scale_grad_by_freq=True),
    "embedding of a largest norm": lambda x, w: _shortened(_indices(x), w.detach().clone()),
}


def _indices(x: Tensor) -> Tensor:
    return (x[:, 0].detach().abs() * 7).long() % 5


def _shortened(indices: Tensor, table: Tensor) -> list[Tensor]:
    return [F.embedding(indices, table, max_norm=0.5, norm_type=3), table]


def _looked_up(name: str, world: int) -> list[str]:
    return found({name: (TABLES[name], [scores(*SHAPE)], [scores(5, 4)])}, 1e-12, world)


@pytest.mark.parametrize("name", TABLES)
def test_rows_and_their_gradients(name: str) -> None:
    assert not on_all_meshes(_looked_up, name)


def _refused() -> int:
    split = ff.shard(torch.ones(1, 1, 3, 4), mesh(1, 2))
    with pytest.raises(ff.UnsupportedOp):
        F.embedding(torch.ones(2).long(), split[0, 0])
    return 1


def test_a_split_table_is_refused_by_name() -> None:
    assert rank_group(2).run(_refused) == [1, 1]


def _sparse() -> list[tuple[Tensor, Tensor]]:
    """Rows and gradients of a criterion's table, by `backward` and by `autograd.grad`, whole and split."""
    x, found = scores(*SHAPE), []
    for split in (False, True):
        table = torch.nn.Parameter(scores(5, 4))
        rows = F.embedding(_indices(ff.shard(x, mesh(1, 2)) if split else x), table, padding_idx=1, sparse=True)
        (asked,) = torch.autograd.grad(rows.sin().sum(), table, retain_graph=True)
        rows.sin().sum().backward()
        assert table.grad is not None and table.grad.is_sparse
        found += [(g.coalesce().indices(), g.to_dense()) for g in (asked, table.grad)]
    return found


def test_sparse_gradients_are_sparse_and_have_the_rows_that_any_rank_looked_up() -> None:
    for asked, added, *there in rank_group(2).run(_sparse):
        for (rows, gradient), (rows_there, gradient_there) in zip((asked, added), there, strict=True):
            assert torch.equal(rows, rows_there)
            torch.testing.assert_close(gradient, gradient_there, rtol=1e-12, atol=1e-12)
