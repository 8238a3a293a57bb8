"""Transposed convolutions: without a batch dim, of complex numbers, and with infinities beside the ranks' borders."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.exactness import differences
from tests.rank_group import rank_group

OPTIONS = ((0, 1, 2, 1), (1, 1, 2, 1), (2, 0, 1, 2), (1, 2, 3, 1), (0, 4, 5, 1))  # padding, extra, stride, dilation


def drawn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def as_real(op: Callable[..., Tensor], *given: Tensor) -> Tensor:
    out = op(*given)
    return torch.view_as_real(out) if out.is_complex() else out


def largest_differences(height: int, width: int) -> dict[str, float]:
    found = {}
    for padding, extra, stride, dilation in OPTIONS:
        op = partial(F.conv_transpose2d, padding=padding, output_padding=extra, stride=stride, dilation=dilation)
        inputs = {"unbatched": drawn(3, 7, 8), "complex": drawn(1, 3, 7, 8, dtype=torch.complex128)}
        for column in range(8):
            inputs[f"infinity at {column}"] = drawn(1, 3, 7, 8)
            inputs[f"infinity at {column}"][0, 1, 3, column] = math.inf
        for name, x in inputs.items():
            weight = drawn(3, 4, 3, 3, dtype=x.dtype)
            apart = differences(partial(as_real, op), [x], [weight], height, width)
            found[f"{name}, {padding} {extra} {stride} {dilation}"] = max(apart.values())
    return found


@pytest.mark.parametrize(("height", "width"), [(1, 2), (2, 1), (1, 3)])
def test_numbers_are_one_processs(height: int, width: int) -> None:
    for found in rank_group(height * width).run(largest_differences, height, width):
        assert {name: apart for name, apart in found.items() if not apart < 1e-9} == {}
