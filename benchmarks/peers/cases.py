"""What is compared: ops and small models as plain modules, with inputs that are split along their last dim."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS = 8
IGNORED = 255


class Size(NamedTuple):
    """Of the input image: batch, rows, columns, and the numbers it is made of."""

    batch: int
    height: int
    width: int
    dtype: torch.dtype


class Case(NamedTuple):
    """A module, its inputs (each split along the width), and the sizes it is asked at."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[Size], tuple[Tensor, ...]]
    exact_height: int
    widths: tuple[int, int, int]  # one that every stride divides evenly, and two that they do not
    timed: Size
    tiny: Size | None  # for microseconds a call; None for a model

    def exact(self, width: int) -> Size:
        return Size(2, self.exact_height, width, torch.float64)


class Applied(nn.Module):
    """A function of tensors as a module without parameters."""

    def __init__(self, function: Callable[..., Tensor]):
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> Tensor:
        return self.function(*values)


class SqueezeExcite(nn.Module):
    """Channels scaled by what the mean over the whole image says."""

    def __init__(self) -> None:
        super().__init__()
        self.excite = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.excite(x.mean((2, 3), keepdim=True)).sigmoid()


class Tokens(nn.Module):
    """The image as a sequence, and a linear layer on each token."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, 2 * CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(2).transpose(1, 2))


class Logits(nn.Module):
    """A `transformers` model as the user calls it; only its logits are returned."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Any:
        return self.model(pixel_values=image).logits


def noise(size: Size, channels: int, seed: int = 0) -> Tensor:
    """(N, C, H, W), the same on every rank."""
    generator = torch.Generator().manual_seed(seed + size.width)
    shape = (size.batch, channels, size.height, size.width)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(size.dtype)


def feature_map(size: Size) -> tuple[Tensor, ...]:
    """One map."""
    return (noise(size, CHANNELS),)


def two_maps(size: Size) -> tuple[Tensor, ...]:
    """A map and what it is compared with."""
    return noise(size, CHANNELS), noise(size, CHANNELS, seed=1)


def labelled(size: Size) -> tuple[Tensor, ...]:
    """Logits, and a class for every pixel."""
    generator = torch.Generator().manual_seed(size.width)
    return noise(size, CHANNELS), torch.randint(CHANNELS, (size.batch, size.height, size.width), generator=generator)


def partly_labelled(size: Size) -> tuple[Tensor, ...]:
    """More is ignored on the right: the counts differ between the ranks."""
    logits, labels = labelled(size)
    return logits, labels.masked_fill(noise(size, 1, seed=2)[:, 0] < torch.linspace(-2, 1, size.width), IGNORED)


def picture(size: Size) -> tuple[Tensor, ...]:
    """Three channels."""
    return (noise(size, 3),)


