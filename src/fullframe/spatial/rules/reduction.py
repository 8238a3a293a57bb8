"""Reductions: each rank reduces its part, then the ranks along the reduced split dims combine.

Sixteen-bit values are reduced in 32 bits, as torch's kernels do, and rounded once, behind the last rank's share.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.geometry.placement import Placements
from fullframe.ranks.collectives import all_gather, all_sum, all_sum_no_grad
from fullframe.ranks.exchange import joined
from fullframe.spatial.redistribute import gather_axes
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap

Dims = int | Sequence[int] | None

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch's kernels add up values of `dtype`."""
    return _WIDE.get(dtype, dtype)


def dims_of(spec: Spec, dim: Dims) -> tuple[int, ...]:
    """`dim` as torch's reductions take it, as non-negative dims; None and () mean all."""
    count = len(spec.shape)
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return tuple(range(count))
    return tuple(d % count for d in ((dim,) if isinstance(dim, int) else dim))


def without(spec: Spec, dims: tuple[int, ...], keepdim: bool) -> Spec:
    """The spec of a result in which `dims` are reduced."""
    kept = [d for d in range(len(spec.shape)) if d not in dims]
    if keepdim:
        shape = [1 if d in dims else size for d, size in enumerate(spec.shape)]
        placements: Placements = tuple(p for p in spec.placements if p.dim not in dims)
    else:
        shape = [spec.shape[d] for d in kept]
        placements = tuple(p.at(kept.index(p.dim)) for p in spec.placements if p.dim not in dims)
    return spec.with_(shape, placements)


def reduced_axes(spec: Spec, dims: tuple[int, ...]) -> tuple[str, ...]:
    """The mesh axes over which a reduction over `dims` must combine."""
    return tuple(p.axis for p in spec.placements if p.dim in dims)


def count(shape: Sequence[int], dims: Sequence[int]) -> int:
    """Elements that a reduction of a tensor of this shape over `dims` combines."""
    return math.prod(shape[d] for d in dims)


def _total(func: Any, x: SpatialTensor, dims: tuple[int, ...], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """The sum of `func` (a sum) over all ranks, of at least 32 bits where values have fewer, on each of them."""
    spec, axes = x.spec, reduced_axes(x.spec, dims)
    mine = func(local_of(x), dims, keepdim, dtype=wide(dtype))
    if not axes:
        return mine  # type: ignore[no-any-return]
    if not (dtype.is_floating_point or dtype.is_complex):
        mine = mine.long()  # which every backend adds; it wraps like the shorter ones once it is cut
    return all_sum(mine, spec.spatial.group(axes))


def total_of(x: SpatialTensor, average: bool) -> Tensor:
    """The sum, or the mean, of all elements of floating point."""
    dims, dtype = tuple(range(len(x.spec.shape))), x._local.dtype
    total = _total(torch.sum, x, dims, False, dtype)
    return (total / math.prod(x.spec.shape) if average else total).to(dtype)


@rule(torch.sum, Tensor.sum, torch.nansum, Tensor.nansum)
def _sum(func: Any, x: SpatialTensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """Each rank adds up its part, then the ranks do; of at least 32 bits until the end."""
    spec, dims = x.spec, dims_of(x.spec, dim)
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
    return wrap(_total(func, x, dims, keepdim, dtype).to(dtype), without(spec, dims, keepdim))


@rule(torch.count_nonzero, Tensor.count_nonzero)
def _count_nonzero(func: Any, x: SpatialTensor, dim: Dims = None) -> Tensor:
    """The number of elements that are not zero, over all ranks."""
    return torch.sum(x != 0, dims_of(x.spec, dim))


@rule(torch.mean, Tensor.mean)
def _mean(func: Any, x: SpatialTensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The sum over all ranks divided by the number of elements in the whole tensor."""
    spec, dims = x.spec, dims_of(x.spec, dim)
    out = dtype or x.dtype
    if not reduced_axes(spec, dims) or not (out.is_floating_point or out.is_complex):  # torch refuses integers
        return wrap(func(local_of(x), dims, keepdim, dtype=dtype), without(spec, dims, keepdim))
    mean = _total(torch.sum, x, dims, keepdim, out) / count(spec.shape, dims)
    return wrap(mean.to(out), without(spec, dims, keepdim))


@rule(torch.nanmean, Tensor.nanmean)
def _nanmean(func: Any, x: SpatialTensor, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The sum of what is not NaN over the number of such elements."""
    valid, dims = torch.logical_not(torch.isnan(x)), dims_of(x.spec, dim)
    return torch.nansum(x, dims, keepdim, dtype=dtype) / torch.sum(valid, dims, keepdim)


@rule(torch.any, Tensor.any, torch._is_any_true, torch.all, Tensor.all, torch._is_all_true)
def _any(func: Any, x: SpatialTensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Whether any, or all, elements of the whole tensor are true."""
    dims, any_ = dims_of(x.spec, dim), func in (torch.any, Tensor.any, torch._is_any_true)
    hits = torch.sum(x != 0 if any_ else x == 0, dims, keepdim)
    found = hits > 0 if any_ else hits == 0
    return found.to(torch.uint8) if x.dtype == torch.uint8 else found


@rule(torch.prod, Tensor.prod)
def _prod(func: Any, x: SpatialTensor, dim: int | None = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """The dims are gathered where a gradient is wanted: around zeros it needs the product of all others."""
    spec, dims = x.spec, dims_of(x.spec, dim)
    axes, local, result = reduced_axes(spec, dims), local_of(x), without(spec, dims, keepdim)
    over = () if dim is None else (dim, keepdim)
    differentiable = local.requires_grad and torch.is_grad_enabled()
    if differentiable:
        local, spec = gather_axes(local, spec, axes)
    if differentiable and spec.placements:
        spec.require_filled()
        return wrap(_prod_beside_zeros(func, local, spec, over, dtype), result)
    if differentiable or not axes:
        return wrap(func(local, *over, dtype=dtype), result)
    out = dtype or (x.dtype if x.is_floating_point() or x.is_complex() else torch.int64)
    everyone = all_gather(func(local, *over, dtype=wide(out)), spec.spatial.group(axes))
    return wrap(torch.prod(everyone, 0, dtype=out if out == torch.bool else None).to(out), result)


def _prod_beside_zeros(func: Any, local: Tensor, spec: Spec, over: tuple[Any, ...], dtype: Any) -> Tensor:
    """The product over a dim that is whole, as in torch, which takes another way to the gradient where the tensor holds
    a zero anywhere: a row is put beside the local part, of zeros where any rank has one, else of ones.
    """
    row = spec.placements[0].dim
    zeros = all_sum_no_grad((local.detach() == 0).any().int(), spec.group)
    beside = torch.ones_like(local.narrow(row, 0, 1), requires_grad=False).masked_fill(zeros > 0, 0)
    made = func(joined([local, beside], row), *over, dtype=dtype)
    kept = row - (over[0] % local.dim() < row and not over[1])
    return made.narrow(kept, 0, local.shape[row])  # type: ignore[no-any-return]


@rule(torch.equal, Tensor.equal)
def _equal(func: Any, x: Tensor, y: Tensor) -> bool:
    """One Python bool, the same on all ranks."""
    return x.shape == y.shape and bool(torch.all(x == y))  # a whole value, equal on all ranks


@rule(torch.allclose, Tensor.allclose)
def _allclose(func: Any, x: Tensor, y: Tensor, *args: Any, **kwargs: Any) -> bool:
    """One Python bool, the same on all ranks."""
    return bool(torch.all(torch.isclose(x, y, *args, **kwargs)))
