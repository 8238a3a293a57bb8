"""The published set-ups as recipes; weights are never made, only shapes and the order of the steps matter."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullframe.recipe import Recipe

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def recipe(
    model: Callable[[], nn.Module],
    sample: dict[str, tuple[tuple[int, ...], torch.dtype]],
    batch_size: int,
    optimizer: Optimizer,
    loss: Callable[[Any, Any], Tensor] | None = None,
) -> Recipe:
    """A recipe whose sample has these shapes; without `loss` the model gives its own."""
    return Recipe(
        model=model,
        loss=loss or (lambda model, batch: model(**batch)),
        optimizer=optimizer,
        data=lambda: None,  # type: ignore[arg-type, return-value]
        sample=lambda: {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in sample.items()},
        batch_size=batch_size,
    )


def adam_one_by_one(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW as before torch 2.0, a parameter at a time."""
    return torch.optim.AdamW(parameters, foreach=False)


def sgd_one_by_one(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay, a parameter at a time."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4, foreach=False)


def adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The Trainer's."""
    from transformers.optimization import Adafactor

    return Adafactor(parameters, scale_parameter=False, relative_step=False, lr=1e-4)  # type: ignore[no-any-return]


def _bert_large(head: str) -> nn.Module:
    """bert-large-uncased, attention as written out at the time."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    config._attn_implementation = "eager"
    return getattr(transformers, f"BertFor{head}")(config)  # type: ignore[no-any-return]


def bert_large() -> nn.Module:
    """BERT-large with a classifier."""
    return _bert_large("SequenceClassification")


def bert_answers() -> nn.Module:
    """BERT-large that finds an answer's first and last token."""
    return _bert_large("QuestionAnswering")


def bert_loss(model: Any, batch: Any) -> Tensor:
    """The model's own."""
    return model(input_ids=batch["input_ids"], labels=batch["labels"]).loss  # type: ignore[no-any-return]


def answers_loss(model: Any, batch: Any) -> Tensor:
    """The model's own."""
    found = model(input_ids=batch["input_ids"], start_positions=batch["start"], end_positions=batch["end"])
    return found.loss  # type: ignore[no-any-return]


class _Softmax(torch.autograd.Function):
    """Softmax, or its logarithm, that keeps its input for backward beside its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, log: bool) -> Tensor:
        result = (torch.log_softmax if log else torch.softmax)(x, dim)
        ctx.save_for_backward(x, result)
        ctx.dim, ctx.log = dim, log
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        x, result = ctx.saved_tensors
        backward = torch._log_softmax_backward_data if ctx.log else torch._softmax_backward_data
        return backward(gradient, result, ctx.dim, x.dtype), None, None


@contextmanager
def inputs_of_softmax_kept() -> Iterator[None]:
    """As before torch 1.11 (pytorch/pytorch issue 64000, mended by pull request 65242)."""

    def softmax(x: Tensor, dim: int, **options: Any) -> Tensor:
        return _Softmax.apply(x.float(), dim, False)  # type: ignore[no-any-return]

    def cross_entropy(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
        return F.nll_loss(_Softmax.apply(logits.float(), 1, True), target)

    with patch.object(F, "softmax", softmax), patch.object(F, "cross_entropy", cross_entropy):
        yield


def convnext_xl(stochastic_depth: float) -> nn.Module:
    """ConvNeXt-XL's features, with a class a frame."""
    import transformers

    config = transformers.ConvNextConfig(
        hidden_sizes=[256, 512, 1024, 2048], depths=[3, 3, 27, 3], drop_path_rate=stochastic_depth, num_labels=1000
    )
    return transformers.ConvNextForImageClassification(config)


def classification_loss(model: Any, batch: Any) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(batch["image"]).logits, batch["target"])


