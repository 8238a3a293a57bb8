"""Unfold and fold: windows laid side by side as channels, and their adjoint."""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.geometry.window import Window
from fullframe.ranks.adjoint import linear
from fullframe.spatial.operands import aligned
from fullframe.spatial.rules.registry import TooSmall, rule
from fullframe.spatial.rules.transposing import moved_from
from fullframe.spatial.rules.window_plan import WindowPlan, ints, plan_windows, region, region_gradient
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap

Ints = tuple[int, ...]


@rule(F.unfold)
def _unfold(
    func: Any, input: SpatialTensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Tensor:
    """Windows of (N, C, H, W) as columns (N, C * k * k, rows * columns)."""
    spec = input.spec
    if len(spec.shape) == 3:
        return func(input.unsqueeze(0), kernel_size, dilation, padding, stride).squeeze(0)  # type: ignore[no-any-return]
    spec.require_whole("the channels are split", 1)
    options = [ints(value, 2) for value in (kernel_size, stride, dilation, padding)]
    windows = [Window(*row) for row in zip(*options, strict=True)]
    samples, channels, *sizes = spec.shape
    sizes = [w.output_size(n) for w, n in zip(windows, sizes, strict=True)]
    kernel, stride, dilation, padding = options
    deep = channels * kernel[0] * kernel[1]
    plan = plan_windows(spec, (2, 3), windows, sizes, (samples, deep, *sizes))
    inner = [0 if spec.is_split(dim) else p for dim, p in zip((2, 3), padding, strict=True)]
    joined = region(local_of(input), plan)
    made = [
        Window(k, s, d, p).output_size(n)
        for k, s, d, p, n in zip(kernel, stride, dilation, inner, joined.shape[2:], strict=True)
    ]
    columns = func(joined, kernel, dilation, inner, stride)
    flat = wrap(columns.view(len(joined), deep, *made), plan.spec).flatten(2)
    return wrap(columns, flat.spec) if isinstance(flat, SpatialTensor) and columns.numel() else flat  # no view


@rule(F.fold)
def _fold(
    func: Any,
    input: SpatialTensor,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> Tensor:
    """The windows (N, C * k * k, rows * columns) added up into the image (N, C, H, W), which is cut evenly.

    Split channels are made whole: the split moves to the windows.
    """
    if input.dim() == 2:
        image = func(input.unsqueeze(0), output_size, kernel_size, dilation, padding, stride)
        return image.squeeze(0)  # type: ignore[no-any-return]
    if input.spec.is_split(1):
        return func(moved_from(input, 1), output_size, kernel_size, dilation, padding, stride)  # type: ignore[no-any-return]
    given = [ints(value, 2) for value in (kernel_size, stride, dilation, padding)]
    windows = [Window(*row) for row in zip(*given, strict=True)]
    sizes = ints(output_size, 2)
    samples, deep, _ = input.spec.shape
    rows, columns = (w.output_size(n) for w, n in zip(windows, sizes, strict=True))
    cells = input.reshape(samples, deep, rows, columns)
    if not isinstance(cells, SpatialTensor):
        return func(cells.flatten(2), sizes, *(given[n] for n in (0, 2, 3, 1)))  # type: ignore[no-any-return]
    spec = cells.spec
    image = tuple(p if p.dim < 2 else p.recut(Extents.even(sizes[p.dim - 2], p.extents.parts)) for p in spec.placements)
    small = [p.axis for p in image if p.extents.has_empty]
    channels = deep // (given[0][0] * given[0][1])
    goal = spec.with_((samples, channels, *sizes), image)
    if small:
        raise TooSmall(small)
    plan = plan_windows(goal, (2, 3), windows, (rows, columns), spec.shape)
    kernel, stride, dilation, padding = given
    inner = [0 if goal.is_split(dim) else p for dim, p in zip((2, 3), padding, strict=True)]
    local = aligned(cells, plan.spec)
    held = goal.local_shape
    options = kernel, dilation, inner, stride
    fold = partial(_folded, plan=plan, held=tuple(held), options=options)
    unfold = partial(_unfolded, plan=plan, shape=tuple(local.shape), options=options)
    return wrap(linear(local, fold, unfold), goal)


def _folded(cells: Tensor, plan: WindowPlan, held: Ints, options: Any) -> Tensor:
    """The adjoint of `_unfolded`: what falls into a neighbour's rows is sent there and added."""
    joined = list(held)
    for cut, need in zip(plan.cuts, plan.needs, strict=True):
        joined[cut.dim] = len(need)
    return region_gradient(F.fold(cells.flatten(2), tuple(joined[2:]), *options), plan)


def _unfolded(image: Tensor, plan: WindowPlan, shape: Ints, options: Any) -> Tensor:
    """The windows of own and borrowed rows, (N, C * k * k, rows, columns)."""
    return F.unfold(region(image, plan), *options).view(shape)


@rule(Tensor.unfold)
def _windows(func: Any, x: SpatialTensor, dimension: int, size: int, step: int) -> Tensor:
    """Windows of `size` rows every `step` rows, in a new last dim: (..., H, ...) to (..., rows, ..., size)."""
    spec = x.spec
    dim = dimension % len(spec.shape)
    rows = (spec.shape[dim] - size) // step + 1
    shape = spec.resized(dim, rows).shape
    if not spec.is_split(dim):
        return wrap(func(local_of(x), dim, size, step), spec.with_((*shape, size), spec.placements))
    plan = plan_windows(spec, [dim], [Window(size, step)], [rows], shape)
    local = region(local_of(x), plan).unfold(dim, size, step)
    return wrap(local, spec.with_((*shape, size), plan.spec.placements))
