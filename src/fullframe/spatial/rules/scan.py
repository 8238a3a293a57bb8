"""Running sums, products and extremes, differences of neighbours and areas, along a split dim too.

Sums are exact in parts. For the others torch's kernel gets whole rows, as its numbers depend on the order.
"""

from typing import Any

import torch
from torch import Tensor

from fullframe.ranks.collectives import all_gather, all_sum_no_grad
from fullframe.ranks.exchange import joined
from fullframe.spatial.rules.reduction import wide
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap
from fullframe.spatial.whole_rows import sent_home, whole_rows


@rule(torch.cumsum, Tensor.cumsum)
def _cumsum(func: Any, x: SpatialTensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Each rank sums up its rows, then adds the totals of the ranks before it."""
    spec = x.spec
    placement = spec.of(dim)
    if placement is None:
        return wrap(func(local_of(x), dim, dtype=dtype), spec)
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
    axis = spec.spatial.axis(placement.axis)
    local = func(local_of(x).to(wide(dtype)), dim, dtype=wide(dtype))  # so that its backward adds up as widely
    totals = all_gather(local.narrow(dim, local.shape[dim] - 1, 1), axis.group)
    # The first rank adds up none, and so takes part in backward.
    before = totals[: axis.coordinate].sum(0, dtype=local.dtype)
    return wrap((local + before).to(dtype), spec)


@rule(Tensor.cumsum_, Tensor.cumprod_)
def _in_place(func: Any, x: SpatialTensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Written over `x`, whose dtype stays."""
    return x.copy_((torch.cumsum if func is Tensor.cumsum_ else torch.cumprod)(x, dim, dtype=x.dtype))


@rule(*(torch.cummax, Tensor.cummax, torch.cummin, Tensor.cummin, torch.logcumsumexp, Tensor.logcumsumexp))
def _in_whole_rows(func: Any, x: SpatialTensor, dim: int) -> Any:
    """The largest, or smallest, so far with its number in the whole tensor; the logarithm of the sum of powers."""
    spec, rows = x.spec, whole_rows(local_of(x), x.spec, dim)
    count = len(rows)
    if not count:  # of no rows torch's gradient is a constant, and this rank would not take part in its gradient
        rows = joined([rows, rows.sum(0, keepdim=True, dtype=rows.dtype)], 0)
    found = func(rows, -1)
    if isinstance(found, Tensor):
        return wrap(sent_home(found[:count], spec, dim), spec)
    return type(found)([wrap(sent_home(part[:count], spec, dim), spec) for part in found])


@rule(torch.cumprod, Tensor.cumprod)
def _cumprod(func: Any, x: SpatialTensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Running products. Torch takes another way to the gradient where the tensor holds a zero anywhere.

    So a row is put below those of this rank, of zeros where any rank has one, else of ones.
    """
    spec, local = x.spec, local_of(x)
    rows = whole_rows(local if dtype is None else local.to(dtype), spec, dim)
    count = len(rows)
    if rows.requires_grad:
        zeros = (rows.detach() == 0).any().int()
        zeros = all_sum_no_grad(zeros, spec.group)
        below = torch.ones_like(rows[0:1] if count else rows.sum(0, keepdim=True), requires_grad=False)
        rows = joined([rows, below.masked_fill(zeros > 0, 0)], 0)
    return wrap(sent_home(func(rows, -1, dtype=dtype)[:count], spec, dim), spec)


@rule(torch.diff, Tensor.diff)
def _diff(func: Any, x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """Differences of neighbouring rows, `n` times over."""
    if n and (prepend is not None or append is not None):
        x = torch.cat([t for t in (prepend, x, append) if t is not None], dim)
    result: Tensor = x
    for _ in range(min(n, x.shape[dim])):
        later, earlier = _neighbours(result, dim)
        result = later ^ earlier if result.dtype == torch.bool else later - earlier
    return result


def _neighbours(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """All rows but the first, and all but the last."""
    rows = x.shape[dim] - 1
    return torch.narrow(x, dim, 1, rows), torch.narrow(x, dim, 0, rows)
