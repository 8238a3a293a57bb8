"""Reductions: each rank reduces its part, then the ranks along the reduced split dims combine."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.geometry.placement import Placements
from fullframe.spatial.exchange import maximum, sum_over_ranks
from fullframe.spatial.rules.registry import Refused, rule
from fullframe.spatial.tensor import Layout, SpatialTensor, gather_axes, local_of, wrap

Dims = int | Sequence[int] | None


def dims_of(layout: Layout, dim: Dims) -> tuple[int, ...]:
    """`dim` as torch's reductions take it, as non-negative dims; None and () mean all."""
    count = len(layout.shape)
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(count))
    return tuple(d % count for d in ((dim,) if isinstance(dim, int) else dim))


def without(layout: Layout, dims: tuple[int, ...], keepdim: bool) -> Layout:
    """The layout of a result in which `dims` are reduced."""
    kept = [d for d in range(len(layout.shape)) if d not in dims]
    if keepdim:
        shape = [1 if d in dims else size for d, size in enumerate(layout.shape)]
        placements: Placements = tuple(p for p in layout.placements if p.dim not in dims)
    else:
        shape = [layout.shape[d] for d in kept]
        placements = tuple(p.at(kept.index(p.dim)) for p in layout.placements if p.dim not in dims)
    return layout.with_(shape, placements)


def reduced_axes(layout: Layout, dims: tuple[int, ...]) -> tuple[str, ...]:
    """The mesh axes over which a reduction over `dims` must combine."""
    return tuple(p.axis for p in layout.placements if p.dim in dims)