class LastMap(nn.Module):
    """A `transformers` backbone as the user calls it; only its deepest feature map is returned."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Any:
        return self.model(pixel_values=image).feature_maps[-1]


CONVNEXT = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1], "layer_scale_init_value": 0.5, "num_labels": 4}


def convnext() -> nn.Module:
    """Image to logits of 4 classes."""
    import transformers

    return Logits(transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**CONVNEXT)))


def convnext_backbone() -> nn.Module:
    """Image to the map at stride 32."""
    import transformers

    return LastMap(transformers.ConvNextBackbone(transformers.ConvNextConfig(**CONVNEXT)))


def resnet() -> nn.Module:
    """Image to logits of 4 classes, BatchNorm in train mode."""
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], layer_type="basic", num_labels=4
    )
    return Logits(transformers.ResNetForImageClassification(config))


def segformer() -> nn.Module:
    """Image to logits of 5 classes at stride 4."""
    import transformers

    config = transformers.SegformerConfig(
        hidden_sizes=[16, 16, 32, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        initializer_range=0.2,
        num_labels=5,
    )
    return Logits(transformers.SegformerForSemanticSegmentation(config))


def op(name: str, build: Callable[[], nn.Module], inputs: Callable[[Size], tuple[Tensor, ...]] = feature_map) -> Case:
    """A module on feature maps."""
    timed = Size(1, 128, 512, torch.float32)
    return Case(
        name, build, inputs, exact_height=16, widths=(64, 50, 37), timed=timed, tiny=Size(1, 8, 16, torch.float32)
    )


def function(
    name: str, call: Callable[..., Tensor], inputs: Callable[[Size], tuple[Tensor, ...]] = feature_map
) -> Case:
    """A function of feature maps."""
    return op(name, lambda: Applied(call), inputs)


def conv(kernel: int, stride: int, padding: int, suffix: str = "", **options: int) -> Case:
    """A convolution, named by kernel/stride/padding."""
    name = f"conv {kernel}/{stride}/{padding}{suffix}"
    return op(name, lambda: nn.Conv2d(CHANNELS, CHANNELS, kernel, stride, padding, **options))


def transposed(kernel: int, stride: int, padding: int) -> Case:
    """A transposed convolution, named likewise."""
    name = f"conv_transpose {kernel}/{stride}/{padding}"
    return op(name, lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, kernel, stride, padding))


def model(name: str, build: Callable[[], nn.Module]) -> Case:
    """A whole model on a picture."""
    # At stride 32 half of 256 columns are 4: a 7x7 window borrows from one neighbour only, as every library expects.
    timed = Size(1, 256, 512, torch.float32)
    return Case(name, build, picture, exact_height=64, widths=(256, 200, 150), timed=timed, tiny=None)


CASES = [
    function("relu", F.relu),
    conv(1, 1, 0),
    conv(3, 1, 1),
    conv(5, 1, 2),
    conv(7, 1, 3, " depthwise", groups=CHANNELS),
    conv(7, 2, 3),
    conv(3, 2, 1),
    conv(4, 4, 0),
    conv(3, 1, 2, " dilation 2", dilation=2),
    transposed(2, 2, 0),
    transposed(4, 2, 1),
    function("max_pool 3/2/1", lambda x: F.max_pool2d(x, 3, 2, 1)),
    function("avg_pool 2/2/0", lambda x: F.avg_pool2d(x, 2)),
    function("adaptive_avg_pool to 1", lambda x: F.adaptive_avg_pool2d(x, 1)),
    function("adaptive_avg_pool to 6", lambda x: F.adaptive_avg_pool2d(x, 6)),
    op("BatchNorm, train", lambda: nn.BatchNorm2d(CHANNELS)),
    function("interpolate to 24x80", lambda x: F.interpolate(x, (24, 80), mode="bilinear")),
    function("interpolate x2, aligned", lambda x: F.interpolate(x, None, 2, mode="bilinear", align_corners=True)),
    function("interpolate x0.5", lambda x: F.interpolate(x, None, 0.5, mode="bilinear")),
    function("pad reflect 2", lambda x: F.pad(x, (2, 2, 2, 2), mode="reflect")),
    op("squeeze-excite", SqueezeExcite),
    op("tokens to Linear", Tokens),
    function("cross_entropy", F.cross_entropy, labelled),
    function("cross_entropy, ignored", lambda x, y: F.cross_entropy(x, y, ignore_index=IGNORED), partly_labelled),
    function("mse_loss", F.mse_loss, two_maps),
    model("ConvNeXt, small, backbone", convnext_backbone),
    model("ConvNeXt, small, classifier", convnext),
    model("ResNet, small, classifier", resnet),
    model("SegFormer, small, segmentation", segformer),
]
BY_NAME = {case.name: case for case in CASES}


def built(case: Case, dtype: torch.dtype) -> nn.Module:
    """The case's module in train mode, with the same numbers in every process."""
    torch.manual_seed(0)
    return case.build().to(dtype).train()
