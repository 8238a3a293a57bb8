"""Unfold and fold: windows laid side by side as channels, and their adjoint."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.window import Window
from fullframe.spatial.rules.registry import Refused, rule
from fullframe.spatial.rules.windowed import ints, plan_windows, region
from fullframe.spatial.tensor import SpatialTensor, gather_axes, local_of, wrap


@rule(F.unfold)
def _unfold(
    func: Any, input: SpatialTensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Tensor:
    layout = input._layout
    if len(layout.shape) != 4:
        raise Refused("only a batch of images (N, C, H, W) is unfolded split")
    options = [ints(value, 2) for value in (kernel_size, stride, dilation, padding)]
    windows = [Window(*row) for row in zip(*options, strict=True)]
    samples, channels, *sizes = layout.shape
    sizes = [w.output_size(n) for w, n in zip(windows, sizes, strict=True)]
    kernel, stride, dilation, padding = options
    deep = channels * kernel[0] * kernel[1]
    plan = plan_windows(layout, (2, 3), windows, sizes, (samples, deep, *sizes))
    if plan.too_small:
        whole = wrap(*gather_axes(local_of(input), layout, plan.too_small))
        return func(whole, kernel, dilation, padding, stride)  # type: ignore[no-any-return]
    inner = [0 if layout.is_split(dim) else p for dim, p in zip((2, 3), padding, strict=True)]
    joined = region(local_of(input), plan)
    made = [
        Window(k, s, d, p).output_size(n)
        for k, s, d, p, n in zip(kernel, stride, dilation, inner, joined.shape[2:], strict=True)
    ]
    local = func(joined, kernel, dilation, inner, stride).view(samples, deep, *made)
    return wrap(local, plan.layout).flatten(2)


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
    """A transposed convolution whose weights put each element where its window had it."""
    size, kernel, stride, dilation, padding = (
        ints(value, 2) for value in (output_size, kernel_size, stride, dilation, padding)
    )
    samples, deep, _ = input._layout.shape
    windows = [Window(*row) for row in zip(kernel, stride, dilation, padding, strict=True)]
    rows, columns = (w.output_size(n) for w, n in zip(windows, size, strict=True))
    area = kernel[0] * kernel[1]
    weight = torch.eye(area, dtype=input.dtype, device=input.device).view(area, 1, *kernel)
    extra = [
        n - ((m - 1) * w.stride - 2 * w.padding + w.span)
        for n, m, w in zip(size, (rows, columns), windows, strict=True)
    ]
    image = input.reshape(samples, deep, rows, columns)
    weight = weight.repeat(deep // area, 1, 1, 1)
    return F.conv_transpose2d(image, weight, None, stride, padding, extra, deep // area, dilation)


@rule(Tensor.unfold)
def _windows(func: Any, x: SpatialTensor, dimension: int, size: int, step: int) -> Tensor:
    layout = x._layout
    dim = dimension % len(layout.shape)
    rows = (layout.shape[dim] - size) // step + 1
    shape = (*layout.shape[:dim], rows, *layout.shape[dim + 1 :])
    if not layout.is_split(dim):
        return wrap(func(local_of(x), dim, size, step), layout.with_((*shape, size), layout.placements))
    plan = plan_windows(layout, [dim], [Window(size, step)], [rows], shape)
    if plan.too_small:
        return func(wrap(*gather_axes(local_of(x), layout, plan.too_small)), dim, size, step)  # type: ignore[no-any-return]
    local = region(local_of(x), plan).unfold(dim, size, step)
    return wrap(local, layout.with_((*shape, size), plan.layout.placements))
