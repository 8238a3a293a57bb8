"""The largest, the smallest, the sum or the mean of what split values scatter into a whole tensor: superpixels, say.

Each rank takes its own, the ranks' are put together. Ties share the gradient as in torch.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks.collectives import all_gather_no_grad, all_sum, all_sum_no_grad
from fullframe.spatial.operands import aligned, merged


class Reduction(NamedTuple):
    """The arguments of `scatter_reduce` after its source, by their names there."""

    reduce: str
    include_self: bool = True


def extremes_at(x: Tensor, dim: int, index: Tensor, src: Tensor, how: Reduction) -> Tensor:
    """`scatter_reduce` by "amax" or "amin" into a whole `x`, of an index or a source that is split along `dim`."""
    *parts, group = own_part(x, dim, index, src)
    found: Tensor = _ExtremesAt.apply(x, dim, *parts, how, group)  # type: ignore[no-untyped-call]
    return found


def sums_at(x: Tensor, dim: int, index: Tensor, src: Tensor, how: Reduction) -> Tensor:
    """`scatter_reduce` by "sum", or by "mean" into a whole `x` of floating numbers, else as `extremes_at`."""
    index, src, group = own_part(x, dim, index, src)
    zeros = x.new_zeros(x.shape)
    total = all_sum(zeros.scatter_add(dim, index, src), group)
    if how.reduce == "sum" and how.include_self:
        return x + total
    count = all_sum_no_grad(zeros.scatter_add(dim, index, torch.ones_like(src)), group)
    if how.include_self:
        return (x + total) / (count + 1)
    return torch.where(count > 0, total if how.reduce == "sum" else total / count.clamp(min=1), x)


def own_part(x: Tensor, dim: int, index: Tensor, src: Tensor) -> tuple[Tensor, Tensor, dist.ProcessGroup]:
    """This rank's part of an index and its source that are split along `dim`, and who has the others."""
    src = src[tuple(map(slice, index.shape))]
    spec = merged([index, src])
    spec.require_whole("along other dims the index is split too", *(d for d in range(x.dim()) if d != dim))
    return aligned(index, spec), aligned(src, spec), spec.group


class _ExtremesAt(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dim: int, index: Tensor, src: Tensor, how: Reduction, group: dist.ProcessGroup
    ) -> Tensor:
        way, includes_self = how
        compare, of_two = (torch.amax, torch.maximum) if way == "amax" else (torch.amin, torch.minimum)
        mine = torch.full_like(x, _worst(x.dtype, way)).scatter_reduce(dim, index, src, way)
        total = compare(all_gather_no_grad(mine, group), 0)
        hit = torch.zeros_like(x, dtype=torch.int32).scatter_add(dim, index, torch.ones_like(index, dtype=torch.int32))
        hit = all_sum_no_grad(hit, group) > 0
        found = torch.where(hit, of_two(x, total) if includes_self else total, x)
        if any(ctx.needs_input_grad):
            own, others = x == found, src == found.gather(dim, index)
            count = own.to(x.dtype) + all_sum_no_grad(
                torch.zeros_like(x).scatter_add(dim, index, others.to(x.dtype)), group
            )
            ctx.save_for_backward(own if includes_self else own & ~hit, others, index, count)
            ctx.where = dim, group
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (own, others, index, count), (dim, group) = ctx.saved_tensors, ctx.where
        of_source = None
        if ctx.needs_input_grad[3]:
            of_source = others * (all_sum(gradient, group) / count).gather(dim, index)
        return own * (gradient / count), None, None, of_source, None, None


def _worst(dtype: torch.dtype, way: str) -> Any:
    """What any value is better than."""
    if dtype.is_floating_point:
        return -torch.inf if way == "amax" else torch.inf
    if dtype is torch.bool:
        return way != "amax"
    return torch.iinfo(dtype).min if way == "amax" else torch.iinfo(dtype).max
