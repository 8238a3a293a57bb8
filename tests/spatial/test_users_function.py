"""Functions that users write with a backward of their own, on split tensors: the numbers of one process."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fullframe as ff
from fullframe.spatial.users_function import composed
from tests.collector import tensors_for_the_collector
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import MESHES, Case, as_in_one_process

Function: Any = torch.autograd.Function


class Swish(Function):
    """As image networks write it to save memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s * (1 + x * (1 - s)))


class GeometricMean(Function):
    """Two operands, and a result that is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        a, b = x.sigmoid(), y.sigmoid()
        z = (a * b).sqrt()
        ctx.save_for_backward(a, b, z)
        return z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        a, b, z = ctx.saved_tensors
        return gradient * z * (1 - a) / 2, gradient * z * (1 - b) / 2


class Depthwise(Function):
    """A convolution with whole weights, whose backward says which gradients are wanted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        return F.conv2d(x, weight, padding=1, groups=groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x = F.conv_transpose2d(gradient, weight, padding=1, groups=ctx.groups) if ctx.needs_input_grad[0] else None
        wide, (rows, columns) = F.pad(x, (1, 1, 1, 1)), x.shape[2:]
        read = [wide[:, :, i : i + rows, j : j + columns] for i in range(3) for j in range(3)]
        taps = [(part * gradient).sum((0, 2, 3)) for part in read]
        return of_x, torch.stack(taps, 1).view_as(weight), None


class Clipped(Function):
    """The gradient is bent: only one process's own gives one process's numbers. A sum goes with it, set up apart."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor, least: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        return x * scale, (x * x).sum(), x > least

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor, Tensor]) -> None:
        x, scale, _ = inputs
        ctx.save_for_backward(x, scale)
        ctx.mark_non_differentiable(output[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_sum: Tensor, _: Any) -> tuple[Tensor, Tensor, None]:
        x, scale = ctx.saved_tensors
        gradient = gradient.clamp(-0.1, 0.1)
        return gradient * scale + 2 * x * of_sum.clamp(max=0.3), (gradient * x).sum((0, 2, 3))[:, None, None], None


class Reversed(Function):
    """Its result is its operand; the gradient has a larger shape, which torch sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.stack([-ctx.factor * gradient, gradient.mean((2, 3), keepdim=True).expand_as(gradient)]), None


def clipped(x: Tensor, scale: Tensor) -> list[Tensor]:
    y, total, positive = Clipped.apply(x, scale)
    assert not positive.requires_grad
    return [(y * y).mean() + 0.01 * total, y * positive]


def twice(x: Tensor) -> Tensor:
    """The gradient of a gradient."""
    (first,) = torch.autograd.grad(Swish.apply(F.avg_pool2d(x, 3, 1, 1)).square().mean(), x, create_graph=True)
    return first.square().sum() * 1e3


CASES: dict[str, Case] = {
    "activation": Case(lambda x: F.max_pool2d(Swish.apply(F.avg_pool2d(x, 3, 2)), 2)),
    "two operands": Case(lambda x, y: GeometricMean.apply(x, y.flip(3)), ((2, 4), (2, 4))),
    "a whole operand": Case(lambda x, y: GeometricMean.apply(x, y.expand_as(x)), ((2, 4),), ((4, 1, 1),)),
    "with weights": Case(lambda x, w: Depthwise.apply(x, w, 4), ((2, 4),), ((4, 1, 3, 3),)),
    "several results": Case(clipped, ((2, 4),), ((4, 1, 1),)),
    "by name": Case(lambda x, scale: Clipped.apply(scale=scale, x=x)[0].square(), ((2, 4),), ((4, 1, 1),)),
    "its operand": Case(lambda x: Reversed.apply(x * 2, 0.3).square()),
    "recomputed": Case(lambda x: checkpoint(lambda t: Swish.apply(t).square(), x, use_reentrant=False)),
    "second derivative": Case(twice),
}

test_as_in_one_process = as_in_one_process(__name__, CASES)


class Few(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _kept(height: int, width: int) -> tuple[bool, int, str]:
    x = ff.shard(torch.ones(1, 2, 8, 12, dtype=torch.float64), mesh(height, width)).requires_grad_()

    def made() -> Any:
        y = composed(GeometricMean, (x * 1, x * 2))
        last = weakref.ref(y.local)
        y.sum().backward()
        return last

    gc.collect()
    gc.disable()
    try:
        alive = made()() is not None
    finally:
        gc.enable()
    with pytest.raises(RuntimeError) as raised:
        Few.apply(x, x).sum().backward()
    return alive, tensors_for_the_collector(made), str(raised.value)


@pytest.mark.parametrize(("height", "width"), MESHES[:2])
def test_what_it_saves_is_let_go_of_and_a_missing_gradient_is_said(height: int, width: int) -> None:
    for alive, left, said in rank_group(height * width).run(_kept, height, width):
        assert not alive and left == 0
        assert "incorrect number of gradients (expected 2, got 1)" in said
