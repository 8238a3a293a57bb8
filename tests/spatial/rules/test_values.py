"""Lists and numpy arrays of small split tensors."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fullframe as ff
from fullframe.spatial.tensor import wrap
from tests.exactness import mesh
from tests.rank_group import rank_group


def _given(height: int, width: int) -> int:
    on = mesh(height, width)
    for whole in (torch.arange(60.0).view(1, 1, 5, 12), torch.arange(21).view(1, 3, 7), torch.zeros(1, 0, 7, 9)):
        x = ff.shard(whole, on)
        assert x.tolist() == whole.tolist()
        assert x.cpu().numpy().dtype == whole.numpy().dtype
        assert np.array_equal(x.numpy(), whole.numpy())
        assert np.array_equal(np.asarray(x), whole.numpy())
        assert np.asarray(x, dtype=np.float32).dtype == np.float32
        assert np.array_equal(x[..., 1:].mT.numpy(), whole[..., 1:].mT.numpy())
    x = ff.shard(torch.arange(60.0).view(1, 1, 5, 12), on).requires_grad_()
    assert x.tolist() == torch.arange(60.0).view(1, 1, 5, 12).tolist()
    for call in (x.numpy, lambda: np.asarray(x)):
        with pytest.raises(RuntimeError, match="requires grad"):
            call()
    return 1


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 2), (1, 3)], ids=str)
def test_small_tensors_are_given_whole(shape: tuple[int, int]) -> None:
    ranks = shape[0] * shape[1]
    assert rank_group(ranks).run(_given, *shape) == [1] * ranks


def _sizes() -> int:
    x = ff.shard(torch.arange(60.0).view(1, 1, 5, 12), mesh(1, 2))
    for part in (x, x[..., 1:].mT, x.flatten(1)):
        sizes = torch._shape_as_tensor(part)
        assert type(sizes) is torch.Tensor and sizes.dtype == torch.int64 and sizes.tolist() == list(part.shape)
    return 1


def test_sizes_are_those_of_the_whole() -> None:
    assert rank_group(2).run(_sizes) == [1, 1]


def _refused() -> int:
    x = ff.shard(torch.zeros(1, 2, 200, 300), mesh(1, 2))
    for call in (x.tolist, x.numpy, lambda: np.asarray(x)):
        with pytest.raises(ff.UnsupportedOp, match="120,000 split numbers"):
            call()
    small = x[..., :4].numpy()
    with pytest.raises(ValueError, match="read-only"):
        small[0] = 1
    return 1


def test_large_ones_are_refused_and_none_can_be_written_to() -> None:
    assert rank_group(2).run(_refused) == [1, 1]


def _simulated() -> int:
    split = ff.shard(torch.zeros(1, 1, 4, 8), mesh(1, 2))
    with FakeTensorMode():
        x = wrap(torch.zeros(1, 1, 4, 4), split.spec)
        with pytest.raises(ff.UnsupportedOp, match="simulation"):
            x.tolist()
    return 1


def test_a_simulation_says_that_it_has_no_values() -> None:
    assert rank_group(2).run(_simulated) == [1, 1]


def _as_python() -> int:
    whole = torch.arange(60.0).view(3, 1, 4, 5)
    x = ff.shard(whole, mesh(1, 2))
    assert f"{x}" == str(x) and "(3, 1, 4, 5)" in f"{x}"
    with pytest.raises(TypeError, match="format string"):
        f"{x:.2f}"
    assert 59 in x and torch.tensor(0.0) in x and 60.5 not in x and x in x
    with pytest.raises(ff.UnsupportedOp, match="from_numpy"):
        x == np.ones(5)  # noqa: B015
    first, *others = reversed(x)
    assert torch.equal(first.full(), whole[2]) and len(others) == 2
    return 1


def test_text_in_and_reversed() -> None:
    assert rank_group(2).run(_as_python) == [1, 1]
