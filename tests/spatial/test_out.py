"""What `out=` takes, and what it refuses as torch or by name."""

import numpy as np
import pytest
import torch

import fullframe as ff
from fullframe.errors import UnsupportedOp
from fullframe.spatial.out import into
from fullframe.spatial.rules.registry import Unsupported
from tests.exactness import mesh
from tests.rank_group import rank_group


def test_the_result_is_written_into_the_target() -> None:
    target = torch.zeros(3)
    assert into(target, torch.ones(3), torch.add) is target and target.sum() == 3
    values, indices = torch.zeros(2), torch.zeros(2, dtype=torch.long)
    found = into((values, indices), torch.tensor([[1.0, 2.0], [4.0, 3.0]]).max(1), torch.max)
    assert found.values is values and values.tolist() == [2, 4] and indices.tolist() == [1, 0]


def test_another_shape_or_dtype_is_refused() -> None:
    for target in (torch.zeros(4), torch.zeros(3, dtype=torch.float64)):
        with pytest.raises(Unsupported, match="out= "):
            into(target, torch.ones(3), torch.add)
    with pytest.raises(RuntimeError, match="can't be cast"):
        into(torch.zeros(3, dtype=torch.long), torch.ones(3), torch.add)


def _of_whole_and_split() -> None:
    x = ff.shard(torch.zeros(1, 2, 4, 7), mesh(1, 2))
    y = ff.shard(torch.ones(1, 2, 4, 7), mesh(1, 2))
    columns = torch.arange(7.0)
    assert torch.add(columns, torch.ones(4, 1), out=x[0, 1]).shape == (4, 7)  # neither operand is split
    assert torch.equal(x.full()[0, 1], (columns + 1).expand(4, 7)) and not x.full()[0, 0].any()
    assert torch.clamp(y * columns, 0, 3, out=x) is x
    assert torch.equal(x.full(), columns.clamp(0, 3).expand(1, 2, 4, 7))


def test_a_split_target_takes_whole_and_split_results() -> None:
    rank_group(2).run(_of_whole_and_split)


def _of_whole_views() -> None:
    x = torch.rand(2, 4, 7, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    split = ff.shard(x, mesh(1, 2)) * 1
    row, expected = split[..., 3], x[..., 3].clone()  # one column is whole, and a view of what is split
    target = torch.zeros(2, 4, 7, dtype=torch.float64)
    assert torch.add(row, 1, out=target) is target and torch.equal(target, expected + 1)
    largest = torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 4, dtype=torch.long)
    torch.max(row, 2, out=largest)
    assert torch.equal(largest[0], expected.max(2).values) and torch.equal(largest[1], expected.max(2).indices)
    assert torch.equal(row[np.array([1, 0])], expected[[1, 0]])  # of which no facts are known
    assert torch.mul(expected, 3.0, out=row) is row and torch.equal(split.full()[..., 3], expected * 3)
    other = split[..., 5]
    assert torch.mul(row, 2.0, out=other) is other and torch.equal(split.full()[..., 5], expected * 6)
    ends = split[..., 0, 5], split[..., 0, 6]
    with pytest.raises(UnsupportedOp, match="it writes into several tensors, of which some are views"):
        torch.aminmax(row, dim=2, out=ends)
    largest = split[..., 0, 5], torch.zeros(2, 4, dtype=torch.long)
    torch.max(row, 2, out=largest)
    assert torch.equal(split.full()[..., 0, 5], (expected * 3).max(2).values)
    row[np.int64(1)].fill_(5.0)
    assert split.full()[1, :, :, 3].eq(5).all() and torch.equal(split.full()[0, :, :, 3], expected[0] * 3)


def test_whole_views_are_read_and_written() -> None:
    rank_group(2).run(_of_whole_views)
