"""The networks that several benchmarks measure, random weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convnext_tiny() -> nn.Module:
    """`transformers` ConvNextModel at the published tiny size, no stochastic depth."""
    import transformers

    torch.manual_seed(0)
    config = transformers.ConvNextConfig(
        hidden_sizes=[96, 192, 384, 768], depths=[3, 3, 9, 3], layer_scale_init_value=0.1, drop_path_rate=0.0
    )
    return transformers.ConvNextModel(config)


def resnet50() -> nn.Module:
    """`transformers` ResNetModel at its default size, ResNet-50."""
    import transformers

    torch.manual_seed(0)
    return transformers.ResNetModel(transformers.ResNetConfig())


class UNet(nn.Module):
    """Five resolutions, max pooling down, bilinear up, skips concatenated."""

    def __init__(self, width: int = 32, depth: int = 4, classes: int = 8):
        super().__init__()
        widths = [width * 2**level for level in range(depth)] + [width * 2 ** (depth - 1)]
        self.down = nn.ModuleList(pair(before, after) for before, after in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(pair(2 * widths[level], widths[max(level - 1, 0)]) for level in reversed(range(depth)))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down[:-1]:
            skips.append(down(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.down[-1](x)
        for up in self.up:
            skip = skips.pop()
            x = F.interpolate(x, size=skip.shape[-2:], mode="bilinear", align_corners=False)
            x = up(torch.cat([skip, x], dim=1))
        return self.head(x)


class UNet3D(nn.Module):
    """Three resolutions of volumes: strided convolutions down, transposed ones up, instance norm, skips joined."""

    def __init__(self, width: int = 16, classes: int = 8):
        super().__init__()
        self.enter = self._layers(1, width)
        self.down = nn.ModuleList(self._layers(width * 2**n, width * 2 ** (n + 1), 2) for n in range(2))
        self.grow = nn.ModuleList(nn.ConvTranspose3d(width * 2 ** (n + 1), width * 2**n, 2, 2) for n in (1, 0))
        self.up = nn.ModuleList(self._layers(width * 2 ** (n + 1), width * 2**n) for n in (1, 0))
        self.head = nn.Conv3d(width, classes, 1)

    @staticmethod
    def _layers(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv3d(inputs, outputs, 3, stride, 1, bias=False), nn.InstanceNorm3d(outputs, affine=True), nn.ReLU(),
            nn.Conv3d(outputs, outputs, 3, 1, 1, bias=False), nn.InstanceNorm3d(outputs, affine=True), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.enter(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skips.pop(), grow(x)], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


def pair(inputs: int, outputs: int) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(*layer(inputs, outputs), *layer(outputs, outputs))


def layer(inputs: int, outputs: int) -> nn.Sequential:
    """Convolution 3x3, BatchNorm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )
