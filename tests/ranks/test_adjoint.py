"""A message and its adjoint are each other's backward; a constant that the message adds is in no derivative."""

import torch
from torch import Tensor

from fullframe.ranks.adjoint import linear


def _padded(rows: Tensor, fill: float = 0.0) -> Tensor:
    return torch.cat([rows, rows.new_full((2,), fill)])


def _cropped(rows: Tensor) -> Tensor:
    return rows[:-2].clone()


def test_derivatives_of_any_order_are_messages_without_the_constant() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def of(value: Tensor) -> Tensor:
        return linear(value, lambda rows: _padded(rows, fill=7.0), _cropped, again=_padded) ** 3

    assert of(x)[3:].tolist() == [343.0, 343.0]
    assert torch.autograd.gradcheck(of, x) and torch.autograd.gradgradcheck(of, x)
