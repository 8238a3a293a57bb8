"""A backward pass that cannot be differentiated again says so."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fullframe.errors import GradientError
from fullframe.spatial.second_derivative import once_differentiable


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, unused: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient, None


def square(x: Tensor) -> Tensor:
    return _Square.apply(x, torch.zeros(1))


def test_the_first_derivative_is_there() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    for create_graph in (False, True):
        (gradient,) = torch.autograd.grad(square(x), x, create_graph=create_graph)
        assert gradient.item() == 6 and gradient.requires_grad == create_graph


@pytest.mark.parametrize("seed", [True, False], ids=["of what was saved", "of the seed"])
def test_the_second_is_refused_by_name(seed: bool) -> None:
    x = torch.tensor(3.0, requires_grad=True)
    v = torch.tensor(1.0, requires_grad=not seed)
    (gradient,) = torch.autograd.grad(square(x), x, v, create_graph=True)
    with pytest.raises(GradientError, match=r"a second derivative is asked for.* through Square"):
        gradient.backward()


def test_a_gradient_that_depends_on_nothing_more_is_plain() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    y = square(x)
    with torch.no_grad():
        (gradient,) = torch.autograd.grad(y, x)
    assert not gradient.requires_grad
