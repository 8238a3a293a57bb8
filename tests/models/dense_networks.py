"""Networks in the shapes users write them: nested and gated U-Nets, pyramids, branches, volumes, super-resolution.

Plain torch; nothing here knows that a tensor may be split.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.networks import conv_bn_relu, pair


class NestedUNet(nn.Module):
    """UNet++: every node sees all earlier nodes of its row and the upsampled one below; averaged deep supervision."""

    def __init__(self, width: int = 4, depth: int = 4, classes: int = 5):
        super().__init__()
        widths = [width * 2**row for row in range(depth)]
        self.nodes = nn.ModuleDict()
        for row in range(depth):
            self.nodes[f"{row},0"] = pair(widths[row - 1] if row else 3, widths[row])
            for column in range(1, depth - row):
                self.nodes[f"{row},{column}"] = pair(column * widths[row] + widths[row + 1], widths[row])
        self.heads = nn.ModuleList(nn.Conv2d(width, classes, 1) for _ in range(depth - 1))
        self.depth = depth

    def forward(self, image: Tensor) -> Tensor:
        rows: list[list[Tensor]] = [[] for _ in range(self.depth)]
        x = image
        for row in range(self.depth):
            x = self.nodes[f"{row},0"](F.max_pool2d(x, 2, ceil_mode=True) if row else x)
            rows[row].append(x)
        for column in range(1, self.depth):
            for row in range(self.depth - column):
                below = rows[row + 1][column - 1]
                below = F.interpolate(below, size=rows[row][0].shape[2:], mode="bilinear", align_corners=True)
                rows[row].append(self.nodes[f"{row},{column}"](torch.cat([*rows[row], below], dim=1)))
        return sum(head(x) for head, x in zip(self.heads, rows[0][1:], strict=True)) / len(self.heads)


class AttentionGate(nn.Module):
    """Attention U-Net's gate: the decoder's signal weighs the pixels of the skip."""

    def __init__(self, channels: int, inner: int):
        super().__init__()
        self.signal, self.skip = nn.Conv2d(channels, inner, 1), nn.Conv2d(channels, inner, 1, bias=False)
        self.score = nn.Sequential(nn.Conv2d(inner, 1, 1), nn.BatchNorm2d(1), nn.Sigmoid())

    def forward(self, signal: Tensor, skip: Tensor) -> Tensor:
        return skip * self.score(torch.relu(self.signal(signal) + self.skip(skip)))


class AttentionUNet(nn.Module):
    """Transposed convolutions up, gated skips, instance norm in the stem, the odd row or column cropped."""

    def __init__(self, width: int = 4, classes: int = 5):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.InstanceNorm2d(width, affine=True), nn.ReLU())
        self.down = nn.ModuleList(pair(width * 2**n, width * 2 ** (n + 1)) for n in range(3))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(width * 2 ** (n + 1), width * 2**n, 3, stride=2, padding=1, output_padding=1)
            for n in range(3)
        )
        self.gates = nn.ModuleList(AttentionGate(width * 2**n, width) for n in range(3))
        self.join = nn.ModuleList(pair(width * 2 ** (n + 1), width * 2**n) for n in range(3))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        x, skips = self.stem(image), []
        for down in self.down:
            skips.append(x)
            x = down(F.avg_pool2d(x, 2, ceil_mode=True))
        for n in reversed(range(3)):
            skip = skips[n]
            x = self.up[n](x)[:, :, : skip.shape[2], : skip.shape[3]]
            x = self.join[n](torch.cat([self.gates[n](x, skip), x], dim=1))
        return self.head(x)


class PSPNet(nn.Module):
    """Pyramid pooling on a dilated backbone: average pools to 1, 2, 3 and 6 bins."""

    def __init__(self, width: int = 8, classes: int = 5):
        super().__init__()
        self.backbone = nn.Sequential(
            conv_bn_relu(3, width, stride=2),
            nn.MaxPool2d(3, 2, 1),
            conv_bn_relu(width, 2 * width, stride=2),
            conv_bn_relu(2 * width, 2 * width, dilation=2),
        )
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(bins), conv_bn_relu(2 * width, width, kernel=1)) for bins in (1, 2, 3, 6)
        )
        self.head = nn.Sequential(conv_bn_relu(6 * width, width), nn.Conv2d(width, classes, 1))

    def forward(self, image: Tensor) -> Tensor:
        x = self.backbone(image)
        size = x.shape[-2:]
        pools = [F.interpolate(pool(x), size=size, mode="bilinear", align_corners=False) for pool in self.pools]
        return F.interpolate(self.head(torch.cat([x, *pools], dim=1)), size=image.shape[-2:], mode="bilinear")


class DenseNet(nn.Module):
    """Dense blocks that concatenate, transitions that halve, a classifier."""

    def __init__(self, growth: int = 4, blocks: tuple[int, ...] = (2, 3, 2), classes: int = 4):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        channels, self.blocks, self.transitions = 8, nn.ModuleList(), nn.ModuleList()
        for layers in blocks:
            self.blocks.append(nn.ModuleList(self._layer(channels + n * growth, growth) for n in range(layers)))
            channels += layers * growth
            self.transitions.append(
                nn.Sequential(
                    nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, channels // 2, 1), nn.AvgPool2d(2, 2)
                )
            )
            channels //= 2
        self.classifier = nn.Linear(channels, classes)

    @staticmethod
    def _layer(inputs: int, growth: int) -> nn.Sequential:
        return nn.Sequential(
            nn.BatchNorm2d(inputs), nn.ReLU(), conv_bn_relu(inputs, 8, kernel=1), nn.Conv2d(8, growth, 3, 1, 1)
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            for layer in block:
                x = torch.cat([x, layer(x)], 1)
            x = transition(x)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(F.relu(x), (1, 1)), 1))


class SqueezeExcite(nn.Module):
    """MobileNetV3's channel attention."""

    def __init__(self, channels: int):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(channels, max(channels // 2, 8)),
            nn.ReLU(),
            nn.Linear(max(channels // 2, 8), channels),
            nn.Hardsigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        n, c, _, _ = x.size()
        return x * self.fc(self.pool(x).view(n, c)).view(n, c, 1, 1)


class MobileNetV3(nn.Module):
    """Inverted residuals with depthwise convolutions, hard swish and squeeze-excite; LR-ASPP head."""

    def __init__(self, classes: int = 5):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish())
        rows = [(8, 16, 8, 3, 1), (8, 24, 16, 5, 2), (16, 32, 16, 5, 1), (16, 32, 24, 3, 2)]
        self.blocks = nn.ModuleList(self._block(*row) for row in rows)
        self.branch = conv_bn_relu(24, 16, kernel=1)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(24, 16, 1, bias=False), nn.Sigmoid())
        self.low, self.high = nn.Conv2d(8, classes, 1), nn.Conv2d(16, classes, 1)

    @staticmethod
    def _block(inputs: int, inner: int, outputs: int, kernel: int, stride: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.Hardswish(inplace=True),
            nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            SqueezeExcite(inner),
            nn.Hardswish(),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, image: Tensor) -> Tensor:
        x = low = self.blocks[0](self.stem(image))
        for block in self.blocks[1:]:
            y = block(x)
            x = x + y if x.shape == y.shape else y
        x = self.branch(x) * self.gate(x)
        x = F.interpolate(x, size=low.shape[-2:], mode="bilinear", align_corners=False)
        return F.interpolate(self.high(x) + self.low(low), size=image.shape[-2:], mode="bilinear", align_corners=False)


class GhostNet(nn.Module):
    """Ghost modules: half of the channels by a cheap depthwise convolution of the other half; channel shuffle."""

    def __init__(self, width: int = 8, classes: int = 4):
        super().__init__()
        self.stem = conv_bn_relu(3, width, stride=2)
        self.primary = nn.ModuleList(conv_bn_relu(width, width // 2, kernel=1) for _ in range(3))
        self.cheap = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width // 2, width // 2, 3, 1, 1, groups=width // 2, bias=False), nn.BatchNorm2d(width // 2)
            )
            for _ in range(3)
        )
        self.down = nn.ModuleList(nn.Conv2d(width, width, 5, 2, 2, groups=width) for _ in range(3))
        self.classifier = nn.Conv2d(width, classes, 1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for primary, cheap, down in zip(self.primary, self.cheap, self.down, strict=True):
            y = primary(x)
            y = torch.cat([y, cheap(y)], dim=1)
            n, c, h, w = y.shape
            y = y.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)
            x = down(x + y)
        return self.classifier(x.mean(dim=(2, 3), keepdim=True)).flatten(1)


class HRNet(nn.Module):
    """Parallel branches at three resolutions that exchange by strided convolutions and nearest upsampling."""

    def __init__(self, width: int = 4, classes: int = 5):
        super().__init__()
        self.widths = [width, 2 * width, 4 * width]
        self.stem = nn.Sequential(conv_bn_relu(3, width, stride=2), conv_bn_relu(width, width))
        self.start = nn.ModuleList(
            conv_bn_relu(a, b, stride=2) for a, b in zip(self.widths, self.widths[1:], strict=False)
        )
        self.branches = nn.ModuleList(pair(w, w) for w in self.widths)
        self.fuse = nn.ModuleList(nn.ModuleList(self._path(a, b) for a in range(3)) for b in range(3))
        self.head = nn.Conv2d(sum(self.widths), classes, 1)

    def _path(self, source: int, target: int) -> nn.Module:
        inputs, outputs = self.widths[source], self.widths[target]
        if source >= target:
            return nn.Sequential(nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs))
        steps = [conv_bn_relu(inputs, inputs, stride=2) for _ in range(target - source - 1)]
        return nn.Sequential(*steps, nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, image: Tensor) -> Tensor:
        maps = [self.stem(image)]
        for start in self.start:
            maps.append(start(maps[-1]))
        maps = [branch(x) for branch, x in zip(self.branches, maps, strict=True)]
        fused = []
        for target, paths in enumerate(self.fuse):
            size = maps[target].shape[-2:]
            parts = [path(x) for path, x in zip(paths, maps, strict=True)]
            parts = [x if x.shape[-2:] == size else F.interpolate(x, size=size, mode="nearest") for x in parts]
            fused.append(F.relu(sum(parts)))
        size = fused[0].shape[-2:]
        x = torch.cat([F.interpolate(x, size=size, mode="bilinear", align_corners=True) for x in fused], dim=1)
        return F.interpolate(self.head(x), size=image.shape[-2:], mode="bilinear", align_corners=True)


class Hourglass(nn.Module):
    """A recursive hourglass and soft-argmax coordinates of its heat maps."""

    def __init__(self, width: int = 8, joints: int = 3, depth: int = 3):
        super().__init__()
        self.stem = conv_bn_relu(3, width, kernel=7, stride=2)
        self.side = nn.ModuleList(conv_bn_relu(width, width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2, 2), conv_bn_relu(width, width)) for _ in range(depth))
        self.bottom = conv_bn_relu(width, width)
        self.head = nn.Conv2d(width, joints, 1)

    def level(self, x: Tensor, depth: int) -> Tensor:
        if depth == len(self.side):
            return self.bottom(x)
        below = self.level(self.down[depth](x), depth + 1)
        side = self.side[depth](x)
        return side + F.interpolate(below, size=side.shape[-2:], mode="nearest")

    def forward(self, image: Tensor) -> Tensor:
        heat = self.head(self.level(self.stem(image), 0))
        n, joints, height, width = heat.shape
        heat = heat.flatten(2).softmax(dim=-1).view(n, joints, height, width)
        rows = torch.linspace(-1, 1, height, dtype=heat.dtype, device=heat.device)
        columns = torch.linspace(-1, 1, width, dtype=heat.dtype, device=heat.device)
        y, x = (heat.sum(dim=3) * rows).sum(dim=2), (heat.sum(dim=2) * columns).sum(dim=2)
        return torch.stack([x, y], dim=-1)  # (N, joints, 2)