def _combined(local: Tensor, layout: Layout, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    axes = reduced_axes(layout, dims)
    total = sum_over_ranks(local, layout.spatial.group(axes)) if axes else local
    return wrap(total, without(layout, dims, keepdim))


@rule(torch.sum, Tensor.sum, torch.nansum, Tensor.nansum)
def _sum(func: Any, x: SpatialTensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = dims_of(x._layout, dim)
    return _combined(func(local_of(x), dims, keepdim, dtype=dtype), x._layout, dims, keepdim)


@rule(torch.count_nonzero, Tensor.count_nonzero)
def _count_nonzero(func: Any, x: SpatialTensor, dim: Dims = None) -> Tensor:
    dims = dims_of(x._layout, dim)
    return _combined(func(local_of(x), dims), x._layout, dims, False)


@rule(torch.mean, Tensor.mean)
def _mean(func: Any, x: SpatialTensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = dims_of(x._layout, dim)
    local = local_of(x)
    share = count(local.shape, dims) / count(x._layout.shape, dims)  # of the elements; a sum could overflow in fp16
    mine = func(local, dims, keepdim, dtype=dtype)
    return _combined(mine * share if share != 1 else mine, x._layout, dims, keepdim)


def count(shape: Sequence[int], dims: Sequence[int]) -> int:
    """Elements that a reduction of a tensor of this shape over `dims` combines."""
    return math.prod(shape[d] for d in dims)


@rule(torch.amax, Tensor.amax, torch.amin, Tensor.amin)
def _extreme(func: Any, x: SpatialTensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    layout, dims = x._layout, dims_of(x._layout, dim)
    axes = reduced_axes(layout, dims)
    if not axes:
        return wrap(func(local_of(x), dims, keepdim), without(layout, dims, keepdim))
    local = local_of(x)
    best = func(local.detach(), dims, True)
    group = layout.spatial.group(axes)
    largest = func in (torch.amax, Tensor.amax)
    best = maximum(best, group) if largest else -maximum(-best, group)
    value = best
    if local.requires_grad and torch.is_grad_enabled():  # torch shares the gradient evenly among equal extremes
        hits = (local == best).to(local.dtype)
        ties = sum_over_ranks(hits.sum(dims, True), group)
        value = sum_over_ranks((local * (hits / ties)).sum(dims, True), group)
        value = value + (best - value).detach()
    if not keepdim:
        value = value.flatten() if len(dims) == value.dim() else value.squeeze(dims)
        value = value.reshape(()) if len(dims) == len(layout.shape) else value
    return wrap(value, without(layout, dims, keepdim))


@rule(torch.max, Tensor.max, torch.min, Tensor.min)
def _max(func: Any, x: Any, other: Any = None, keepdim: bool = False, *, dim: int | None = None) -> Any:
    largest = func in (torch.max, Tensor.max)
    if isinstance(other, Tensor):
        return torch.maximum(x, other) if largest else torch.minimum(x, other)
    dim = other if dim is None else dim
    if dim is None:
        return torch.amax(x, ()) if largest else torch.amin(x, ())
    layout, dims = x._layout, dims_of(x._layout, dim)
    merged = [p.axis for p in layout.placements if p.dim == dims[0] and not p.is_plain]
    if merged:  # their rows are not in order on the ranks
        return func(wrap(*gather_axes(local_of(x), layout, merged)), dim, keepdim)
    placement, local, result = layout.of(dim), local_of(x), without(layout, dims, keepdim)
    if placement is None:
        found = func(local, dim, keepdim)
        return type(found)([wrap(found.values, result), wrap(found.indices, result)])
    found = func(local, dim, True)
    start = placement.extents.ranges[layout.spatial.axis(placement.axis).part].start
    values = by_rank(found.values, x, placement.axis)  # (ranks, ..., 1, ...)
    indices = by_rank(found.indices + start, x, placement.axis)
    best = func(values, 0, True).indices  # the first among equals, as in one process
    chosen = [t.gather(0, best).squeeze(0) for t in (values, indices)]
    return type(found)([wrap(t if keepdim else t.squeeze(dim), result) for t in chosen])


def by_rank(local: Tensor, x: SpatialTensor, axis: str) -> Tensor:
    """`local` of every rank along a mesh axis, stacked in a new first dim; differentiable."""
    where = x._layout.spatial.axis(axis)
    mine = torch.zeros(where.size, dtype=local.dtype, device=local.device)
    mine[where.part] = 1
    return sum_over_ranks(local * mine.view(-1, *(1,) * local.dim()), where.group)


@rule(torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin)
def _index(func: Any, x: SpatialTensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    largest = func in (torch.argmax, Tensor.argmax)
    flat = x if dim is not None else x.flatten()
    found = (torch.max if largest else torch.min)(flat.detach(), 0 if dim is None else dim, keepdim)
    return found.indices


@rule(torch.any, Tensor.any, torch.all, Tensor.all)
def _any(func: Any, x: SpatialTensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    dims, any_ = dims_of(x._layout, dim), func in (torch.any, Tensor.any)
    x = x != 0  # type: ignore[assignment]
    if not any_:
        x = torch.logical_not(x)  # type: ignore[assignment]
    found = torch.sum(x, dims, keepdim) > 0
    return found if any_ else torch.logical_not(found)


@rule(torch.var, Tensor.var, torch.std, Tensor.std, torch.var_mean, torch.std_mean)
def _variance(
    func: Any, x: SpatialTensor, dim: Any = None, unbiased: Any = None, keepdim: bool = False, *, correction: Any = None
) -> Any:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if correction is None:
        correction = 1 if unbiased is None or unbiased else 0
    dims = dims_of(x._layout, dim)
    mean = torch.mean(x, dims, True)
    squares = torch.square(x - mean)
    result = torch.sum(squares, dims, keepdim) / max(count(x._layout.shape, dims) - correction, 0)
    if func in (torch.std, Tensor.std, torch.std_mean):
        result = torch.sqrt(result)
    if func in (torch.var_mean, torch.std_mean):
        return result, mean if keepdim else torch.mean(x, dims, False)
    return result


@rule(torch.norm, Tensor.norm)
def _norm(
    func: Any,
    x: SpatialTensor,
    p: Any = "fro",
    dim: Dims = None,
    keepdim: bool = False,
    out: Any = None,
    dtype: Any = None,
) -> Tensor:
    if out is not None or p == "nuc":
        raise Refused(f"norm with p={p!r} and out={out is not None} is not split")
    order = 2.0 if p in ("fro", None) else float(p)
    return torch.linalg.vector_norm(x, order, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]


@rule(torch.linalg.vector_norm)
def _vector_norm(
    func: Any, x: SpatialTensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Tensor:
    layout, dims = x._layout, dims_of(x._layout, dim)
    if not reduced_axes(layout, dims):
        return wrap(func(local_of(x), ord, dims, keepdim, dtype=dtype), without(layout, dims, keepdim))
    size = torch.abs(x if dtype is None else x.to(dtype))
    if ord in (math.inf, -math.inf):
        return torch.amax(size, dims, keepdim) if ord > 0 else torch.amin(size, dims, keepdim)
    if ord == 0:
        return torch.sum((size != 0).to(size.dtype), dims, keepdim)
    if ord == 1:
        return torch.sum(size, dims, keepdim)
    total = torch.sum(size**ord, dims, keepdim)
    empty = total == 0  # the root has no slope there; torch gives gradient 0
    return torch.where(empty, torch.zeros_like(total), torch.where(empty, torch.ones_like(total), total) ** (1 / ord))


@rule(torch.dist, Tensor.dist)
def _dist(func: Any, x: Tensor, other: Tensor, p: float = 2) -> Tensor:
    return torch.linalg.vector_norm(x - other, p)  # type: ignore[no-any-return]


@rule(torch.logsumexp, Tensor.logsumexp, torch.special.logsumexp)
def _logsumexp(func: Any, x: SpatialTensor, dim: Dims, keepdim: bool = False) -> Tensor:
    layout, dims = x._layout, dims_of(x._layout, dim)
    if not reduced_axes(layout, dims):
        return wrap(func(local_of(x), dims, keepdim), without(layout, dims, keepdim))
    top = torch.amax(x.detach(), dims, True)
    top = torch.where(torch.isfinite(top), top, torch.zeros_like(top))
    total = torch.log(torch.sum(torch.exp(x - top), dims, True)) + top
    return total if keepdim else torch.sum(total, dims)


@rule(torch.prod, Tensor.prod)
def _prod(func: Any, x: SpatialTensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    dims = tuple(reversed(dims_of(x._layout, dim)))
    result: Tensor = x if dtype is None else x.to(dtype)
    for each in dims:
        result = _prod_of_dim(result, each)
    return result if keepdim else result.squeeze(dims)


def _prod_of_dim(x: Tensor, dim: int) -> Tensor:
    if not isinstance(x, SpatialTensor):
        return x.prod(dim, keepdim=True)
    local = local_of(x).prod(dim, keepdim=True)
    for axis in reduced_axes(x._layout, (dim,)):
        local = by_rank(local, x, axis).prod(0)
    return wrap(local, without(x._layout, (dim,), True))


@rule(torch.nanmean, Tensor.nanmean)
def _nanmean(func: Any, x: SpatialTensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    valid, dims = torch.logical_not(torch.isnan(x)), dims_of(x._layout, dim)
    return torch.nansum(x, dims, keepdim, dtype=dtype) / torch.sum(valid, dims, keepdim)


@rule(torch.aminmax, Tensor.aminmax)
def _aminmax(func: Any, x: SpatialTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    dims = dims_of(x._layout, dim)
    return torch.return_types.aminmax((torch.amin(x, dims, keepdim), torch.amax(x, dims, keepdim)))


@rule(torch.equal, Tensor.equal, torch.allclose, Tensor.allclose)
def _same(func: Any, x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> bool:
    if x.shape != y.shape:
        return False
    close = func in (torch.allclose, Tensor.allclose)
    alike = torch.isclose(x, y, *args, **kwargs) if close else x == y
    return bool(torch.all(alike))  # a whole value, equal on all ranks