def vit_large() -> nn.Module:
    """ViT-L/16 for 1000 classes."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    )
    return transformers.ViTForImageClassification(config)


class Simplified(nn.Module):
    """torchgpipe's simplified U-Net of `convolutions` a cell and `channels` filters."""

    def __init__(self, convolutions: int, channels: int, depth: int = 5):
        super().__init__()

        def cell(before: int, between: int, after: int) -> nn.Sequential:
            sizes = [before, *[between] * (convolutions - 1), after]
            return nn.Sequential(*(_layer(a, b) for a, b in itertools.pairwise(sizes)))

        width = [int(channels * 2.0**level) for level in range(-1, depth + 1)]  # from half of `channels`
        self.down = nn.ModuleList(
            cell(3 if level == 0 else width[level], width[level + 1], width[level + 1]) for level in range(depth)
        )
        self.middle = cell(width[depth], width[depth + 1], width[depth])
        self.up = nn.ModuleList(cell(width[level + 2], width[level], width[level]) for level in reversed(range(depth)))
        self.head = nn.Conv2d(width[0], 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up in self.up:
            x = up(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], dim=1))
        return self.head(x)  # type: ignore[no-any-return]


def _layer(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1, bias=False),
        nn.Dropout2d(0.1),
        nn.InstanceNorm2d(after),
        nn.LeakyReLU(0.01),
    )


def binary_loss(model: Any, batch: Any) -> Tensor:
    """Logits against 0 to 1 at every pixel."""
    return F.binary_cross_entropy_with_logits(model(batch["image"]), batch["target"])


class UPerNet(nn.Module):
    """MMSegmentation's UPerNet: heads one after the other, each with its loss and its accuracy."""

    def __init__(self, backbone: Any, channels: list[int], classes: int):
        super().__init__()
        import transformers
        from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

        config = transformers.UperNetConfig(
            backbone_config=backbone.config, num_labels=classes, hidden_size=512, auxiliary_in_channels=channels[2]
        )
        self.backbone = backbone
        self.head = UperNetHead(config, in_channels=channels)
        self.auxiliary = UperNetFCNHead(config, in_channels=channels)
        self.dropout = nn.Dropout2d(0.1)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        maps = self.backbone(image).feature_maps
        return self._loss(self.head, maps, target) + 0.4 * self._loss(self.auxiliary, maps, target)

    def _loss(self, head: nn.Module, maps: Any, target: Tensor) -> Tensor:
        logits = head(maps)
        logits = F.interpolate(logits, size=target.shape[-2:], mode="bilinear", align_corners=False)
        return F.cross_entropy(logits, target)


def upernet_convnext(widths: list[int], depths: list[int]) -> nn.Module:
    """On ConvNeXt, 150 classes, stochastic depth 0.4."""
    import transformers

    config = transformers.ConvNextConfig(
        hidden_sizes=widths, depths=depths, drop_path_rate=0.4, out_features=["stage1", "stage2", "stage3", "stage4"]
    )
    return UPerNet(transformers.ConvNextBackbone(config), widths, 150)


def upernet_swin(width: int, depths: list[int], heads: list[int]) -> nn.Module:
    """On Swin, 150 classes, stochastic depth 0.3."""
    import transformers

    config = transformers.SwinConfig(
        embed_dim=width, depths=depths, num_heads=heads, drop_path_rate=0.3, image_size=512,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config._attn_implementation = "eager"
    return UPerNet(transformers.SwinBackbone(config), [width, 2 * width, 4 * width, 8 * width], 150)


def upernet_resnet(depths: list[int], classes: int) -> nn.Module:
    """On ResNet with the stem of three 3x3 convolutions (ResNetV1c)."""
    import transformers

    config = transformers.ResNetConfig(depths=depths, out_features=["stage1", "stage2", "stage3", "stage4"])
    backbone = transformers.ResNetBackbone(config)
    stem = []
    for before, after, stride in ((3, 32, 2), (32, 32, 1), (32, 64, 1)):
        stem += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    backbone.embedder.embedder = nn.Sequential(*stem)
    return UPerNet(backbone, config.hidden_sizes, classes)


def upernet_loss(model: Any, batch: Any) -> Tensor:
    """The model's own."""
    return model(batch["image"], batch["target"])  # type: ignore[no-any-return]
