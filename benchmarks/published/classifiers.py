"""The networks of the published step times, by their names there; weights are never made."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


def _made(kind: str, eager: bool = False, **settings: Any) -> nn.Module:
    """A classifier of transformers', of 1000 classes; `eager`: attention written out, as it was then."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(num_labels=1000, **settings)
    if eager:
        config._attn_implementation = "eager"
    return getattr(transformers, f"{kind}ForImageClassification")(config)  # type: ignore[no-any-return]


def _resnet(depths: Sequence[int], basic: bool = False) -> Callable[[], nn.Module]:
    widths = [64, 128, 256, 512] if basic else [256, 512, 1024, 2048]
    kind = "basic" if basic else "bottleneck"
    return partial(_made, "ResNet", depths=list(depths), hidden_sizes=widths, layer_type=kind)


def _convnext(depths: Sequence[int], first: int) -> Callable[[], nn.Module]:
    return partial(_made, "ConvNext", depths=list(depths), hidden_sizes=[first, 2 * first, 4 * first, 8 * first])


def _vit(width: int, layers: int, heads: int, patch: int = 16, size: int = 224) -> Callable[[], nn.Module]:
    return partial(
        _made, "ViT", eager=True, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, patch_size=patch, image_size=size,
    )  # fmt: skip


def _beit(width: int, layers: int, heads: int) -> Callable[[], nn.Module]:
    return partial(
        _made, "Beit", eager=True, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width, use_relative_position_bias=True, drop_path_rate=0.0,
    )  # fmt: skip


def _swin(width: int, depths: Sequence[int], heads: int, kind: str = "Swin", **window: int) -> Callable[[], nn.Module]:
    return partial(
        _made, kind, embed_dim=width, depths=list(depths), num_heads=[heads * 2**i for i in range(4)], **window
    )


def _regnet(kind: str, depths: Sequence[int], widths: Sequence[int], group: int) -> Callable[[], nn.Module]:
    return partial(_made, "RegNet", depths=list(depths), hidden_sizes=list(widths), groups_width=group, layer_type=kind)


def _poolformer(depths: Sequence[int], widths: Sequence[int]) -> Callable[[], nn.Module]:
    return partial(_made, "PoolFormer", depths=list(depths), hidden_sizes=list(widths), drop_path_rate=0.0)


def _efficientnet(width: float, depth: float, size: int, hidden: int) -> Callable[[], nn.Module]:
    return partial(
        _made, "EfficientNet", width_coefficient=width, depth_coefficient=depth, image_size=size, hidden_dim=hidden,
        drop_connect_rate=0.0, dropout_rate=0.0,
    )  # fmt: skip


class _VGG(nn.Module):
    """timm's, whose first two linear layers are convolutions."""

    def __init__(self, each: Sequence[int], norm: bool):
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for width, count in zip((64, 128, 256, 512, 512), each, strict=True):
            for _ in range(count):
                layers += [
                    nn.Conv2d(before, width, 3, padding=1),
                    *[nn.BatchNorm2d(width)] * norm,
                    nn.ReLU(inplace=True),
                ]
                before = width
            layers.append(nn.MaxPool2d(2))
        for kernel in (7, 1):
            layers += [nn.Conv2d(before, 4096, kernel), nn.ReLU(inplace=True)]
            before = 4096
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(4096, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.adaptive_avg_pool2d(self.features(x), 1).flatten(1))  # type: ignore[no-any-return]


