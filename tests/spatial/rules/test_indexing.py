"""Slices, selects, chunks, flips, writes into slices."""

import numpy as np
import torch
from torch import Tensor

import fullframe as ff
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Case, as_in_one_process, one
from tests.spatial.traffic import bytes_of_messages


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


def written_tokens(x: Tensor, row: Tensor) -> list[Tensor]:
    """Slices of maps whose pixels are one dim, of which each rank holds several runs."""
    by_channel, by_pixel = x.flatten(2) * 1, x.flatten(2).mT.contiguous()
    by_channel[:, 1] = 3
    by_channel[:, 2:] = row
    by_channel[0, 0] = row
    by_pixel[..., -1] = row
    by_pixel[1:] = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype) * row[0]
    by_channel[:, 0, 5:29] = -1
    return [by_channel, by_pixel]


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
    "write into slices of tokens": Case(written_tokens, whole=((77,),), sizes=((7, 11),)),
    "keywords": one(
        lambda x: [torch.sum(input=x, dim=1), torch.gather(x, dim=1, index=x.argmax(dim=1, keepdim=True)),
                   torch.flip(x, dims=[3]), torch.matmul(x, other=x.transpose(2, 3)), x.new_zeros((2, 2))]
    ),
    "a whole map that takes numbers at split masks": one(lambda x: x * weighted(x)),
    "a whole mask that takes split values": one(lambda x: x.flatten(2) * written_mask(x)),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)


def _sent_for_tokens() -> list[int]:
    x = ff.shard(torch.ones(2, 3, 24, 36), mesh(1, 2)).flatten(2)
    y = x.mT * 1
    return [bytes_of_messages(lambda t=t, at=at: t.__setitem__(at, 0)) for t, at in ((x, (slice(None), 1)), (y, 0))]  # type: ignore[misc]


def test_a_write_to_all_pixels_of_a_channel_sends_nothing() -> None:
    assert rank_group(2).run(_sent_for_tokens) == [[0, 0], [0, 0]]
