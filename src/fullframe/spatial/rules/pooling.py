"""Pooling: each rank pools the rows it needs; max pooling keeps only the indices for backward."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.window import Window
from fullframe.ranks.adjoint import linear
from fullframe.ranks.constants import constant
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.mesh import kept_with_mesh
from fullframe.spatial.halo import borrow
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.rules.window_plan import (
    WindowPlan,
    ints,
    padded,
    plan_windows,
    region,
    region_gradient,
)
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap

Ints = tuple[int, ...]
_MAX: dict[Any, int] = {torch.max_pool1d: 1, torch.max_pool2d: 2, torch.max_pool3d: 3}
_MAX |= {F.max_pool1d: 1, F.max_pool2d: 2, F.max_pool3d: 3}
_MAX_INDEXED: dict[Any, int] = {F.max_pool1d_with_indices: 1, F.max_pool2d_with_indices: 2}
_MAX_INDEXED |= {F.max_pool3d_with_indices: 3, torch.max_pool1d_with_indices: 1}
_AVERAGE: dict[Any, int] = {F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3}


@kept_with_mesh(maxsize=1024)
def _plan(
    spec: Spec, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool
) -> tuple[WindowPlan, tuple[Window, ...], Ints]:
    dims = range(len(spec.shape) - len(kernel), len(spec.shape))
    windows = tuple(Window(k, s, d, p) for k, s, d, p in zip(kernel, stride, dilation, padding, strict=True))
    sizes = tuple(w.output_size(spec.shape[d], ceil_mode=ceil_mode) for w, d in zip(windows, dims, strict=True))
    return plan_windows(spec, dims, windows, sizes, (*spec.shape[: dims[0]], *sizes)), windows, sizes


@rule(*_MAX, *_MAX_INDEXED)
def _max_pool(
    func: Any,
    input: SpatialTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """(..., H, W) pooled over borrowed rows too, -inf outside the image; indices are those of the whole image."""
    count, return_indices = _MAX.get(func) or _MAX_INDEXED[func], return_indices or func in _MAX_INDEXED
    kernel, padding, dilation = ints(kernel_size, count), ints(padding, count), ints(dilation, count)
    stride = ints(stride, count) if stride not in (None, [], ()) else kernel
    if count == 1:
        pool: Any = F.max_pool2d_with_indices if return_indices else F.max_pool2d
        pooled = pool(input.unsqueeze(-2), (1, *kernel), (1, *stride), (0, *padding), (1, *dilation), ceil_mode)
        return tuple(t.squeeze(-2) for t in pooled) if return_indices else pooled.squeeze(-2)
    over = _of_whole_dims(input.spec, kernel, stride, padding, dilation)
    if over is not None:
        largest: Any = F.adaptive_max_pool2d if count == 2 else F.adaptive_max_pool3d
        return largest(input, over, return_indices)
    plan, _, _ = _plan(input.spec, kernel, stride, padding, dilation, ceil_mode)
    local, spec = local_of(input), input.spec
    first = local.dim() - count
    cut = [spec.is_split(first + n) for n in range(count)]
    inner = tuple(0 if here else p for here, p in zip(cut, padding, strict=True))
    options = (kernel, stride, inner, dilation, ceil_mode)
    if return_indices:
        starts = {c.dim: need.start for c, need in zip(plan.cuts, plan.needs, strict=True)}
        corner = tuple(starts.get(dim, spec.held(dim).start) for dim in range(first, local.dim()))
        found = _MaxPool.apply(local, plan, options, (spec.shape[first:], corner))  # type: ignore[no-untyped-call]
        return tuple(wrap(t, plan.spec) for t in found)
    if plan.borrows or any(p for here, p in zip(cut, padding, strict=True) if here):
        return wrap(_MaxPool.apply(local, plan, options, None)[0], plan.spec)  # type: ignore[no-untyped-call]
    return wrap(func(region(local, plan, _lowest(local.dtype)), *options), plan.spec)


class _MaxPool(torch.autograd.Function):
    """Pooled values, and their indices: in the joined region, or of the image where its (sizes, corner) are given."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, plan: WindowPlan, options: Any, image: Any) -> tuple[Tensor, Tensor]:
        joined = padded(borrow(local, plan.cuts)[0], plan, _lowest(local.dtype))
        pool = getattr(torch.ops.aten, f"max_pool{len(options[0])}d_with_indices")
        out, indices = pool(joined, *options)
        _corrected(indices, joined.shape, plan, options[1], options[3])
        ctx.plan, ctx.options, ctx.joined, ctx.image = plan, options, joined.shape, image
        if image is not None:
            sizes, corner = image
            indices = _renumbered(indices, joined.shape[-len(sizes) :], sizes, corner)
        ctx.save_for_backward(indices)
        ctx.mark_non_differentiable(indices)
        return out, indices

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
        (indices,) = ctx.saved_tensors
        if ctx.image is not None:
            sizes, corner = ctx.image
            indices = _renumbered(indices, sizes, ctx.joined[-len(sizes) :], [-start for start in corner])
        where = {"indices": indices, "plan": ctx.plan, "options": ctx.options}
        spread = partial(_spread, joined=ctx.joined, **where)
        return linear(gradient, spread, partial(_picked, **where)), None, None, None


