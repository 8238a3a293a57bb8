"""The median of all elements of a split tensor, found digit by digit: the ranks add up counts, no element is sent."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks.collectives import all_sum, all_sum_no_grad
from fullframe.spatial.rules.reduction import without
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap

_DIGIT = 8  # bits


class _Median(torch.autograd.Function):
    """`torch.median`, or `nanmedian`, of all elements over the ranks of `group`; ties share the gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, skip_nan: bool, group: dist.ProcessGroup) -> Tensor:
        nan = local.isnan()
        counts = all_sum_no_grad(torch.stack([nan.sum(), torch.tensor(local.numel(), device=nan.device)]), group)
        valid = counts[1] - counts[0]
        found = _kth(local[~nan], (valid - 1) // 2, group)
        if local.is_floating_point():
            lost = valid == 0 if skip_nan else counts[0] > 0
            found = torch.where(lost, torch.nan, found)
        ctx.save_for_backward(local, found)
        ctx.group = group
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        local, found = ctx.saved_tensors
        hits = (local == found) | (local.isnan() & found.isnan())
        share = all_sum(gradient, ctx.group) / all_sum(hits.sum(), ctx.group)
        return torch.where(hits, share, 0).to(local.dtype), None, None


def _kth(values: Tensor, k: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The value with `k` smaller ones before it in the ranks' sorted values, none of them NaN."""
    keys, bits = _keys(values)
    found = torch.zeros_like(k)
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        digits = keys >> shift
        digits = digits + (1 << _DIGIT - 1) if shift == bits - _DIGIT else digits & (1 << _DIGIT) - 1
        counts = all_sum_no_grad(torch.bincount(digits, minlength=1 << _DIGIT), group)
        before = counts.cumsum(0)
        digit = (before <= k).sum().clamp_max(len(counts) - 1)
        k = k - (before - counts)[digit]
        keys = keys[digits == digit]
        found = found + ((digit - (1 << _DIGIT - 1) if shift == bits - _DIGIT else digit) << shift)
    return _value(found, values.dtype)


def _keys(values: Tensor) -> tuple[Tensor, int]:
    """Integers in the order of the values, and how many bits they have."""
    if not values.is_floating_point():
        return values.long(), 64 if values.dtype is torch.int64 else 32
    wide, kind = (values, torch.int64) if values.dtype is torch.float64 else (values.float(), torch.int32)
    return _turned((wide + 0.0).view(kind)).long(), 8 * kind.itemsize  # of -0.0 makes 0.0


def _value(key: Tensor, dtype: torch.dtype) -> Tensor:
    if not dtype.is_floating_point:
        return key.to(dtype)
    wide, kind = (torch.float64, torch.int64) if dtype is torch.float64 else (torch.float32, torch.int32)
    return _turned(key.to(kind)).view(wide).to(dtype)


def _turned(bits: Tensor) -> Tensor:
    """The bits of floats as integers in their order, and back: those of negative ones are inverted but for the sign."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


@rule(torch.median, Tensor.median, torch.nanmedian, Tensor.nanmedian)
def _median(func: Any, x: SpatialTensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """The lower median of all elements, or along a whole dim with its indices; refuses a split dim."""
    spec, local = x.spec, local_of(x)
    if dim is None:
        func(local.new_zeros(1))  # refuses the dtypes that torch does
        group = spec.spatial.group([p.axis for p in spec.placements])
        return _Median.apply(local, func in (torch.nanmedian, Tensor.nanmedian), group)  # type: ignore[no-untyped-call]
    spec.require_whole(f"it works along dim {dim}, which is split", dim)
    found, result = func(local, dim, keepdim), without(spec, (dim % len(spec.shape),), keepdim)
    return type(found)([wrap(found.values, result), wrap(found.indices, result)])
