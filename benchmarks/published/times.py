"""Published times of a training step on one GPU, each with its source, the set-up it states, and what is assumed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.published import models
from benchmarks.published.classifiers import CLASSIFIERS
from benchmarks.published.figures import NIO, convnext_xl
from fullframe.recipe import Recipe
from fullframe.strategy import Strategy
from fullframe.technique import Precision

Use = Literal["fitted", "held against", "apart"]


@dataclass(frozen=True, kw_only=True)
class Duration:
    """One published time of a step.

    use: "fitted": `Efficiency` was fitted to these; "held against": was not, and counts; "apart": a set-up that the
        source leaves open, or that is known to be slow for a reason that no roofline knows; does not count
    """

    name: str
    seconds: float
    source: str
    make: Callable[[], Recipe]
    device: str
    strategy: Strategy
    channels_last: bool = False
    use: Use = "held against"


TIMM = "timm, results/benchmark-train-amp-{}-pt112-cu113-rtx3090.csv: torch 1.12, CUDA 11.3, random images, SGD"
RESNETS = "NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets: container 21.03, DALI, SGD"
SQUAD = "NVIDIA DeepLearningExamples, PyTorch/LanguageModeling/BERT, fine-tuning on SQuAD: container 19.07, one GPU"

# network, batch, side of the image, milliseconds channels last and contiguous (None: not there)
_RTX3090: list[tuple[str, int, int, float | None, float | None]] = [
    ("resnet18", 512, 224, 146.713, 184.877),
    ("resnet34", 512, 224, 250.813, 314.992),
    ("resnet50", 512, 224, 419.528, 618.983),
    ("resnet101", 256, 224, 340.74, 448.321),
    ("resnet152", 192, 224, 380.547, 516.516),
    ("vgg11", 512, 224, 536.508, 619.706),
    ("vgg16", 384, 224, 702.994, 824.954),
    ("vgg13_bn", 256, 224, 446.125, 546.3),
    ("vgg19_bn", 256, 224, 642.012, 773.109),
    ("convnext_tiny", 256, 224, 311.536, 313.859),
    ("convnext_small", 192, 224, 392.394, 390.224),
    ("convnext_base", 128, 224, 376.119, 378.091),
    ("convnext_large", 96, 224, 509.087, 511.523),
    ("convnext_xlarge_in22ft1k", 64, 224, 548.167, None),
    ("vit_tiny_patch16_224", 512, 224, 221.804, 222.408),
    ("vit_small_patch16_224", 384, 224, 362.157, 363.872),
    ("vit_base_patch16_224", 192, 224, 487.729, 490.391),
    ("vit_large_patch16_224", 64, 224, 544.512, None),
    ("vit_small_patch32_224", 512, 224, 114.324, 114.289),
    ("vit_base_patch32_224", 512, 224, 298.818, 299.695),
    ("vit_base_patch32_384", 256, 384, 470.294, 470.804),
    ("vit_small_patch16_384", 64, 384, 266.856, 266.865),
    ("vit_tiny_patch16_384", 128, 384, 249.657, 249.072),
    ("vit_large_patch32_224", 256, 224, 486.172, 489.021),
    ("beit_base_patch16_224", 192, 224, 534.02, 534.776),
    ("beit_large_patch16_224", 64, 224, 584.818, None),
    ("swin_tiny_patch4_window7_224", 256, 224, 393.641, 394.841),
    ("swin_small_patch4_window7_224", 192, 224, 477.632, 478.499),
    ("swin_base_patch4_window7_224", 128, 224, 453.662, 455.817),
    ("swin_large_patch4_window7_224", 64, 224, 414.289, 414.255),
    ("swinv2_tiny_window8_256", 192, 256, 536.56, 540.569),
    ("swinv2_base_window8_256", 64, 256, 420.663, 423.39),
    ("regnetx_002", 512, 224, 124.027, 137.026),
    ("regnetx_016", 512, 224, 749.012, 448.473),
    ("regnetx_040", 384, 224, 866.937, 613.356),
    ("regnetx_080", 256, 224, 1409.979, None),
    ("regnetx_160", 192, 224, 1783.261, 719.244),
    ("regnety_016", 512, 224, 785.757, 534.657),
    ("regnety_040", 384, 224, 2017.916, 598.298),
    ("regnety_080", 256, 224, 2170.37, 662.273),
    ("regnety_160", 192, 224, None, 724.758),
    ("poolformer_s12", 512, 224, 380.659, 414.201),
    ("poolformer_s36", 192, 224, 408.832, 449.906),
    ("poolformer_m48", 96, 224, 410.471, 432.741),
    ("efficientnet_b0", 512, 224, 291.183, None),
    ("efficientnet_b3", 128, 288, 221.941, 278.448),
    ("efficientnet_b4", 96, 320, 268.381, 325.442),
    ("mobilenetv2_100", 512, 224, 220.563, 278.633),
    ("mobilevit_s", 192, 256, 260.821, 303.779),
]

# network, device, precision, batch of a GPU, channels last, images a second of one GPU and of eight
_NVIDIA: list[tuple[str, str, Precision, int, bool, int, int]] = [
    ("resnet50", "A100-80GB", "fp16", 256, True, 2470, 16621),
    ("resnet50", "A100-80GB", "tf32", 256, False, 938, 7248),
    ("resnet50", "V100-16GB", "fp16", 256, True, 1200, 8322),
    ("resnet50", "V100-16GB", "fp32", 112, False, 367, 2855),
    ("se_resnext101_32x4d", "A100-80GB", "fp16", 128, True, 855, 5779),
    ("se_resnext101_32x4d", "A100-80GB", "tf32", 128, False, 395, 2991),
    ("se_resnext101_32x4d", "V100-16GB", "fp16", 112, True, 443, 2971),
    ("se_resnext101_32x4d", "V100-16GB", "fp32", 64, False, 132, 1004),
]

_SGD = partial(torch.optim.SGD, lr=1e-4, momentum=0.9, weight_decay=1e-4, nesterov=True, foreach=False)


def _classifier(network: str, batch: int, side: int, channels_last: bool) -> Recipe:
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def model() -> nn.Module:
        return CLASSIFIERS[network]().to(memory_format=layout)  # type: ignore[call-overload, no-any-return]

    def loss(model: Any, batch: Any) -> Tensor:
        found = model(batch["image"].contiguous(memory_format=layout))
        return F.cross_entropy(getattr(found, "logits", found), batch["target"])

    sample = {"image": ((3, side, side), torch.float32), "target": ((), torch.int64)}
    return models.recipe(model, sample, batch, _SGD, loss)


def _timm() -> Iterator[Duration]:
    for network, batch, side, *times in _RTX3090:
        for channels_last, milliseconds in zip((True, False), times, strict=True):
            if milliseconds is not None:
                yield Duration(
                    name=f"{network}, batch {batch}",
                    seconds=milliseconds / 1e3,
                    source=TIMM.format("nhwc" if channels_last else "nchw"),
                    make=partial(_classifier, network, batch, side, channels_last),
                    device="RTX3090",
                    strategy=Strategy(precision="fp16"),
                    channels_last=channels_last,
                    use="apart" if channels_last and network.startswith("regnet") else "fitted",
                )


def _nvidia() -> Iterator[Duration]:
    for gpus in (1, 8):
        for network, device, precision, each, channels_last, *rates in _NVIDIA:
            batch = gpus * each
            yield Duration(
                name=f"{network}, batch {batch}",
                seconds=batch / rates[gpus > 1],
                source=RESNETS,
                make=partial(_classifier, network, batch, 224, channels_last),
                device=f"{gpus}x{device}" if gpus > 1 else device,
                strategy=Strategy(data=gpus, precision=precision),
                channels_last=channels_last,
            )


def _squad(batch: int) -> Recipe:
    sample = {name: (shape, torch.int64) for name, shape in (("input_ids", (384,)), ("start", ()), ("end", ()))}
    return models.recipe(models.bert_answers, sample, batch, models.adam_one_by_one, models.answers_loss)


DURATIONS = [
    *_timm(),
    *_nvidia(),
    *(
        Duration(
            name=f"BERT-large, 384 tokens, batch {batch}", seconds=batch / rate, source=SQUAD,
            make=partial(_squad, batch), device=device, strategy=Strategy(),
        )
        for device, batch, rate in (("V100-16GB", 4, 8.96), ("V100-32GB", 8, 8.64))
    ),
    *(
        Duration(
            name="ConvNeXt-XL on 2 GPUs, its width split", seconds=0.937, source=NIO.replace("one GPU", "two GPUs"),
            make=partial(convnext_xl, 0.0), device="2xA100-80GB", strategy=Strategy(width=2, precision=precision),
            use="apart",
        )
        for precision in ("bf16", "tf32", "fp32")
    ),
]  # fmt: skip
