"""What detectors call of torchvision's C++ ops, known by their names: torchvision need not be there.

Regions of a split map are read by its own kernel, from the rows that a rank has, and added up; boxes are small and made
whole; a deformable convolution borrows the rows that its offsets point to.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.ranks.collectives import all_sum
from fullframe.spatial.rules.grid_sample import at_pixels
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, whole


@rule("torchvision::nms")
def _nms(func: Any, dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Boxes (N, 4), scores (N,) to the whole numbers of those that are kept, on all ranks."""
    return func(whole(dets.detach()), whole(scores.detach()), iou_threshold)  # type: ignore[no-any-return]


@rule("torchvision::roi_align")
def _roi_align(
    func: Any, input: Tensor, rois: Tensor, spatial_scale: float, pooled_height: int, pooled_width: int, *options: Any
) -> Tensor:
    """Map (N, C, H, W), regions (K, 5) as (sample, x1, y1, x2, y2) to (K, C, pooled_height, pooled_width), whole.

    It is linear in the map, and reads row 0 for what lies up to a row above it, the last row likewise. So each rank
    calls it on its own rows, with a row of zeros where another rank's begin, and regions that count from these rows.
    """
    rois = whole(rois.detach())
    if not isinstance(input, SpatialTensor):
        return func(input, rois, spatial_scale, pooled_height, pooled_width, *options)  # type: ignore[no-any-return]
    spec, local = input.spec, local_of(input)
    first = [0.0, 0.0]  # column and row of the map that are the local map's first
    for p in spec.placements:
        if p.dim < 2 or not p.is_plain:
            raise Unsupported("its map is split in another dim than height or width")
        rows = spec.rows(p)
        before, behind = int(rows.start > 0), int(rows.stop < spec.shape[p.dim])
        local = F.pad(local, (before, behind) if p.dim == 3 else (0, 0, before, behind))
        first[3 - p.dim] = float(rows.start - before)
    rois = rois.clone()
    for column, start in enumerate(first, 1):
        rois[:, column::2] -= start / spatial_scale
    return all_sum(func(local, rois, spatial_scale, pooled_height, pooled_width, *options), spec.group)


@rule("torchvision::deform_conv2d")
def _deform_conv2d(
    func: Any, input: Tensor, weight: Tensor, offset: Tensor, mask: Tensor, bias: Tensor | None,
    stride_h: int, stride_w: int, pad_h: int, pad_w: int, dil_h: int, dil_w: int,
    groups: int, offset_groups: int, use_mask: bool,
) -> Tensor:  # fmt: skip
    """Map (N, C, H, W), offsets (N, 2 * offset_groups * taps, H_out, W_out), y before x, mask likewise with one a tap.

    A convolution by 1x1 of what is read at the taps: what its kernel does, which keeps as much.
    """
    if not (isinstance(input, SpatialTensor) and isinstance(offset, SpatialTensor)):
        raise Unsupported("of its map and its offsets one alone is split")
    given = input.dtype
    if torch.is_autocast_enabled(input.device.type):  # as torchvision does
        input, weight, offset, mask = input.float(), weight.float(), offset.float(), mask.float()
        bias = None if bias is None else bias.float()
    kernel, size, device = weight.shape[2:], offset.shape[2:], input.device
    taps = kernel[0] * kernel[1]
    with torch.autocast(device.type, enabled=False):
        down = torch.arange(kernel[0], device=device) * dil_h - pad_h
        right = torch.arange(kernel[1], device=device) * dil_w - pad_w
        down, right = down.repeat_interleave(kernel[1])[:, None], right.repeat(kernel[0])[:, None]
        rows = torch.arange(size[0], device=device) * stride_h + down  # (taps, H_out)
        columns = torch.arange(size[1], device=device) * stride_w + right  # (taps, W_out)
        by = offset.unflatten(1, (offset_groups, taps, 2))  # (N, offset_groups, taps, 2, H_out, W_out)
        x = by[:, :, :, 1] + columns[:, None, :].to(offset.dtype)
        y = by[:, :, :, 0] + rows[:, :, None].to(offset.dtype)
        places = torch.stack([x, y], -1).permute(0, 1, 3, 4, 2, 5)  # (N, offset_groups, H_out, W_out, taps, 2)
        found = []
        for number, part in enumerate(input.chunk(offset_groups, 1)):
            read: Any = at_pixels(part, places[:, number])  # type: ignore[arg-type]  # (N, C, H_out, W_out, taps)
            if use_mask:
                read = read * mask.unflatten(1, (offset_groups, taps))[:, number].permute(0, 2, 3, 1)[:, None]
            found.append(read.movedim(4, 2).flatten(1, 2))
        joined = torch.cat(found, 1)  # (N, C * taps, H_out, W_out)
        result = F.conv2d(joined, weight.flatten(1)[:, :, None, None], bias, groups=groups)
    return result.to(given)