class _Block(nn.Module):
    """ResNeXt's, with squeeze and excitation."""

    def __init__(self, before: int, width: int, after: int, stride: int):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, groups=32, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.excite = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(after, after // 16, 1), nn.ReLU(inplace=True),
            nn.Conv2d(after // 16, after, 1), nn.Sigmoid(),
        )  # fmt: skip
        shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.shortcut = shortcut if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return F.relu(y * self.excite(y) + self.shortcut(x), inplace=True)


def se_resnext101() -> nn.Module:
    """SE-ResNeXt101-32x4d."""
    stem = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    blocks: list[nn.Module] = []
    before = 64
    for stage, count in enumerate((3, 4, 23, 3)):
        for number in range(count):
            after = 256 * 2**stage
            blocks.append(_Block(before, after // 2, after, 2 if stage and not number else 1))
            before = after
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000))


_SMALL, _LARGE = (2, 2, 6, 2), (2, 2, 18, 2)
_POOLED = [64, 128, 320, 512]

CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": _resnet([2, 2, 2, 2], basic=True),
    "resnet34": _resnet([3, 4, 6, 3], basic=True),
    "resnet50": _resnet([3, 4, 6, 3]),
    "resnet101": _resnet([3, 4, 23, 3]),
    "resnet152": _resnet([3, 8, 36, 3]),
    "vgg11": partial(_VGG, (1, 1, 2, 2, 2), norm=False),
    "vgg16": partial(_VGG, (2, 2, 3, 3, 3), norm=False),
    "vgg13_bn": partial(_VGG, (2, 2, 2, 2, 2), norm=True),
    "vgg19_bn": partial(_VGG, (2, 2, 4, 4, 4), norm=True),
    "convnext_tiny": _convnext([3, 3, 9, 3], 96),
    "convnext_small": _convnext([3, 3, 27, 3], 96),
    "convnext_base": _convnext([3, 3, 27, 3], 128),
    "convnext_large": _convnext([3, 3, 27, 3], 192),
    "convnext_xlarge_in22ft1k": _convnext([3, 3, 27, 3], 256),
    "vit_tiny_patch16_224": _vit(192, 12, 3),
    "vit_small_patch16_224": _vit(384, 12, 6),
    "vit_base_patch16_224": _vit(768, 12, 12),
    "vit_large_patch16_224": _vit(1024, 24, 16),
    "vit_small_patch32_224": _vit(384, 12, 6, 32),
    "vit_base_patch32_224": _vit(768, 12, 12, 32),
    "vit_base_patch32_384": _vit(768, 12, 12, 32, 384),
    "vit_small_patch16_384": _vit(384, 12, 6, 16, 384),
    "vit_tiny_patch16_384": _vit(192, 12, 3, 16, 384),
    "vit_large_patch32_224": _vit(1024, 24, 16, 32),
    "beit_base_patch16_224": _beit(768, 12, 12),
    "beit_large_patch16_224": _beit(1024, 24, 16),
    "swin_tiny_patch4_window7_224": _swin(96, _SMALL, 3),
    "swin_small_patch4_window7_224": _swin(96, _LARGE, 3),
    "swin_base_patch4_window7_224": _swin(128, _LARGE, 4),
    "swin_large_patch4_window7_224": _swin(192, _LARGE, 6),
    "swinv2_tiny_window8_256": _swin(96, _SMALL, 3, "Swinv2", window_size=8, image_size=256),
    "swinv2_base_window8_256": _swin(128, _LARGE, 4, "Swinv2", window_size=8, image_size=256),
    "regnetx_002": _regnet("x", [1, 1, 4, 7], [24, 56, 152, 368], 8),
    "regnetx_016": _regnet("x", [2, 4, 10, 2], [72, 168, 408, 912], 24),
    "regnetx_040": _regnet("x", [2, 5, 14, 2], [80, 240, 560, 1360], 40),
    "regnetx_080": _regnet("x", [2, 5, 15, 1], [80, 240, 720, 1920], 120),
    "regnetx_160": _regnet("x", [2, 6, 13, 1], [256, 512, 896, 2048], 128),
    "regnety_016": _regnet("y", [2, 6, 17, 2], [48, 120, 336, 888], 24),
    "regnety_040": _regnet("y", [2, 6, 12, 2], [128, 192, 512, 1088], 64),
    "regnety_080": _regnet("y", [2, 4, 10, 1], [168, 448, 896, 2016], 56),
    "regnety_160": _regnet("y", [2, 4, 11, 1], [224, 448, 1232, 3024], 112),
    "poolformer_s12": _poolformer([2, 2, 6, 2], _POOLED),
    "poolformer_s36": _poolformer([6, 6, 18, 6], _POOLED),
    "poolformer_m48": _poolformer([8, 8, 24, 8], [96, 192, 384, 768]),
    "efficientnet_b0": _efficientnet(1.0, 1.0, 224, 1280),
    "efficientnet_b3": _efficientnet(1.2, 1.4, 288, 1536),
    "efficientnet_b4": _efficientnet(1.4, 1.8, 320, 1792),
    "mobilenetv2_100": partial(_made, "MobileNetV2"),
    "mobilevit_s": partial(_made, "MobileViT"),
    "se_resnext101_32x4d": se_resnext101,
}
