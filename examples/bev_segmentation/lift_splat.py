"""Several cameras to one bird's-eye view, after Lift, Splat, Shoot (Philion, Fidler, ECCV 2020). Plain PyTorch.

Each pixel of a camera's feature map is lifted to all depths at once, weighed by how likely each is, and what it holds
is added to the cells of the ground in which these points lie.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Grid(NamedTuple):
    """The ground around the vehicle: `cells` x `cells`, row 0 is furthest behind, column 0 furthest right; metres."""

    cells: int
    reach: float  # from the vehicle to the border
    depths: tuple[float, float, int]  # of the nearest and the furthest plane in front of a camera, and their number
    height: float = 4.0  # what is higher above the ground, or lower below it, is left out

    def planes(self, like: Tensor) -> Tensor:
        """(D,) metres."""
        return torch.linspace(*self.depths, dtype=like.dtype, device=like.device)


class Block(nn.Module):
    """Two convolutions and a shortcut, as in ResNet; `stride` of the first."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm, self.norm_second = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm(self.first(x)))
        return F.relu(self.norm_second(self.second(inner)) + self.shortcut(x))


class Cameras(nn.Module):
    """Images (M, 3, H, W) to (M, outputs, H/8, W/8)."""

    def __init__(self, width: int, outputs: int):
        super().__init__()
        self.down = nn.Sequential(Block(3, width, 2), Block(width, 2 * width, 2), Block(2 * width, 3 * width, 2))
        self.around = nn.Sequential(Block(3 * width, 4 * width, 2), Block(4 * width, 3 * width))
        self.head = nn.Sequential(Block(3 * width, 3 * width), nn.Conv2d(3 * width, outputs, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        around = F.interpolate(self.around(x), size=x.shape[-2:], mode="bilinear")
        return self.head(x + around)


class LiftSplat(nn.Module):
    """Vehicles seen from above, and the depth of each camera's pixels."""

    def __init__(self, grid: Grid, width: int = 16, channels: int = 24):
        super().__init__()
        self.grid, self.channels = grid, channels
        self.cameras = Cameras(width, grid.depths[2] + channels)
        self.bev = nn.Sequential(
            Block(channels, 32), Block(32, 64, 2), Block(64, 64), nn.Upsample(scale_factor=2, mode="bilinear"),
            Block(64, 32), nn.Conv2d(32, 1, 1),
        )  # fmt: skip

    def forward(self, image: Tensor, intrinsics: Tensor, extrinsics: Tensor) -> tuple[Tensor, Tensor]:
        """Images (N, cameras, 3, H, W), matrices as `fullframe.data.NuScenes` gives them.

        Logits of the ground (N, 1, cells, cells), and of the planes of depth (N * cameras, D, H/8, W/8).
        """
        samples = len(image)
        x = self.cameras(image.flatten(0, 1))
        depth, features = x.split([self.grid.depths[2], self.channels], 1)
        lifted = depth.softmax(1).unsqueeze(2) * features.unsqueeze(1)  # (N * cameras, D, C, h, w)
        points = lifted.permute(0, 1, 3, 4, 2).reshape(-1, self.channels)
        stride = image.shape[-1] // x.shape[-1]
        cell = cells(self.grid, intrinsics, extrinsics, (*x.shape[-2:], stride))
        each = self.grid.cells**2 + 1  # the last is for what lies outside
        cell = cell + each * torch.arange(samples, device=cell.device).view(-1, 1, 1, 1, 1)
        ground = points.new_zeros(samples * each, self.channels).index_add(0, cell.flatten(), points)
        ground = ground.view(samples, each, -1)[:, :-1].transpose(1, 2)
        return self.bev(ground.reshape(samples, -1, self.grid.cells, self.grid.cells)), depth


def cells(grid: Grid, intrinsics: Tensor, extrinsics: Tensor, seen: tuple[int, int, int]) -> Tensor:
    """The cell in which each point lies, (N, cameras, D, h, w) int64; `seen` is h, w and the pixels between two."""
    height, width, stride = seen
    planes = grid.planes(intrinsics)
    v = (torch.arange(height, device=planes.device) + 0.5) * stride
    u = (torch.arange(width, device=planes.device) + 0.5) * stride
    pixels = torch.stack(torch.broadcast_tensors(u, v[:, None], torch.ones_like(v)[:, None])).to(planes.dtype)
    rays = intrinsics.inverse() @ pixels.flatten(1)  # (N, cameras, 3, h * w)
    points = rays.unsqueeze(2) * planes.view(-1, 1, 1)  # (N, cameras, D, 3, h * w)
    rotation, translation = extrinsics[:, :, None, :3, :3], extrinsics[:, :, None, :3, 3:]
    x, y, z = (rotation @ points + translation).unbind(3)
    row, column = (((axis / grid.reach + 1) / 2 * grid.cells).floor().long() for axis in (x, y))
    inside = (row >= 0) & (row < grid.cells) & (column >= 0) & (column < grid.cells) & (z.abs() < grid.height)
    return torch.where(inside, row * grid.cells + column, grid.cells**2).unflatten(3, (height, width))