class UNet3D(nn.Module):
    """A U-Net on volumes (N, C, D, H, W): 3-D convolutions, pools, instance norm and trilinear upsampling."""

    def __init__(self, width: int = 4, classes: int = 3):
        super().__init__()
        self.enter = self._block(1, width)
        self.down = nn.ModuleList([self._block(width, 2 * width), self._block(2 * width, 4 * width)])
        self.up = nn.ModuleList([self._block(6 * width, 2 * width), self._block(3 * width, width)])
        self.head = nn.Conv3d(width, classes, 1)

    @staticmethod
    def _block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv3d(inputs, outputs, 3, padding=1),
            nn.InstanceNorm3d(outputs, affine=True),
            nn.LeakyReLU(0.1, inplace=True),
            nn.Conv3d(outputs, outputs, (1, 3, 3), padding=(0, 1, 1)),
            nn.BatchNorm3d(outputs),
            nn.ReLU(),
        )

    def forward(self, volume: Tensor) -> Tensor:
        skips = [self.enter(volume)]
        for down in self.down:
            skips.append(down(F.max_pool3d(skips[-1], (1, 2, 2))))
        x = skips.pop()
        for up in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[2:], mode="trilinear", align_corners=False)
            x = up(torch.cat([x, skip], dim=1))
        return self.head(x)


