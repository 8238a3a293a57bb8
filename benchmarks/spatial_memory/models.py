"""The networks measured, each with its image size and loss; sized to take a few GiB in one process."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.spatial_efficiency.measure import convnext_tiny


class Case(NamedTuple):
    """A network, what it is fed and what is minimised."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor, Tensor], Tensor]  # (model, image (N, 3, H, W), labels (N, H, W))
    shape: tuple[int, int, int, int]


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


def pair(inputs: int, outputs: int) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(*layer(inputs, outputs), *layer(outputs, outputs))


def layer(inputs: int, outputs: int) -> nn.Sequential:
    """Convolution 3x3, BatchNorm, ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


def nine_layers() -> nn.Module:
    """Nine layers of 32 channels at full resolution."""
    return nn.Sequential(*(layer(3 if first else 32, 32) for first in [True] + 8 * [False]))


def square_loss(model: Any, image: Tensor, labels: Tensor) -> Tensor:
    """The mean square of the output."""
    return model(image).square().mean()


def segmentation_loss(model: Any, image: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy at every pixel."""
    return F.cross_entropy(model(image), labels)


def feature_loss(model: Any, image: Tensor, labels: Tensor) -> Tensor:
    """Reads the last feature map and the pooled output, so that every parameter has a gradient."""
    output = model(pixel_values=image)
    return output.last_hidden_state.square().mean() + output.pooler_output.tanh().mean()


CASES = {
    "nine conv-BN-ReLU": Case(nine_layers, square_loss, (1, 3, 1024, 2048)),
    "UNet": Case(UNet, segmentation_loss, (1, 3, 768, 1024)),
    "ConvNeXt-tiny": Case(convnext_tiny, feature_loss, (1, 3, 768, 2048)),
}
