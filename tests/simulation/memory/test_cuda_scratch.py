"""What torch's own CUDA kernels take for themselves: as its allocator counted it, in bytes an element."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fullframe.simulation.memory.cuda_scratch import cuda_scratch

aten = torch.ops.aten
X = torch.zeros(8, 16, 64)
LONG, ROWS = torch.zeros(10_000), torch.zeros(4, 5_000)
PLACES = torch.zeros(100, dtype=torch.int64)


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)


CASES: dict[str, tuple[Any, tuple[Any, ...], Any, int]] = {
    "softmax": (aten._softmax_backward_data.default, (X, X, -1, X.dtype), X, X.nbytes),
    "softmax in 16 bit": (aten._softmax_backward_data.default, (X.half(), X.half(), -1, torch.half), X, X.nbytes // 2),
    "softmax of 16 bit": (aten._softmax_backward_data.default, (X, X, -1, torch.half), X.half(), X.nbytes),
    "one long row": (aten.sort.default, (LONG,), pair(10_000), 20 * 10_000),
    "long rows": (aten.sort.default, (ROWS, -1, True), pair(4, 5_000), 32 * 20_000),
    "long rows in 16 bit": (aten.sort.stable, (ROWS.half(),), pair(4, 5_000), 28 * 20_000),
    "short rows": (aten.sort.default, (ROWS, 0), pair(4, 5_000), 0),
    "a number": (aten.sort.default, (torch.zeros(()),), pair(), 0),
    "many of a row": (aten.topk.default, (LONG, 5_000), pair(5_000), 32 * 5_000),
    "few of a row": (aten.topk.default, (LONG, 50), pair(50), 0),
    "median": (aten.median.default, (LONG,), LONG[0], 32 * 10_000),
    "truths added up": (aten.sum.default, (X > 0,), torch.tensor(0), 8 * X.numel()),
    "of each row": (aten.sum.dim_IntList, (X > 0, [1]), PLACES, 8 * X.numel()),
    "numbers added up": (aten.sum.default, (X,), X[0, 0, 0], 0),
    "16 bit to 32": (aten.sum.default, (X.half(), ), X[0, 0, 0], 0),
    "at a mask": (aten.index.Tensor, (X, [X > 0]), X.flatten(), 3 * 8 * X.numel()),
    "at places": (aten.index.Tensor, (LONG, [PLACES]), LONG[:100], 0),
    "added up at places": (aten._index_put_impl_.default, (LONG, [PLACES], LONG[:100], True), LONG, 48 * 100),
    "put at places": (aten.index_put_.default, (LONG, [PLACES], LONG[:100]), LONG, 0),
    "distances": (aten._cdist_backward.default, (X[..., :5], X, X[:, :5], 1.0, X[..., :5]), X, 5 * X.nbytes),
    "differing places": (aten._cdist_backward.default, (X[..., :5], X, X[:, :5], 0.0, X[..., :5]), X, 0),
    "distances within": (aten._pdist_backward.default, (LONG[:6], ROWS, 2.0, LONG[:6]), ROWS, 3 * ROWS.nbytes),
    "rows of a table": (aten.embedding_dense_backward.default, (X, PLACES, 9, -1, False), X, 48 * 100),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_scratch(name: str) -> None:
    func, args, out, bytes = CASES[name]
    assert cuda_scratch(func, args, out) == bytes
