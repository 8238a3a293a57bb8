"""Networks in the shapes users write them, narrow enough for float64 tests: U-Net, FPN, ASPP, lift-splat, unrolled GRU.

Plain torch; nothing here knows that a tensor may be split.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_bn_relu(inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    padding = dilation * (kernel // 2)
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def pair(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(conv_bn_relu(inputs, outputs), conv_bn_relu(outputs, outputs))


class UNet(nn.Module):
    """Max-pooled encoder, bilinear decoder; odd sizes are padded to the skip's size before the concatenation."""

    def __init__(self, width: int = 4, depth: int = 4, classes: int = 5):
        super().__init__()
        widths = [width * 2**level for level in range(depth)] + [width * 2 ** (depth - 1)]
        self.stem = pair(3, width)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), pair(above, below)) for above, below in itertools.pairwise(widths)
        )
        below = widths[-1]
        self.up = nn.ModuleList()
        for skip in reversed(widths[:-1]):
            out = max(skip // 2, width)
            self.up.append(pair(skip + below, out))
            below = out
        self.upsample = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.head = nn.Conv2d(below, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips = [self.stem(image)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up in self.up:
            x, skip = self.upsample(x), skips.pop()
            rows, columns = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = F.pad(x, [columns // 2, columns - columns // 2, rows // 2, rows - rows // 2])
            x = up(torch.cat([skip, x], dim=1))
        return self.head(x)  # (N, classes, H, W)


class FPN(nn.Module):
    """Feature pyramid: four strided stages, nearest upsampling to the lateral's size, a shared head with GroupNorm."""

    def __init__(self, width: int = 8, classes: int = 3):
        super().__init__()
        widths = [width, width, 2 * width, 2 * width]
        self.stem = nn.Sequential(conv_bn_relu(3, width, kernel=7, stride=2), nn.MaxPool2d(3, 2, 1))
        self.stages = nn.ModuleList(
            conv_bn_relu(before, after, stride=2) for before, after in zip([width, *widths], widths, strict=False)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(channels, width, 1) for channels in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in widths)
        self.head = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width), nn.ReLU())
        self.score = nn.Conv2d(width, classes, 3, padding=1)
        self.box = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, image: Tensor) -> list[tuple[Tensor, Tensor]]:
        features = [self.stem(image)]
        for stage in self.stages:
            features.append(stage(features[-1]))
        merged = self.lateral[-1](features[-1])
        levels = [self.smooth[-1](merged)]
        for index in reversed(range(len(self.lateral) - 1)):
            lateral = self.lateral[index](features[index + 1])
            merged = lateral + F.interpolate(merged, size=lateral.shape[-2:], mode="nearest")
            levels.insert(0, self.smooth[index](merged))
        levels.append(F.max_pool2d(levels[-1], kernel_size=1, stride=2))
        outputs = [self.head(level) for level in levels]
        return [(self.score(x), F.softplus(self.box(x))) for x in outputs]  # per level (N, classes, h, w), (N, 4, h, w)


class ASPP(nn.Module):
    """Atrous pyramid on a stride-8 backbone, with the global pooling branch; dilations reach past a rank's shard."""

    def __init__(self, width: int = 8, classes: int = 4, dilations: tuple[int, ...] = (2, 6, 12)):
        super().__init__()
        self.backbone = nn.Sequential(
            conv_bn_relu(3, width, stride=2),
            conv_bn_relu(width, width, stride=2),
            conv_bn_relu(width, 2 * width, stride=2),
            conv_bn_relu(2 * width, 2 * width, dilation=2),
            conv_bn_relu(2 * width, 2 * width, dilation=4),
        )
        self.branches = nn.ModuleList([conv_bn_relu(2 * width, width, kernel=1)])
        self.branches.extend(conv_bn_relu(2 * width, width, dilation=dilation) for dilation in dilations)
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv_bn_relu(2 * width, width, kernel=1))
        self.project = conv_bn_relu((len(dilations) + 2) * width, width, kernel=1)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.backbone(image)
        size = x.shape[-2:]
        pooled = F.interpolate(self.pooled(x), size=size, mode="bilinear", align_corners=False)
        x = self.project(torch.cat([*(branch(x) for branch in self.branches), pooled], dim=1))
        return F.interpolate(self.head(x), size=image.shape[-2:], mode="bilinear", align_corners=False)


class LiftSplat(nn.Module):
    """Several cameras to one bird's-eye grid: features times a depth distribution, splatted by the camera geometry.

    `pooling="matrix"` sums over pixels with a fixed splat matrix (as MatrixVT does); `pooling="scatter"` flattens to
    points and calls `index_add` (as Lift-Splat's voxel pooling does).
    """

    def __init__(
        self, *, cameras: int = 3, channels: int = 4, depths: int = 5, grid: int = 10, pooling: str = "matrix"
    ):
        super().__init__()
        self.cameras, self.channels, self.depths, self.grid, self.pooling = cameras, channels, depths, grid, pooling
        self.backbone = nn.Sequential(
            conv_bn_relu(3, 8, stride=2), conv_bn_relu(8, 8, stride=2), conv_bn_relu(8, 16, stride=2)
        )
        self.lift = nn.Conv2d(16, depths + channels, 1)
        self.bev = nn.Sequential(conv_bn_relu(channels, 8), conv_bn_relu(8, 8), nn.Conv2d(8, 1, 1))

    def cells(self, height: int, width: int, device: torch.device) -> Tensor:
        """The grid cell of every (camera, depth, row, column); points outside get the nearest cell of the border."""
        yaw = torch.arange(self.cameras, device=device).view(-1, 1, 1, 1) * (2 * torch.pi / self.cameras)
        depth = torch.linspace(0.1, 1.0, self.depths, device=device).view(1, -1, 1, 1)
        ray = torch.linspace(-0.8, 0.8, width, device=device).view(1, 1, 1, -1)
        row = torch.linspace(0.9, 1.1, height, device=device).view(1, 1, -1, 1)
        east, north = depth * row * torch.sin(yaw + ray), depth * row * torch.cos(yaw + ray)
        column, line = (((axis + 1) / 2 * self.grid).long().clamp(0, self.grid - 1) for axis in (east, north))
        return line * self.grid + column  # (cameras, depths, height, width)

    def forward(self, images: Tensor) -> Tensor:
        batch, cameras, _, _, _ = images.shape
        x = self.lift(self.backbone(images.flatten(0, 1)))
        height, width = x.shape[-2:]
        depth, features = x.split([self.depths, self.channels], dim=1)
        volume = depth.softmax(dim=1).unsqueeze(1) * features.unsqueeze(2)  # (B*cams, C, D, h, w)
        volume = volume.view(batch, cameras, self.channels, self.depths, height, width)
        cells = self.cells(height, width, images.device)
        if self.pooling == "matrix":
            splat = F.one_hot(cells, self.grid**2).to(volume.dtype)  # (cams, D, h, w, cells)
            bev = torch.einsum("bncdhw,ndhwg->bcg", volume, splat)
        else:
            points = volume.permute(0, 1, 3, 4, 5, 2).reshape(-1, self.channels)
            offsets = torch.arange(batch, device=images.device).view(-1, 1, 1, 1, 1) * self.grid**2
            index = (cells + offsets).reshape(-1)
            bev = torch.zeros(batch * self.grid**2, self.channels, dtype=volume.dtype, device=images.device)
            bev = bev.index_add(0, index, points).view(batch, -1, self.channels).transpose(1, 2)
        return self.bev(bev.reshape(batch, self.channels, self.grid, self.grid))  # (B, 1, grid, grid)


class SeparableGRU(nn.Module):
    """RAFT's update: a convolutional GRU along rows, then along columns."""

    def __init__(self, hidden: int, inputs: int):
        super().__init__()
        both = hidden + inputs
        self.gates = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(both, hidden, kernel, padding=padding) for _ in range(3))
            for kernel, padding in (((1, 5), (0, 2)), ((5, 1), (2, 0)))
        )

    def forward(self, hidden: Tensor, x: Tensor) -> Tensor:
        for update, reset, candidate in self.gates:
            both = torch.cat([hidden, x], dim=1)
            z, r = torch.sigmoid(update(both)), torch.sigmoid(reset(both))
            q = torch.tanh(candidate(torch.cat([r * hidden, x], dim=1)))
            hidden = (1 - z) * hidden + z * q
        return hidden


