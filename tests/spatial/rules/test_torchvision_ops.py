"""Ops of torchvision, which need not be there: a detector's regions and boxes, and deformable convolutions."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fullframe as ff
from fullframe.errors import UnsupportedOp
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.cases import Op
from tests.spatial.corners import noise
from tests.spatial.torchvision_kernels import torchvision_ops
from tests.spatial.traffic import bytes_of_messages
from tests.spatial.values import found, on_all_meshes

# (sample, x1, y1, x2, y2): inside, across cuts, over each border, all of it, empty, outside, whole numbers.
REGIONS = torch.tensor([
    [0, 3.3, 4.1, 17.9, 12.6], [1, 0.2, 9.7, 43.1, 21.4], [0, -9.3, -7.2, 8.4, 60.1], [1, 20.4, 16.0, 51.3, 27.8],
    [0, 0, 0, 44, 26], [1, 12.0, 8.0, 12.0, 8.0], [0, 70.0, 50.0, 80.0, 61.0], [0, 4.0, 2.0, 32.0, 24.0],
], dtype=torch.float64)  # fmt: skip


def regions(scale: float, size: tuple[int, int], ratio: int, aligned: bool) -> Op:
    return lambda x: torchvision_ops().roi_align(x * 2, REGIONS, scale, *size, ratio, aligned)


def deformed(kernel: tuple[int, int], stride: int, groups: int, offset_groups: int, reach: float, mask: bool) -> Op:
    """A map (N, 4, H, W), whose offsets (whole numbers where `reach` is 0) are of a convolution of it."""
    taps, dilation, pad = kernel[0] * kernel[1], (1, 2), (kernel[0] // 2, kernel[1] - 1)
    weight = noise(6, 4 // groups, *kernel).detach()
    layer = noise(3 * taps * offset_groups, 4, *kernel).detach() * 0.1

    def op(x: Tensor, bias: Tensor) -> Tensor:
        made = F.conv2d(x, layer, None, stride, pad, dilation)
        offset = made[:, : 2 * taps * offset_groups].sin()
        if reach:
            offset = offset * reach
        else:
            offset = offset - offset.detach() + torch.arange(offset.shape[1])[:, None, None] % 3 - 1
        part = made[:, 2 * taps * offset_groups :].sigmoid() if mask else x.new_zeros(x.shape[0], 1)
        return torchvision_ops().deform_conv2d(
            x, weight, offset, part, bias, stride, stride, *pad, *dilation, groups, offset_groups, mask
        )

    return op


OPS: dict[str, tuple[Op, list[Tensor], list[Tensor]]] = {
    "regions": (regions(0.25, (3, 2), 2, True), [noise(2, 3, 7, 11)], []),
    "regions, as many samples as pixels": (regions(0.25, (2, 3), -1, False), [noise(2, 3, 7, 11)], []),
    "regions of a small map": (regions(0.125, (2, 2), 0, True), [noise(2, 3, 3, 5)], []),
    "deformed": (deformed((3, 3), 1, 1, 1, 2.5, False), [noise(2, 4, 7, 11)], [noise(6)]),
    "deformed by two groups": (deformed((2, 3), 1, 2, 2, 1.5, True), [noise(1, 4, 8, 9)], [noise(6)]),
    "deformed with a stride": (deformed((3, 3), 2, 2, 1, 9.0, True), [noise(1, 4, 9, 11)], [noise(6)]),
    "deformed by whole numbers": (deformed((3, 3), 1, 1, 1, 0.0, True), [noise(1, 4, 7, 11)], [noise(6)]),
}


def _ops(world: int) -> list[str]:
    return found(OPS, 1e-12, world)


def test_as_in_one_process() -> None:
    assert not on_all_meshes(_ops)


def detector(x: Tensor, anchors: Tensor) -> list[Tensor]:
    """Scores and boxes of a map (N, 6, H, W), the best of them after suppression, what lies in these, and a loss."""
    scores, moves = x[:, 0].flatten(1), x[:, 1:5].permute(0, 2, 3, 1).flatten(1, 2)
    best = scores.topk(12, 1).indices
    boxes = []
    for n in range(x.shape[0]):
        score, box = scores[n][best[n]].sigmoid(), anchors[best[n]] + moves[n][best[n]]
        kept = torchvision_ops().nms(box, score, 0.3)[:5]
        boxes.append(F.pad(box[kept].detach(), (1, 0), value=float(n)))
    inside = torchvision_ops().roi_align(x, torch.cat(boxes), 1.0, 3, 3, 2, True)
    every = torchvision_ops().nms(anchors + moves[0], scores[0], 0.5)
    return [inside.square().mean((1, 2, 3)), scores[0][every].sum()]


def _detector(world: int) -> list[str]:
    y, x = torch.meshgrid(torch.arange(7.0), torch.arange(11.0), indexing="ij")
    center = torch.stack([x, y, x, y], -1).flatten(0, 1).double()
    anchors = center + torch.tensor([-2.0, -2.5, 3.0, 1.5])
    return found({"detector": (detector, [noise(2, 6, 7, 11)], [anchors])}, 1e-12, world)


def test_a_detector() -> None:
    assert not on_all_meshes(_detector)


def _sent(height: int, width: int) -> tuple[float, float]:
    """Bytes sent, forward and backward, over those of the map."""
    x = ff.shard(noise(1, 8, 48, 64).detach(), mesh(height, width)).requires_grad_()
    region = torch.tensor([[0, 10.0, 10.0, 40.0, 30.0]], dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pooled = bytes_of_messages(lambda: torchvision_ops().roi_align(x, region, 1.0, 7, 7, 2, True).sum().backward())
        one = noise(8, 8, 3, 3).detach()
        bent = bytes_of_messages(lambda: torchvision_ops().deform_conv2d(
            x, one, F.pad(x, (0, 0, 0, 0, 0, 10)).sin(), x[:, :1], one[0, 0].new_zeros(8), *[1] * 8, False
        ).sum().backward())  # fmt: skip
    whole = x.numel() * x.local.element_size()
    return pooled / whole, bent / whole


def test_no_map_is_gathered() -> None:
    for pooled, bent in rank_group(2).run(_sent, 1, 2):
        assert 0 < pooled < 0.04 and 0 < bent < 0.4, (pooled, bent)


def _refused() -> list[str]:
    ops, x, said = torchvision_ops(), ff.shard(noise(1, 18, 6, 8).detach(), mesh(1, 2)), []
    weight, places = noise(2, 18, 3, 3).detach(), torch.full((1, 18, 6, 8), math.nan, dtype=torch.float64)
    for offset in (places, ff.shard(places, mesh(1, 2))):
        with pytest.raises(UnsupportedOp) as error:
            ops.deform_conv2d(x, weight, offset, offset[:, :9], None, *[1] * 8, False)
        said.append(str(error.value))
    with pytest.raises(UnsupportedOp) as error:
        ops.roi_align(x.transpose(1, 3), REGIONS[:1], 1.0, 2, 2, 2, True)
    return [*said, str(error.value)]


def test_what_is_refused() -> None:
    for one_alone, not_finite, another_dim in rank_group(2).run(_refused):
        assert "of its map and its offsets one alone is split" in one_alone
        assert "some positions are not finite" in not_finite
        assert "another dim" in another_dim
