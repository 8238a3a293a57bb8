"""What torchvision's kernels compute, in plain torch, under their names where torchvision is not installed."""

import importlib
import math
from contextlib import suppress
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "deform_conv2d": "(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
}


def nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    left: list[int] = scores.argsort(descending=True, stable=True).tolist()
    kept: list[int] = []
    area = (dets[:, 2] - dets[:, 0]) * (dets[:, 3] - dets[:, 1])
    while left:
        best = left.pop(0)
        kept.append(best)
        low = torch.maximum(dets[:, :2], dets[best, :2])
        high = torch.minimum(dets[:, 2:], dets[best, 2:])
        shared = (high - low).clamp(min=0).prod(1)
        over = (shared / (area + area[best] - shared)).tolist()
        left = [n for n in left if over[n] <= iou_threshold]
    return torch.tensor(kept, dtype=torch.int64)


def _weights(start: Tensor, length: Tensor, bins: int, ratio: int, size: int) -> Tensor:
    """(bins, size): how much of each row is in each bin of a region, by the mean of its bilinear samples."""
    samples = ratio if ratio > 0 else math.ceil(float(length) / bins)
    if samples == 0:
        return start.new_zeros(bins, size)
    inside = (torch.arange(samples, dtype=start.dtype) + 0.5) * (length / bins) / samples
    at = (start + torch.arange(bins, dtype=start.dtype)[:, None] * (length / bins) + inside).flatten()
    none = (at < -1) | (at > size)
    at = at.clamp(min=0)
    low = at.floor().long().clamp(max=size - 1)
    high = (low + 1).clamp(max=size - 1)
    part = torch.where(low >= size - 1, 0.0, at - low)
    found = F.one_hot(low, size) * (1 - part)[:, None] + F.one_hot(high, size) * part[:, None]
    return found.masked_fill(none[:, None], 0).view(bins, samples, size).mean(1)


def roi_align(
    input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, sampling_ratio: int,
    aligned: bool,
) -> Tensor:  # fmt: skip
    found = [input.new_zeros(0, input.shape[1], pooled_height, pooled_width)]
    for region in rois.detach():
        x1, y1, x2, y2 = region[1:] * spatial_scale - (0.5 if aligned else 0.0)
        width, height = (x2 - x1, y2 - y1) if aligned else ((x2 - x1).clamp(min=1.0), (y2 - y1).clamp(min=1.0))
        rows = _weights(y1, height, pooled_height, sampling_ratio, input.shape[2])
        columns = _weights(x1, width, pooled_width, sampling_ratio, input.shape[3])
        found.append((rows @ input[int(region[0])] @ columns.mT)[None])
    return torch.cat(found)


def _read(image: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """(N, C, H, W) at (N, H_out, W_out), zeros outside."""
    total: Any = 0.0
    for down, right in product((0, 1), (0, 1)):
        row, column = y.detach().floor() + down, x.detach().floor() + right
        inside = (row >= 0) & (row < image.shape[2]) & (column >= 0) & (column < image.shape[3])
        part_y, part_x = y - y.detach().floor(), x - x.detach().floor()
        weight = (part_y if down else 1 - part_y) * (part_x if right else 1 - part_x)
        number = (row * image.shape[3] + column).masked_fill(~inside, 0).long().flatten(1)
        found = image.flatten(2).gather(2, number[:, None].expand(-1, image.shape[1], -1))
        total = total + found.view(*image.shape[:2], *y.shape[1:]) * (weight * inside)[:, None]
    return total  # type: ignore[no-any-return]


def deform_conv2d(
    input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor, stride_h: int, stride_w: int,
    pad_h: int, pad_w: int, dilation_h: int, dilation_w: int, groups: int, offset_groups: int, use_mask: bool,
) -> Tensor:  # fmt: skip
    kernel, result, taps = weight.shape[2:], [], weight.shape[2] * weight.shape[3]
    for c in range(input.shape[1]):
        group = c // (input.shape[1] // offset_groups)
        for i, j in product(range(kernel[0]), range(kernel[1])):
            n = group * taps + i * kernel[1] + j
            rows = torch.arange(offset.shape[2])[:, None] * stride_h - pad_h + i * dilation_h
            columns = torch.arange(offset.shape[3]) * stride_w - pad_w + j * dilation_w
            read = _read(input[:, c : c + 1], offset[:, 2 * n] + rows, offset[:, 2 * n + 1] + columns)
            result.append(read * mask[:, n, None] if use_mask else read)
    joined = torch.cat(result, 1)
    return F.conv2d(joined, weight.flatten(1)[:, :, None, None], bias, groups=groups)


_LIBRARIES: list[Any] = []


def torchvision_ops() -> Any:
    """`torch.ops.torchvision`, of torchvision where it is installed, else of this file."""
    with suppress(ImportError, RuntimeError):  # RuntimeError: built for another torch
        importlib.import_module("torchvision")
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        for name, schema in SCHEMAS.items():
            library.define(name + schema)
            kind = "Explicit" if name == "nms" else "Implicit"  # of the latter a simulation sees the ops inside
            library.impl(name, globals()[name], f"Composite{kind}Autograd")
        _LIBRARIES.append(library)
    return torch.ops.torchvision
