"""A small siamese stereo network: shared features, a cost volume over disparities, soft-argmin, refinement.

Plain PyTorch: nothing in this file knows of ranks or splits.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_block(channels_in: int, channels: int, kernel: int = 3, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    """Convolution that keeps the size at stride 1, batch norm, ReLU."""
    padding = dilation * (kernel - 1) // 2
    return nn.Sequential(
        nn.Conv2d(channels_in, channels, kernel, stride, padding, dilation, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


def volume_block(channels_in: int, channels: int) -> nn.Sequential:
    """The same over (disparity, height, width)."""
    return nn.Sequential(
        nn.Conv3d(channels_in, channels, 3, padding=1, bias=False), nn.BatchNorm3d(channels), nn.ReLU()
    )


class StereoNetwork(nn.Module):
    """Disparity of the left view in pixels, (N, 1, H, W), from a rectified pair of (N, 3, H, W) in 0 to 1.

    It can express disparities from 0 to 4 * (disparities - 1) pixels.
    """

    def __init__(self, channels: int = 32, groups: int = 16, disparities: int = 18):
        super().__init__()
        self.groups, self.disparities = groups, disparities
        self.to_half = conv_block(3, 16, kernel=5, stride=2)
        self.to_quarter = nn.Sequential(
            conv_block(16, channels, stride=2),
            conv_block(channels, channels),
            conv_block(channels, channels, dilation=2),
            conv_block(channels, channels, dilation=4),
            nn.Conv2d(channels, channels, 1),
        )
        self.aggregate = nn.Sequential(
            volume_block(groups, groups), volume_block(groups, groups), nn.Conv3d(groups, 1, 1, bias=False)
        )
        self.refine = nn.Sequential(
            conv_block(16 + 1, 16),
            conv_block(16, 16, dilation=2),
            conv_block(16, 16, dilation=4),
            nn.Conv2d(16, 1, 3, padding=1),
        )

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        """The refined disparity and the one before refinement, both (N, 1, H, W)."""
        height, width = left.shape[-2:]
        half = self.to_half(torch.cat([left, right]))  # both views through the same weights: (2N, 16, H/2, W/2)
        quarter = self.to_quarter(half)  # (2N, channels, H/4, W/4)
        cost = self.aggregate(self.cost_volume(*quarter.chunk(2))).squeeze(1)  # (N, disparities, H/4, W/4)
        steps = torch.arange(self.disparities, dtype=cost.dtype, device=cost.device).view(1, -1, 1, 1)
        coarse = (torch.softmax(cost, 1) * steps).sum(1, keepdim=True) * 4  # in pixels of the full size
        left_half = half.chunk(2)[0]
        coarse = F.interpolate(coarse, scale_factor=2, mode="bilinear")
        coarse = coarse[..., : left_half.shape[-2], : left_half.shape[-1]]
        fine = F.relu(coarse + self.refine(torch.cat([left_half, coarse / 32], 1)) * 4)
        full = F.interpolate(torch.cat([fine, coarse], 1), scale_factor=2, mode="bilinear")[..., :height, :width]
        return full[:, :1], full[:, 1:]

    def cost_volume(self, left: Tensor, right: Tensor) -> Tensor:
        """How well left (x) matches right (x - d), by groups of channels: (N, groups, disparities, H, W)."""
        # Of length sqrt(channels), so that a match is a matter of direction and not of contrast.
        left, right = (F.normalize(features, dim=1) * features.shape[1] ** 0.5 for features in (left, right))
        furthest = self.disparities - 1
        padded = F.pad(right, (furthest, 0))
        costs = []
        for d in range(self.disparities):
            shifted = padded[..., furthest - d : furthest - d + left.shape[-1]]
            costs.append((left * shifted).unflatten(1, (self.groups, -1)).mean(2))  # (N, groups, H, W)
        return torch.stack(costs, 2)
