"""A message and its adjoint are each other's backward; a constant that the message adds is in no derivative."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fullframe.errors import UnsupportedOp
from fullframe.ranks.adjoint import applied, linear, unrecorded


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


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return factor * x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 3 * ctx.factor * x**2 * gradient, None


def test_applied_is_apply() -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    cube = applied(_Cube)
    assert cube(x, 2.0).equal(_Cube.apply(x, 2.0))
    assert torch.autograd.gradgradcheck(lambda x: cube(x, 2.0), x)


def test_applied_is_refused_under_transforms() -> None:
    cube = applied(_Cube)
    with pytest.raises(UnsupportedOp, match=r"torch\.func.*Use torch\.autograd\.grad"):
        torch.func.grad(lambda x: cube(x, 2.0).sum())(torch.randn(3))


def test_what_is_unrecorded_has_no_graph_and_counts_writes() -> None:
    weight, buffer = torch.randn(3, requires_grad=True), torch.zeros(3)

    @unrecorded
    def step(values: Tensor) -> Tensor:
        """Words."""
        with torch.enable_grad():
            result = values * weight
        buffer.add_(result)
        buffer[1:].mul_(2)
        return result

    before = buffer._version
    assert not step(torch.ones(3)).requires_grad and not buffer.requires_grad
    assert buffer._version == before + 2, "written twice, once through a view"
    assert (weight * 1).requires_grad and step.__doc__ == "Words."
    with pytest.raises(RuntimeError, match="must match"):
        step(torch.ones(4))
    assert (weight * 1).requires_grad, "after an error too"
