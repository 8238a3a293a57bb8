"""Medians, quantiles, k-th and most frequent values: along a split dim torch's kernel gets whole rows.

The median of all elements is found digit by digit: the ranks add up how many of theirs begin so, 256 counts at a time.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks.adjoint import linear
from fullframe.ranks.collectives import all_sum_no_grad
from fullframe.spatial.operands import has_values
from fullframe.spatial.rules.reduction import without
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap
from fullframe.spatial.whole_rows import everywhere, picked, whole_rows

_DIGIT = 8  # bits
_SIGN = -(2**63)


@rule(torch.kthvalue, Tensor.kthvalue)
def _kthvalue(func: Any, x: SpatialTensor, k: int, dim: int = -1, keepdim: bool = False) -> Any:
    """The k-th smallest along a dim, with its number in the whole tensor."""
    return _found(partial(func, k=k), x, dim, keepdim)


@rule(torch.mode, Tensor.mode)
def _mode(func: Any, x: SpatialTensor, dim: int = -1, keepdim: bool = False) -> Any:
    """The most frequent value along a dim, with its number in the whole tensor."""
    return _found(func, x, dim, keepdim)


@rule(torch.median, Tensor.median, torch.nanmedian, Tensor.nanmedian)
def _median(func: Any, x: SpatialTensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """Along a dim, with its number in the whole tensor, or the value alone of all elements."""
    if dim is not None:
        return _found(func, x, dim, keepdim)
    local = local_of(x)
    func(local.detach().new_zeros(1))  # refuses the dtypes that torch does
    value = _middle(local.detach(), x.spec, func in (torch.nanmedian, Tensor.nanmedian))
    if not (local.requires_grad and torch.is_grad_enabled()):
        return value
    add = partial(all_sum_no_grad, group=x.spec.group)
    hits = (local == value) | (local.isnan() & value.isnan())  # which share the gradient
    mine = local.where(hits, 0).sum() / add(hits.sum())
    return linear(mine, lambda _: value.clone(), add, add)


def _found(func: Any, x: SpatialTensor, dim: int, keepdim: bool) -> Any:
    """Values and numbers that `func` finds in whole rows."""
    spec, result = x.spec, without(x.spec, (dim % len(x.spec.shape),), keepdim)
    if not spec.is_split(dim):
        found = func(local_of(x), dim=dim, keepdim=keepdim)
        return type(found)([wrap(part, result) for part in found])
    local = local_of(x)
    found = func(whole_rows(local.detach(), spec, dim), dim=-1)
    values, numbers = (everywhere(part, spec, dim).unsqueeze(dim) for part in found)
    values = picked(local, spec, dim, numbers, values)
    return type(found)([wrap(part if keepdim else part.squeeze(dim), result) for part in (values, numbers)])


def _middle(local: Tensor, spec: Spec, without_nan: bool) -> Tensor:
    """The lower median of all elements on all ranks; NaN where there is one, or where there are no others."""
    group, count = spec.group, torch.Size(spec.shape).numel()
    if not count:
        return local.flatten().median()
    missing = all_sum_no_grad(local.isnan().sum(), group)
    order = (count - missing - 1).clamp_min(0) // 2 if without_nan else torch.full_like(missing, (count - 1) // 2)
    value = _nth(local.flatten(), order[None], group)[0]
    return value if without_nan or not value.is_floating_point() else value.where(missing == 0, torch.nan)


def _nth(values: Tensor, order: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The element (1,) of number `order` (1,) in the rising order of all ranks' (n,) values; NaN comes last."""
    keys = _keys(values)
    prefix = torch.zeros_like(order)
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        digits = (keys >> shift) & (2**_DIGIT - 1)
        counts = order.new_zeros(2**_DIGIT)
        if has_values(keys):
            counts = torch.bincount(digits, minlength=2**_DIGIT)
        counts = all_sum_no_grad(counts, group)
        below = counts.cumsum(0)
        digit = torch.searchsorted(below, order, right=True).clamp_max(2**_DIGIT - 1)
        order = order - (below[digit] - counts[digit])
        prefix = (prefix << _DIGIT) | digit
        keys = keys[digits == digit] if has_values(keys) else keys
    return _value(prefix, values.dtype)


def _keys(values: Tensor) -> Tensor:
    """64-bit integers in the order of `values`, read as unsigned ones."""
    if not values.is_floating_point():
        return values.long() ^ _SIGN
    wide = (values.double() + 0.0).masked_fill(values.isnan(), torch.nan)  # one zero and one NaN
    bits = wide.view(torch.int64)
    return bits ^ ((bits >> 63) | _SIGN)


def _value(key: Tensor, dtype: torch.dtype) -> Tensor:
    """The value that `_keys` made `key` of."""
    if not dtype.is_floating_point:
        return (key ^ _SIGN).to(dtype)
    return (key ^ (~(key >> 63) | _SIGN)).view(torch.float64).to(dtype)


@rule(torch.quantile, Tensor.quantile, torch.nanquantile, Tensor.nanquantile)
def _quantile(
    func: Any, x: Any, q: Any, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
) -> Tensor:
    """Along a dim or over all elements, by each interpolation of torch."""
    several = isinstance(q, Tensor) and q.dim() > 0
    if isinstance(q, SpatialTensor):
        q = q.full()
    if dim is None:
        made: Tensor = func(x.flatten(), q, 0, interpolation=interpolation)
        return made.reshape((*made.shape, *(1,) * x.dim())) if keepdim else made
    spec, result = x.spec, without(x.spec, (dim % len(x.spec.shape),), keepdim)
    if several:
        shape = (q.shape[0], *result.shape)
        result = result.with_(shape, tuple(p.at(p.dim + 1) for p in result.placements))
    if not spec.is_split(dim):
        spec.require_filled()
        return wrap(func(local_of(x), q, dim, keepdim, interpolation=interpolation), result)
    rows = whole_rows(local_of(x), spec, dim)
    count = len(rows)
    rows = rows if count else rows.sum(0, keepdim=True)  # torch refuses an empty tensor
    rows = func(rows, q, -1, interpolation=interpolation)[..., :count]  # (m,) or (several, m)
    found = everywhere(rows.movedim(0, -1), spec, dim) if several else everywhere(rows, spec, dim)
    found = found.unsqueeze(dim % len(spec.shape)) if keepdim else found
    return wrap(found.movedim(-1, 0) if several else found, result)
