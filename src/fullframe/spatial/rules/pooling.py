"""Pooling: each rank pools the rows it needs; max pooling keeps only the indices for backward."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.extents import overlap
from fullframe.geometry.placement import Placement
from fullframe.geometry.window import AdaptiveWindow, Window
from fullframe.ranks.adjoint import linear
from fullframe.ranks.collectives import all_gather, all_gather_no_grad
from fullframe.ranks.constants import constant
from fullframe.ranks.exchange import joined
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.mesh import Axis, kept_with_mesh
from fullframe.spatial.halo import borrow
from fullframe.spatial.redistribute import gather_axes, refetched
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.rules.resampling import in_format, resampled
from fullframe.spatial.rules.taps import taps_of, weights_dtype
from fullframe.spatial.rules.window_plan import (
    WindowPlan,
    ints,
    nonempty,
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
_ADAPTIVE: dict[Any, int] = {F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3}
_ADAPTIVE |= {torch.adaptive_avg_pool1d: 1}
_ADAPTIVE_MAX: dict[Any, int] = {F.adaptive_max_pool1d: 1, F.adaptive_max_pool2d: 2, F.adaptive_max_pool3d: 3}
_ADAPTIVE_MAX_INDEXED: dict[Any, int] = {F.adaptive_max_pool1d_with_indices: 1, torch.adaptive_max_pool1d: 1}
_ADAPTIVE_MAX_INDEXED |= {F.adaptive_max_pool2d_with_indices: 2, F.adaptive_max_pool3d_with_indices: 3}


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
    over = _of_whole_dims(input, kernel, stride, padding, dilation)
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
    extra = {} if divisor_override is None else {"divisor_override": divisor_override}
    is_mean = input.is_floating_point() and not divisor_override
    over = _of_whole_dims(input, kernel, stride, padding, (1,) * count) if is_mean else None
    if over is not None:
        adaptive: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[count - 1]
        return adaptive(input, over)  # type: ignore[no-any-return]
    plan, windows, sizes = _plan(input.spec, kernel, stride, padding, (1,) * count, ceil_mode)
    local, spec = local_of(input), input.spec
    local = region(local, plan)
    outs = {cut.dim: rows for cut, rows in zip(plan.cuts, plan.outs, strict=True)}
    first = local.dim() - count
    counted = not divisor_override and (ceil_mode or (not count_include_pad and any(padding)))
    seen: Tensor | None = None
    for n, window in enumerate(windows):
        dim = first + n
        if dim not in outs and spec.is_split(dim):
            continue  # pooled one by one: each row stays where it is
        rows = outs.get(dim, range(sizes[n]))
        if dim not in outs:
            reads = window.reads(rows)
            before, after = -reads.start, max(reads.stop - spec.shape[dim], 0)
            if before or after:  # a copy
                local = F.pad(local, (*(0, 0) * (local.dim() - dim - 1), before, after))
        if counted:
            beyond = padding[n] if count_include_pad else 0
            here = tuple(_seen(window, row, spec.shape[dim], beyond) for row in rows)
            column = constant(here, torch.int64, local.device).view(-1, *(1,) * (count - n - 1))
            seen = column if seen is None else seen * column
    if seen is None:
        return wrap(func(local, kernel, stride, **extra), plan.spec)
    return wrap(_summed(local, kernel, stride, seen), plan.spec)


def _of_whole_dims(x: SpatialTensor, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints) -> list[int] | None:
    """The result's sizes where each window is all of a dim or one row, and of a split dim all; None elsewhere.

    Such pools need no map whole on a rank, nor is there another order among equals than the adaptive ones have.
    """
    sizes, first = x.shape[-len(kernel) :], x.dim() - len(kernel)
    rows = list(zip(kernel, stride, padding, dilation, sizes, strict=True))
    whole = [k == size > 1 and (p, d) == (0, 1) for k, _, p, d, size in rows]
    if not any(each and x.spec.is_split(first + n) for n, each in enumerate(whole)):
        return None
    if not all(each or row[:3] == (1, 1, 0) for each, row in zip(whole, rows, strict=True)):
        return None
    return [1 if each else size for each, size in zip(whole, sizes, strict=True)]


def _summed(x: Tensor, kernel: Ints, stride: Ints, seen: Tensor) -> Tensor:
    """The sum of each window over what it has `seen`, as torch divides it; 16-bit sums could overflow."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    if len(kernel) == 1:
        total = F.avg_pool2d(wide.unsqueeze(-2), (1, *kernel), (1, *stride), divisor_override=1).squeeze(-2)
    else:
        total = (F.avg_pool2d if len(kernel) == 2 else F.avg_pool3d)(wide, kernel, stride, divisor_override=1)
    if not x.is_floating_point():
        return total.div(seen, rounding_mode="trunc")
    return (total / seen).to(x.dtype)


