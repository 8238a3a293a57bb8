"""The networks measured, each with its image size and loss; sized to take a few GiB in one process."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.networks import UNet, convnext_tiny, layer


class Case(NamedTuple):
    """A network, what it is fed and what is minimised."""

    build: Callable[[], nn.Module]
    loss: Callable[[Any, Tensor, Tensor], Tensor]  # (model, image (N, 3, H, W), labels (N, H, W))
    shape: tuple[int, int, int, int]


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