def _spread(gradient: Tensor, indices: Tensor, plan: WindowPlan, options: Any, joined: torch.Size) -> Tensor:
    """The local part's gradient: each output's goes to the row that won."""
    pool = getattr(torch.ops.aten, f"max_pool{len(options[0])}d_with_indices_backward")
    like = torch.empty(joined, dtype=gradient.dtype, device=gradient.device, memory_format=memory_format_of(indices))
    return region_gradient(pool(gradient, like, *options, indices), plan)


def _picked(local: Tensor, indices: Tensor, plan: WindowPlan, options: Any) -> Tensor:
    """The adjoint of `_spread`: of own and borrowed rows those that won."""
    count = len(options[0])
    return region(local, plan).flatten(-count).gather(-1, indices.flatten(-count)).view(indices.shape)


def _renumbered(indices: Tensor, sizes: Sequence[int], new_sizes: Sequence[int], shift: Sequence[int]) -> Tensor:
    """Numbers of elements of a volume of `sizes` in one of `new_sizes`, where they lie `shift` rows further."""
    result, step = torch.zeros_like(indices), 1
    for size, new_size, by in reversed(list(zip(sizes, new_sizes, shift, strict=True))):
        result += (indices % size + by) * step
        indices, step = indices // size, step * new_size
    return result


