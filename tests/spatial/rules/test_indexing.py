"""Slices, selects, chunks, flips, writes into slices."""

import numpy as np
import torch
from torch import Tensor

from tests.spatial.cases import Case, as_in_one_process, one


def written(x: Tensor, column: Tensor, row: Tensor) -> Tensor:
    x = x * 1
    x[:, 0] = 3
    x[:, 1:, 2:5, 1:] = column[:, :, None]
    x[..., 4, 2:7] = row
    x[1, :, -3:] = -1
    return x


def weighted(x: Tensor) -> Tensor:
    """A whole map of weights by what the split one holds."""
    weights = torch.ones(x.shape, dtype=x.dtype)
    weights[x > 0.5] = 3.0
    weights[:, 1][x[:, 0] < 0] = torch.tensor(0.5, dtype=x.dtype)
    weights[..., 2] = (x[..., 2] > 0).long()
    return weights


def written_mask(x: Tensor) -> Tensor:
    """What queries see of tokens, written behind prefix tokens of a mask that is whole."""
    n, c, h, w = x.shape
    mask = torch.ones(n, c + 1, 2 + h * w, dtype=torch.bool)
    mask[:, :c, 2:] = x.flatten(2) > 0
    mask[:, :, 2 : 2 + w][x[:, :1, 0].expand(-1, c + 1, -1) > 1] = x.flatten()[0] > 9
    return mask[:, :c, 2:]


def written_at_sequences(x: Tensor) -> Tensor:
    x = x * 1
    x[[slice(None), 1, slice(2, 5)]] = 3
    x[:, (3, 0), 1:3] = torch.tensor([1.0, 2.0], dtype=x.dtype)[:, None, None]
    x[range(1, -1, -1), 2, 4] = torch.tensor([[4.0], [5.0]], dtype=x.dtype)
    return x


CASES: dict[str, Case] = {
    "slice every third": one(lambda x: x[:, 1:, 2:-1:3, 1::2]),
    "slice a few columns": one(lambda x: x[..., :2] * 3),
    "select a column": one(lambda x: x[..., 5] + x[..., -1]),
    "index channels": one(lambda x: x[:, [2, 0]] + x[:, torch.tensor([1, 1])]),
    "index by arrays": one(
        lambda x: [x[:, np.array([2, 0])], x[[np.int64(1), np.int64(0)]], x[np.arange(8).reshape(2, 4) % 3 > 0], x[[]]]
    ),
    "index by a list that stands for a tuple": one(
        lambda x: [x[[slice(None), slice(1, 3), 2]], x[[None, 0]], x[[..., 3]], x[[[1, 0], [3, 2]]], x[[0, [1, 1]]]]
    ),
    "index by tuples and ranges": one(
        lambda x: [x[(1, 0),], x[range(1, -1, -1)], x[:, (3, 1, 2, 0)], x[:, range(3, 0, -1)]]
    ),
    "write at a list that stands for a tuple, and at ranges": one(written_at_sequences),
    "split and chunk": one(lambda x: [t.sin() for t in (*x.chunk(2, 1), *x.split(7, 3))]),
    "flip": one(lambda x: x.flip(2, 3) - x),
    "write into slices": Case(written, whole=((3, 1), (5,))),
    "keywords": one(
        lambda x: [torch.sum(input=x, dim=1), torch.gather(x, dim=1, index=x.argmax(dim=1, keepdim=True)),
                   torch.flip(x, dims=[3]), torch.matmul(x, other=x.transpose(2, 3)), x.new_zeros((2, 2))]
    ),
    "a whole map that takes numbers at split masks": one(lambda x: x * weighted(x)),
    "a whole mask that takes split values": one(lambda x: x.flatten(2) * written_mask(x)),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)
