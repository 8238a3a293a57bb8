"""Largest and smallest values and where they stand: each rank finds its own, all ranks' are gathered and compared.

They are compared by torch's own function, so that NaN wins, and ties and signed zeros are decided as it decides them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks.collectives import all_gather, all_gather_no_grad, all_sum
from fullframe.spatial.rules.reduction import Dims, dims_of, reduced_axes, without
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap
from fullframe.spatial.whole_rows import numbered


class _Extreme(torch.autograd.Function):
    """Largest or smallest elements over `dims` (kept as 1; None: all) and over ranks; ties share the gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, func: Any, dims: tuple[int, ...] | None, group: dist.ProcessGroup) -> Tensor:
        over: Any = () if dims is None else (dims, True)
        found: Tensor = func(all_gather_no_grad(func(local, *over), group), *(() if dims is None else (0,)))
        ctx.save_for_backward(local, found)
        ctx.where = dims, group
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (local, found), (dims, group) = ctx.saved_tensors, ctx.where
        gradient, hits = all_sum(gradient, group), local == found
        if dims is None:  # torch.max gives it to the NaNs that won, torch.amax makes all of it NaN
            hits = hits | (local.isnan() & found.isnan())
            return torch.where(hits, gradient / all_sum(hits.sum(), group), 0), None, None, None
        return gradient * hits / all_sum(hits.sum(dims, True), group), None, None, None


def _extreme(func: Any, x: SpatialTensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    spec, result, axes = x.spec, without(x.spec, dims, keepdim), reduced_axes(x.spec, dims)
    if not axes:
        return wrap(func(local_of(x), dims, keepdim), result)
    spec.require_filled()
    found = _Extreme.apply(local_of(x), func, dims, spec.spatial.group(axes))  # type: ignore[no-untyped-call]
    return wrap(found if keepdim else found.squeeze(dims), result)


@rule(torch.amax, Tensor.amax, torch.amin, Tensor.amin)
def _amax(func: Any, x: SpatialTensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    """The largest, or smallest, elements over dims and ranks; ties share the gradient."""
    func = torch.amax if func in (torch.amax, Tensor.amax) else torch.amin
    return _extreme(func, x, dims_of(x.spec, dim), keepdim)


@rule(torch.aminmax, Tensor.aminmax)
def _aminmax(func: Any, x: SpatialTensor, *, dim: int | None = None, keepdim: bool = False) -> Any:
    """Smallest and largest elements over one dim or all."""
    dims = dims_of(x.spec, dim)
    return torch.return_types.aminmax((_extreme(torch.amin, x, dims, keepdim), _extreme(torch.amax, x, dims, keepdim)))


@rule(torch.max, Tensor.max, torch.min, Tensor.min)
def _max(func: Any, x: Any, other: Any = None, keepdim: bool = False, *, dim: int | None = None) -> Any:
    """Of two tensors element by element; of one over all elements, or along a dim with the global indices."""
    largest = func in (torch.max, Tensor.max)
    if isinstance(other, Tensor):
        return torch.maximum(x, other) if largest else torch.minimum(x, other)
    dim = other if dim is None else dim
    if dim is None:
        x.spec.require_filled()
        group = x.spec.group
        return _Extreme.apply(local_of(x), torch.max if largest else torch.min, None, group)  # type: ignore[no-untyped-call]
    return _max_along(func, x, dim, keepdim)


def _max_along(func: Any, x: SpatialTensor, dim: int, keepdim: bool) -> Any:
    """Values and indices along a dim."""
    spec, local, dims = x.spec, local_of(x), dims_of(x.spec, dim)
    result, axes = without(spec, dims, keepdim), reduced_axes(spec, dims)
    if not axes:
        found = func(local, dim, keepdim)
        return type(found)([wrap(found.values, result), wrap(found.indices, result)])
    spec.require_filled()
    found, group = func(local, dim, True), spec.spatial.group(axes)
    values = all_gather(found.values, group)  # (ranks, ..., 1, ...)
    indices = all_gather_no_grad(numbered(found.indices, spec, dim), group)
    if not all(p.is_plain for p in spec.placements if p.dim in dims):  # the ranks' rows lie between each other
        indices, order = indices.sort(0)
        values = values.gather(0, order)
    best = func(values.detach(), 0, True).indices  # the first among equals, as in one process
    chosen = [t.gather(0, best).squeeze(0) for t in (values, indices)]
    return type(found)([wrap(t if keepdim else t.squeeze(dim), result) for t in chosen])


@rule(torch.argmax, Tensor.argmax, torch.argmin, Tensor.argmin)
def _index(func: Any, x: SpatialTensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the largest, or smallest, element lies in the whole tensor, or along a dim of it."""
    best = torch.max if func in (torch.argmax, Tensor.argmax) else torch.min
    if dim is not None:
        return best(x.detach(), dim, keepdim).indices
    found = _first(func, best, x.spec, local_of(x).detach())
    return found.reshape((1,) * x.dim()) if keepdim else found


def _first(func: Any, best: Any, spec: Spec, local: Tensor) -> Tensor:
    """The number of the best element in the whole tensor's order; the first among equals."""
    spec.require_filled()
    group = spec.group
    place = func(local)  # never on the host, which would have to wait for the device
    mine, left, step = torch.zeros_like(place), place, 1
    for dim in range(local.dim() - 1, -1, -1):
        mine = mine + numbered(left % local.shape[dim], spec, dim) * step
        left, step = left // local.shape[dim], step * spec.shape[dim]
    values, numbers = all_gather_no_grad(local.take(place), group), all_gather_no_grad(mine, group)
    top = best(values, 0).values
    ties = (values == top) | (values.isnan() & top.isnan())
    return torch.where(ties, numbers, torch.Size(spec.shape).numel()).amin()