class UnrolledStereo(nn.Module):
    """RAFT-like stereo: shared features, a cost volume by shifts, `iterations` GRU updates with the same weights."""

    def __init__(self, width: int = 8, disparities: int = 6, iterations: int = 10):
        super().__init__()
        self.disparities, self.iterations = disparities, iterations
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3),
            nn.InstanceNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
        )
        self.context = nn.Sequential(conv_bn_relu(3, width, kernel=7, stride=2), nn.Conv2d(width, 2 * width, 3, 2, 1))
        self.motion = nn.Conv2d(disparities + 1, width, 3, padding=1)
        self.update = SeparableGRU(width, 2 * width)
        self.delta = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1))

    def cost_volume(self, left: Tensor, right: Tensor) -> Tensor:
        costs = [(left * right).mean(dim=1)]
        for shift in range(1, self.disparities):
            moved = F.pad(right[..., :-shift], (shift, 0))
            costs.append((left * moved).mean(dim=1))
        return torch.stack(costs, dim=1)  # (N, disparities, h, w)

    def forward(self, left: Tensor, right: Tensor) -> list[Tensor]:
        cost = self.cost_volume(self.features(left), self.features(right))
        hidden, context = torch.chunk(self.context(left), 2, dim=1)
        hidden, context = torch.tanh(hidden), torch.relu(context)
        disparity = torch.zeros_like(cost[:, :1])
        predictions = []
        for _ in range(self.iterations):
            disparity = disparity.detach()
            motion = F.relu(self.motion(torch.cat([cost, disparity], dim=1)))
            hidden = self.update(hidden, torch.cat([context, motion], dim=1))
            disparity = disparity + self.delta(hidden)
            full = F.interpolate(4 * disparity, size=left.shape[-2:], mode="bilinear", align_corners=True)
            predictions.append(full.squeeze(1))
        return predictions  # `iterations` maps (N, H, W)
