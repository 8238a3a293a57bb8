"""Sums and slopes along a dim of values that stand at places: the trapezoidal rule, differences."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.spatial.rules.registry import Unsupported, rule


def _pairs(y: Tensor, dim: int) -> Tensor:
    """The sums of neighbours."""
    rows = y.shape[dim] - 1
    return y.narrow(dim, 1, rows) + y.narrow(dim, 0, rows)


def _steps(y: Tensor, x: Tensor, dim: int) -> Tensor:
    """The distances between the places `x` of `y` along `dim`."""
    if x.dim() == 1 and y.dim() > 1:
        return x.diff().view(-1, *(1,) * (y.dim() - 1 - dim % y.dim()))
    if x.dim() < y.dim():
        x = x.reshape(*(1,) * (y.dim() - x.dim()), *x.shape)
    return x.diff(dim=dim)


@rule(torch.trapezoid, torch.trapz)
def _trapezoid(func: Any, y: Tensor, x: Tensor | None = None, *, dx: float = 1.0, dim: int = -1) -> Tensor:
    """The integral along a dim, of values at even distances or at the places `x`."""
    if x is not None:
        return (_pairs(y, dim) * _steps(y, x, dim)).sum(dim) / 2.0
    if y.shape[dim] == 0:
        return y.sum(dim) * 1.0
    ends = y.select(dim, 0) + y.select(dim, -1)
    integral: Tensor = (y.sum(dim) - ends * 0.5) * dx
    return integral


@rule(torch.cumulative_trapezoid)
def _cumulative_trapezoid(func: Any, y: Tensor, x: Tensor | None = None, *, dx: float = 1.0, dim: int = -1) -> Tensor:
    """The integral along a dim up to each place but the first."""
    if x is None:
        return _pairs(y, dim).cumsum(dim) * (dx / 2.0)
    return (_pairs(y, dim) * _steps(y, x, dim)).cumsum(dim) / 2.0


@rule(torch.gradient)
def _gradient(func: Any, x: Tensor, *, spacing: Any = None, dim: Any = None, edge_order: int = 1) -> Any:
    """The slope along each dim at even distances; refuses coordinates."""
    dims: Sequence[int] = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    steps = [1.0 if spacing is None else spacing] * len(dims) if spacing is None or _number(spacing) else spacing
    if not all(map(_number, steps)):
        raise Unsupported("the spacing is given by coordinates", "Give the distance between neighbours.")
    return tuple(_slope(x, step, d, edge_order) for d, step in zip(dims, steps, strict=True))


def _number(value: Any) -> bool:
    return isinstance(value, int | float | complex)


def _slope(x: Tensor, step: Any, dim: int, edge_order: int) -> Tensor:
    """Half the difference of the neighbours, and at the edges an estimate of this order."""
    size = x.shape[dim]
    inner = (x.narrow(dim, 2, size - 2) - x.narrow(dim, 0, size - 2)) / (step * 2.0)

    def difference(row: int) -> Tensor:
        slope: Tensor = (x.narrow(dim, row + 1, 1) - x.narrow(dim, row, 1)) / step
        return slope

    first, last = difference(0), difference(size - 2)
    if edge_order == 2:
        first, last = first - 0.5 * (difference(1) - first), last + 0.5 * (last - difference(size - 3))
    return torch.cat([first, inner, last], dim)


@rule(Tensor.renorm_)
def _renorm_in_place(func: Any, x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """`renorm` of a copy: its gradient needs what was there."""
    return x.copy_(torch.renorm(x.clone(), p, dim, maxnorm))


@rule(torch.renorm, Tensor.renorm)
def _renorm(func: Any, x: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Each slice of a dim made no longer than `maxnorm`."""
    over = [d for d in range(x.dim()) if d != dim % x.dim()]
    long = torch.linalg.vector_norm(x.detach(), p, over, True) > maxnorm
    norm = torch.linalg.vector_norm(torch.where(long, x, 1.0), p, over, True)  # no slope of what stays as it is
    return x * torch.where(long, maxnorm / (norm + 1e-7), 1.0)