def _seen(window: Window, row: int, size: int, padding: int) -> int:
    """Input rows, with `padding` counted as rows, under the window of one output row."""
    reads = window.reads(range(row, row + 1))
    return min(reads.stop, size + padding) - max(reads.start, -padding)


@rule(*_ADAPTIVE)
def _adaptive_average_pool(func: Any, input: SpatialTensor, output_size: Any) -> Tensor:
    """(..., H, W) to the given size: a mean for size 1, else weighted sums of rows wherever they lie."""
    count = _ADAPTIVE[func]
    first = input.dim() - count
    input.spec.require_plain(range(first, input.dim()))
    sizes = _targets(input, output_size, count)
    if 0 in input.shape:
        return func(input.full(), sizes)  # type: ignore[no-any-return]
    single = [first + n for n, size in enumerate(sizes) if size == 1]
    kind = weights_dtype(input)
    result = input.mean(single, keepdim=True) if single else input
    for dim, size in zip(range(first, input.dim()), sizes, strict=True):
        if size != 1 and isinstance(result, SpatialTensor) and result.spec.is_split(dim) and size != input.shape[dim]:
            result = resampled(result, dim, taps_of(result.shape[dim], size, "area", None, None, False, kind))
    if not isinstance(result, SpatialTensor):
        return in_format(func(result, sizes), input, input.dtype)
    spec, local = result.spec, local_of(result)
    targets = [local.shape[first + n] if spec.is_split(first + n) else size for n, size in enumerate(sizes)]
    if targets != list(local.shape[-count:]):
        local = func(local, targets)
    return in_format(wrap(local, spec.with_((*spec.shape[:-count], *sizes), spec.placements)), input, input.dtype)


@rule(*_ADAPTIVE_MAX, *_ADAPTIVE_MAX_INDEXED)
def _adaptive_max_pool(func: Any, input: SpatialTensor, output_size: Any, return_indices: bool = False) -> Any:
    """(..., H, W) to the given size, dim by dim; indices are those of the whole image."""
    count = _ADAPTIVE_MAX.get(func) or _ADAPTIVE_MAX_INDEXED[func]
    return_indices = return_indices or func in _ADAPTIVE_MAX_INDEXED
    first = input.dim() - count
    input.spec.require_plain(range(first, input.dim()))
    sizes = _targets(input, output_size, count)
    found = _Largest(input, None)
    for n in reversed(range(count)):  # the last dim first, so that among equals torch's choice is taken
        area = math.prod(input.shape[first + n + 1 :]) if return_indices else 0
        found = _adaptive_max_rows(found, first + n, sizes[n], area)
    result = in_format(found.values, input, input.dtype)
    return result if found.numbers is None else (result, in_format(found.numbers, input, torch.int64))


class _Largest(NamedTuple):
    """A map pooled along some dims, and the number in the volume of each of its elements, where they are wanted."""

    values: Tensor
    numbers: Tensor | None

    def each(self, op: Callable[[Tensor], Tensor]) -> "_Largest":
        """`op` of both."""
        return _Largest(op(self.values), None if self.numbers is None else op(self.numbers))


