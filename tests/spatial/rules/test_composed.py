"""Functions that stand for others, and writing at index tensors along whole dims, against one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.exactness import differences
from tests.rank_group import rank_group

MESHES = [(1, 2), (2, 1), (2, 2), (1, 3)]

CASES: dict[str, Callable[[Tensor], Any]] = {
    "hsplit": lambda x: torch.hsplit(x, 2),
    "vsplit": lambda x: x.vsplit(2),
    "dsplit": lambda x: torch.dsplit(x, [2, 5]),
    "vstack": lambda x: torch.vstack([x, x.sin()]),
    "hstack": lambda x: torch.hstack([x, x[:, :1]]),
    "dstack": lambda x: torch.dstack([x[0, 0], x[0, 1]]),
    "column_stack": lambda x: torch.column_stack([x[0, 0], x[0, 1]]),
    "atleast_3d": lambda x: torch.atleast_3d(x[0, 0] * 2),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x[:1, :, :1]),
    "sum_to_size": lambda x: x.sum_to_size(4, x.shape[2], 1) * 2,
    "rot90": lambda x: torch.rot90(x, -1, (2, 3)),
    "rot90 thrice": lambda x: x.rot90(3, (-1, -2)),
    "tril": lambda x: torch.tril(x, -1),
    "triu in place": lambda x: (x * 2).triu_(3),
    "cross": lambda x: torch.cross(x[:, :3], x[:, 1:].sin(), dim=1),
    "linalg.cross": lambda x: torch.linalg.cross(x[:1, :3], x[:, 1:], dim=1),
    "complex": lambda x: torch.view_as_real(torch.complex(x, x.cos())),
    "polar": lambda x: torch.view_as_real(torch.polar(x.abs() + 1, x)),
    "view_as_complex": lambda x: torch.view_as_complex(torch.stack([x, x.cos()], -1)).abs(),
    "frexp": lambda x: torch.frexp(x)[0],
    "isin": lambda x: torch.isin((x * 3).round(), torch.tensor([1.0, -2.0], dtype=x.dtype)),
    "bucketize": lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5, dtype=x.dtype), right=True),
    "permute_copy": lambda x: torch.permute_copy(x, (0, 2, 3, 1)),
    "unbind_copy": lambda x: torch.unbind_copy(x, 1),
    "unsafe_chunk": lambda x: torch.unsafe_chunk(x, 3, 3),
    "one hot by scatter": lambda x: torch.zeros_like(x).scatter_(1, _labels(x), 1.0),
    "scatter into a whole map": lambda x: torch.zeros(x.shape, dtype=x.dtype).scatter(1, _labels(x), 1.0),
    "scatter of a source": lambda x: x.scatter(1, _labels(x), x[:, :1] * 3),
    "scatter_add": lambda x: x.scatter_add(1, _labels(x), x[:, 1:2]),
    "scatter_reduce": lambda x: x.scatter_reduce(1, _labels(x), x[:, 1:2], "amax"),
    "index_add": lambda x: x.index_add(1, torch.tensor([2, 0]), x[:, :2].sin(), alpha=2),
    "index_copy": lambda x: (x * 1).index_copy_(1, torch.tensor([2, 0]), x[:, :2].sin()),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([2, 0]), 7.0),
}


def _labels(x: Tensor) -> Tensor:
    return (x[:, :1].detach().abs() * 5).long() % 4


def _image() -> Tensor:
    return torch.randn(2, 4, 7, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def _worst(name: str, height: int, width: int) -> float:
    return max(differences(CASES[name], [_image()], [], height, width).values())


@pytest.mark.parametrize(("height", "width"), MESHES)
def test_split_as_whole(height: int, width: int) -> None:
    for name in CASES:
        found = rank_group(height * width).run(_worst, name, height, width)
        assert max(found) < 1e-12, (name, found)
