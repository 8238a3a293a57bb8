"""The ops and networks that are asked about; small enough that all time is the answers'."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.networks import UNet

Op = Callable[[Tensor], Tensor]


def ops(channels: int) -> dict[str, nn.Module]:
    """Modules by name, for maps (N, channels, H, W)."""
    c = channels
    return {
        "conv 3x3": nn.Conv2d(c, c, 3, padding=1),
        "conv 3x3 stride 2": nn.Conv2d(c, 2 * c, 3, stride=2, padding=1),
        "conv 7x7 depthwise": nn.Conv2d(c, c, 7, padding=3, groups=c),
        "conv 3x3 dilated": nn.Conv2d(c, c, 3, padding=2, dilation=2),
        "conv transpose 2x2": nn.ConvTranspose2d(c, c, 2, stride=2),
        "batch norm": nn.BatchNorm2d(c),
        "instance norm": nn.InstanceNorm2d(c, affine=True),
        "group norm": nn.GroupNorm(1, c),
        "max pool 3x3": nn.MaxPool2d(3, 2, 1),
        "average pool": nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        "adaptive pool": nn.AdaptiveAvgPool2d(1),
        "bilinear x2": Function(lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear")),
        "bilinear to a size": Function(lambda x: F.interpolate(x, size=(23, 37), mode="bilinear", align_corners=True)),
        "nearest x2": Function(lambda x: F.interpolate(x, scale_factor=2.0)),
        "gelu": nn.GELU(),
        "softmax of columns": nn.Softmax(-1),
        "mean of channels": Function(lambda x: x.mean(1)),
        "mean": Function(lambda x: x.mean()),
        "padding": nn.ReflectionPad2d(2),
        "channels last linear": Function(lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (c,)).permute(0, 3, 1, 2)),
        "cross entropy": Function(lambda x: F.cross_entropy(x, x.detach().argmax(1))),
    }


class Function(nn.Module):
    """A function as a module without parameters."""

    def __init__(self, function: Op):
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


def networks() -> dict[str, Callable[[], nn.Module]]:
    """By name; each gives one map of an image (N, 3, H, W), and has norms, skips, windows or attention of its own."""
    return {"UNet": lambda: UNet(8, 3), "ResNet": _resnet, "ConvNeXt": _convnext, "Swin": _swin}


def _resnet() -> nn.Module:
    import transformers

    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 2, 1])
    return _LastMap(transformers.ResNetModel(config))


def _convnext() -> nn.Module:
    import transformers

    config = transformers.ConvNextConfig(hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 2, 1])
    return _LastMap(transformers.ConvNextModel(config))


def _swin() -> nn.Module:
    import transformers

    config = transformers.SwinConfig(
        embed_dim=24, depths=[2, 2], num_heads=[3, 6], window_size=4, drop_path_rate=0.0, image_size=(64, 128)
    )
    return _LastMap(transformers.SwinModel(config))


class _LastMap(nn.Module):
    """What a model of `transformers` calls its last hidden state."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).last_hidden_state  # type: ignore[no-any-return]


def image(device: torch.device, dtype: torch.dtype) -> Tensor:
    """One of 64 x 128, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, 3, 64, 128, generator=generator, dtype=torch.float64).to(device, dtype)