def _adaptive_max_rows(x: _Largest, dim: int, size: int, area: int) -> _Largest:
    """`x` pooled along one more dim, a row of which is `area` elements of the volume, 0 where nothing is counted."""
    window = AdaptiveWindow(x.values.shape[dim], size)
    reads = [window.reads(range(row, row + 1)) for row in range(size)]
    if not isinstance(x.values, SpatialTensor):
        return _max_windows(x, dim, reads, 0, area)
    spec = x.values.spec
    mine = x.each(lambda t: local_of(t))  # type: ignore[arg-type]
    placement = spec.of(dim)
    if placement is None:
        found, goal = _max_windows(mine, dim, reads, 0, area), spec.resized(dim, size)
        return found.each(lambda t: wrap(t, goal))
    extents = nonempty(window.output_extents(placement.extents, size))
    if extents is None and placement.extents.has_empty:
        whole = mine.each(lambda t: wrap(*gather_axes(t, spec, [placement.axis])))
        return _adaptive_max_rows(whole, dim, size, area)
    axis = spec.spatial.axis(placement.axis)
    if extents is None:
        found, goal = (
            _of_all_ranks(mine, placement, axis, reads, area),
            spec.whole_along([axis.name]).resized(dim, size),
        )
        return found.each(lambda t: wrap(t, goal))
    wanted = tuple(window.reads(rows) for rows in extents.ranges)
    mine = mine.each(lambda t: refetched(t, spec, placement, wanted))
    part, goal = axis.coordinate, spec.resized(dim, size, extents)
    rows = extents.ranges[part]
    found = _max_windows(mine, dim, reads[rows.start : rows.stop], wanted[part].start, area)
    return found.each(lambda t: wrap(t, goal))


def _of_all_ranks(mine: _Largest, placement: Placement, axis: Axis, reads: Sequence[range], area: int) -> _Largest:
    """Pooled along a dim with windows `reads` that several ranks see: each rank's largest, and of these the largest."""
    dim, parts = placement.dim, placement.extents.ranges
    own, seen = parts[axis.coordinate], [[overlap(rows, part) for part in parts] for rows in reads]
    found = _max_windows(mine, dim, [here[axis.coordinate] or own[:1] for here in seen], own.start, area)
    values = all_gather(found.values, axis.group)  # (ranks, ...)
    numbers = None if found.numbers is None else all_gather_no_grad(found.numbers, axis.group)
    held = [(rank, row) for row, here in enumerate(seen) for rank, rows in enumerate(here) if rows]
    stops = list(accumulate(sum(map(bool, here)) for here in seen))
    candidates = _Largest(values, numbers).each(
        lambda t: joined([t[rank].narrow(dim, row, 1) for rank, row in held], dim)
    )
    return _max_windows(candidates, dim, list(map(range, [0, *stops], stops)), 0, 0)


def _max_windows(x: _Largest, dim: int, reads: Sequence[range], offset: int, area: int) -> _Largest:
    """The largest of each window along one dim; `x` starts at input row `offset`."""
    best, numbers = [], []
    for rows in reads:
        seen = x.values.narrow(dim, rows.start - offset, len(rows))
        largest, index = seen.max(dim, keepdim=True)
        # Of several NaN torch's pool takes the last, its max the first.
        places = torch.arange(len(rows), dtype=torch.int32, device=seen.device)
        last = (seen.isnan() * places.view(-1, *(1,) * (seen.dim() - dim - 1))).amax(dim, keepdim=True)
        index = torch.where(largest.isnan(), last, index)
        largest = seen.gather(dim, index)
        best.append(largest)
        if area or x.numbers is not None:
            inner = 0 if x.numbers is None else x.numbers.narrow(dim, rows.start - offset, len(rows)).gather(dim, index)
            numbers.append(inner + (index + rows.start) * area)
    return _Largest(joined(best, dim), joined(numbers, dim) if numbers else None)


def _targets(x: SpatialTensor, output_size: Any, count: int) -> list[int]:
    given: Sequence[int | None] = [output_size] * count if isinstance(output_size, int) else list(output_size)
    given = list(given) * (count // len(given))
    return [x.shape[x.dim() - count + n] if size is None else int(size) for n, size in enumerate(given)]


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