class EDSR(nn.Module):
    """Super-resolution: residual blocks without norm, pixel shuffle twice, a bicubic skip."""

    def __init__(self, width: int = 8, blocks: int = 2):
        super().__init__()
        self.head = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(True), nn.Conv2d(width, width, 3, 1, 1))
            for _ in range(blocks)
        )
        self.tail = nn.Sequential(
            nn.Conv2d(width, 4 * width, 3, 1, 1),
            nn.PixelShuffle(2),
            nn.Conv2d(width, 4 * width, 3, 1, 1),
            nn.PixelShuffle(2),
            nn.Conv2d(width, 3, 3, 1, 1),
        )

    def forward(self, image: Tensor) -> Tensor:
        x = skip = self.head(image)
        for block in self.body:
            x = x + 0.1 * block(x)
        return self.tail(x + skip) + F.interpolate(image, scale_factor=4, mode="bicubic", align_corners=False)


class CBAM(nn.Module):
    """Channel attention from average and max pools, then spatial attention from channel mean and max."""

    def __init__(self, width: int = 16, classes: int = 5):
        super().__init__()
        self.enter, self.leave = conv_bn_relu(3, width, stride=2), conv_bn_relu(width, width, stride=2)
        self.mlp = nn.Sequential(nn.Flatten(), nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, width))
        self.spatial = nn.Conv2d(2, 1, 7, padding=3)
        self.head = nn.ConvTranspose2d(width, classes, 4, stride=4)

    def forward(self, image: Tensor) -> Tensor:
        x = self.enter(image)
        scale = self.mlp(F.adaptive_avg_pool2d(x, 1)) + self.mlp(F.adaptive_max_pool2d(x, 1))
        x = x * torch.sigmoid(scale)[:, :, None, None]
        plane = torch.cat([x.mean(dim=1, keepdim=True), x.max(dim=1, keepdim=True)[0]], dim=1)
        return self.head(self.leave(x * torch.sigmoid(self.spatial(plane))))