def _lowest(dtype: torch.dtype) -> float:
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def _corrected(indices: Tensor, joined: torch.Size, plan: WindowPlan, stride: Ints, dilation: Ints) -> None:
    """Move `indices` of a joined region that point to rows in front of the image into the image; in place.

    A window that holds nothing but -inf names its first row, and torch's first row is one of the image.
    """
    first = len(joined) - len(dilation)
    for cut, need in zip(plan.cuts, plan.needs, strict=True):
        outside = cut.rows.start - need.start
        if outside > 0:
            pace, step = stride[cut.dim - first], dilation[cut.dim - first]
            area = math.prod(joined[cut.dim + 1 :])
            here = indices.narrow(cut.dim, 0, min(-(-outside // pace), indices.shape[cut.dim]))
            row = here // area % joined[cut.dim]
            here += (outside - row + step - 1).clamp(min=0) // step * (step * area)


@rule(*_AVERAGE)
def _average_pool(
    func: Any,
    input: SpatialTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """(..., H, W); what is divided by is counted in the whole image: `count_include_pad`, `ceil_mode`."""
    count = _AVERAGE[func]
    kernel, padding = ints(kernel_size, count), ints(padding, count)
    stride = ints(stride, count) if stride not in (None, [], ()) else kernel
    if count == 1:
        options = (1, *kernel), (1, *stride), (0, *padding), ceil_mode, count_include_pad
        return F.avg_pool2d(input.unsqueeze(-2), *options).squeeze(-2)
    is_mean = input.is_floating_point() and not divisor_override
    over = _of_whole_dims(input.spec, kernel, stride, padding, (1,) * count) if is_mean else None
    if over is not None:
        adaptive: Any = F.adaptive_avg_pool2d if count == 2 else F.adaptive_avg_pool3d
        return adaptive(input, over)  # type: ignore[no-any-return]
    plan, windows, sizes = _plan(input.spec, kernel, stride, padding, (1,) * count, ceil_mode)
    local, spec = local_of(input), input.spec
    outs = {cut.dim: rows for cut, rows in zip(plan.cuts, plan.outs, strict=True)}
    first = local.dim() - count
    counted = not divisor_override and (ceil_mode or (not count_include_pad and any(padding)))
    around: list[int] = []
    seen: Tensor | None = None
    for n, window in enumerate(windows):
        dim = first + n
        around = [0, 0, *around]
        if dim not in outs and spec.is_split(dim):
            continue  # pooled one by one: each row stays where it is
        rows = outs.get(dim, range(sizes[n]))
        if dim not in outs:
            reads = window.reads(rows)
            around[:2] = -reads.start, max(reads.stop - spec.shape[dim], 0)
        if counted:
            beyond = padding[n] if count_include_pad else 0
            here = tuple(_seen(window, row, spec.shape[dim], beyond) for row in rows)
            column = constant(here, torch.int64, local.device).view(-1, *(1,) * (count - n - 1))
            seen = column if seen is None else seen * column
    divisor = divisor_override if seen is None else 1
    mean = _Mean(plan, tuple(around), kernel, stride, divisor, seen)
    spread = partial(mean.spread, like=local.shape, layout=memory_format_of(local))
    return wrap(linear(local, mean.of, spread), plan.spec)


class _Mean(NamedTuple):
    """The mean of each window of this rank's rows, with zeros `around` the dims that are whole here."""

    plan: WindowPlan
    around: Ints  # as `F.pad` has them
    kernel: Ints
    stride: Ints
    divisor: int | None
    seen: Tensor | None  # what each window has seen, where its sum is divided by that

    def of(self, local: Tensor) -> Tensor:
        """The rows of the result; 16-bit sums could overflow."""
        x = padded(borrow(local, self.plan.cuts)[0], self.plan)
        x = F.pad(x, self.around) if any(self.around) else x
        wide = x.float() if self.seen is not None and x.dtype in (torch.float16, torch.bfloat16) else x
        pool = F.avg_pool2d if len(self.kernel) == 2 else F.avg_pool3d
        total = pool(wide, self.kernel, self.stride, divisor_override=self.divisor)
        if self.seen is None:
            return total
        if not x.is_floating_point():
            return total.div(self.seen, rounding_mode="trunc")
        return (total / self.seen).to(x.dtype)

    def spread(self, gradient: Tensor, like: torch.Size, layout: torch.memory_format) -> Tensor:
        """The gradient of the local part, of shape `like`, from that of the result."""
        held = list(like)
        for cut, need in zip(self.plan.cuts, self.plan.needs, strict=True):
            held[cut.dim] = len(need)
        for n, more in enumerate(self.around):
            held[-1 - n // 2] += more
        back = getattr(torch.ops.aten, f"avg_pool{len(self.kernel)}d_backward")
        wide = gradient if self.seen is None else (gradient.float() if gradient.itemsize == 2 else gradient) / self.seen
        rows = torch.empty(held, dtype=wide.dtype, device=wide.device, memory_format=layout)
        none = (0,) * len(self.kernel)
        rows = back(wide, rows, self.kernel, self.stride, none, False, True, self.divisor).to(gradient.dtype)
        if any(self.around):
            rows = F.pad(rows, [-more for more in self.around])
        return region_gradient(rows, self.plan)


@kept_with_mesh(maxsize=1024)
def _of_whole_dims(spec: Spec, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> Ints | None:
    """The result's sizes where each window is all of a dim or one row, and of a split dim all; None elsewhere.

    Such pools need no map whole on a rank, nor is there another order among equals than the adaptive ones have.
    """
    sizes, first = spec.shape[-len(kernel) :], len(spec.shape) - len(kernel)
    rows = list(zip(kernel, stride, padding, dilation, sizes, strict=True))
    whole = [k == size > 1 and (p, d) == (0, 1) for k, _, p, d, size in rows]
    if not any(each and spec.is_split(first + n) for n, each in enumerate(whole)):
        return None
    if not all(each or row[:3] == (1, 1, 0) for each, row in zip(whole, rows, strict=True)):
        return None
    return tuple(1 if each else size for each, size in zip(whole, sizes, strict=True))


def _seen(window: Window, row: int, size: int, padding: int) -> int:
    """Input rows, with `padding` counted as rows, under the window of one output row."""
    reads = window.reads(range(row, row + 1))
    return min(reads.stop, size + padding) - max(reads.start, -padding)


@rule(F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)
def _power_average_pool(
    func: Any, input: SpatialTensor, norm_type: float, kernel_size: Any, stride: Any = None, ceil_mode: bool = False
) -> Tensor:
    """The root of the summed powers of each window, by average pooling."""
    count = {F.lp_pool1d: 1, F.lp_pool2d: 2, F.lp_pool3d: 3}[func]
    average = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[count - 1]
    mean = average(input**norm_type, kernel_size, stride, 0, ceil_mode)
    area = math.prod(ints(kernel_size, count))
    return (torch.sign(mean) * F.relu(torch.abs(mean)) * area) ** (1 / norm_type)
