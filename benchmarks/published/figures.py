"""Published peak memory, each with its source, the set-up it states, and what had to be assumed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from benchmarks.published import models
from fullframe.recipe import Recipe
from fullframe.strategy import Strategy

GIB, MIB, GB = 2**30, 2**20, 10**9
_F, _I = torch.float32, torch.int64


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One published number of bytes.

    measure:     "allocated" (max_memory_allocated), "reserved", or "device" (nvidia-smi: reserved and the context)
    extra_bytes: of what the set-up holds and fullframe's own step does not, by the number of parameters
    others:      set-ups that the source leaves open, by what is assumed in them; they give a range
    """

    name: str
    published_bytes: float
    measure: str
    source: str
    assumed: str
    make: Callable[[], Recipe]
    strategy: Strategy
    device: str
    context_bytes: int | None = None  # as the source gives it
    extra_bytes: Callable[[int], int] = lambda parameters: 0
    softmax_keeps_input: bool = False  # as torch had it before 1.11
    others: dict[str, Callable[[], Recipe]] = field(default_factory=dict)


NIO = "NVIDIA and NIO on spatial parallel convolution, ConvNeXt-XL at (7, 3, 512, 2048), one GPU"
TRAINER = "Hugging Face, 'Efficient Training on a Single GPU' (transformers docs, perf_train_gpu_one, 2022), one V100"
GPIPE = "torchgpipe, benchmarks/unet-memory, torch 1.3, 32 images of 192x192, SGD"
MMSEG = "MMSegmentation, configs/{}, column Mem (GB), V100, SyncBN"
TUTORIAL = "PyTorch tutorial 'How to save memory by fusing the optimizer step into the backward pass'"

# Before torch 2.0 zero_grad() wrote zeros: gradients lie there all the time, as they do in a second microbatch.
_KEPT = "gradients stay between steps (torch before 2.0), which is simulated as the second of two microbatches"
_SOFTMAX = "softmax keeps its input for backward (torch before 1.11)"
_BUCKETS = "DDP's buckets and the gradients beside them (its default), both kept between steps; AdamW or SGD one by one"


def convnext_xl(stochastic_depth: float) -> Recipe:
    """Seven frames of 512 x 2048."""
    sample = {"image": ((3, 512, 2048), _F), "target": ((), _I)}
    return models.recipe(
        partial(models.convnext_xl, stochastic_depth), sample, 7, torch.optim.AdamW, models.classification_loss
    )


def _bert(batch: int, optimizer: models.Optimizer = models.adam_one_by_one) -> Recipe:
    sample = {"input_ids": ((512,), _I), "labels": ((), _I)}
    return models.recipe(models.bert_large, sample, batch, optimizer, models.bert_loss)


def _unet(convolutions: int, channels: int, batch: int) -> Recipe:
    sample = {"image": ((3, 192, 192), _F), "target": ((1, 192, 192), _F)}
    sgd = partial(torch.optim.SGD, lr=0.1, foreach=False)
    return models.recipe(partial(models.Simplified, convolutions, channels), sample, batch, sgd, models.binary_loss)


def _vit() -> Recipe:
    sample = {"image": ((3, 224, 224), _F), "target": ((), _I)}
    loss = lambda model, batch: model(batch["image"]).logits.sum()  # noqa: E731
    return models.recipe(models.vit_large, sample, 1, torch.optim.Adam, loss)


def _segmenter(model: Callable[[], torch.nn.Module], size: tuple[int, int], batch: int, sgd: bool = False) -> Recipe:
    sample = {"image": ((3, *size), _F), "target": (size, _I)}
    optimizer = models.sgd_one_by_one if sgd else models.adam_one_by_one
    return models.recipe(model, sample, batch, optimizer, models.upernet_loss)


def _trainer(name: str, mib: int, strategy: Strategy, batch: int, adafactor: bool = False) -> Figure:
    optimizer = models.adafactor if adafactor else models.adam_one_by_one
    return Figure(
        name=f"BERT-large, 512 tokens, {name}",
        published_bytes=mib * MIB,
        measure="device",
        source=TRAINER,
        assumed=f"attention written out; {_SOFTMAX}; {_KEPT}; the context is the 1343 MiB that the source measured",
        make=partial(_bert, batch, optimizer),
        strategy=strategy,
        device="V100-16GB",
        context_bytes=1343 * MIB,
        softmax_keeps_input=True,
    )


def _mmseg(
    name: str,
    folder: str,
    gib: float,
    model: Callable[[], torch.nn.Module],
    size: tuple[int, int],
    *,
    each: int = 2,
    gpus: int = 8,
    fp16: bool = False,
    sgd: bool = False,
) -> Figure:
    return Figure(
        name=f"UPerNet on {name}, {each}x{size[0]}x{size[1]}",
        published_bytes=gib * GIB,
        measure="allocated",
        source=MMSEG.format(folder),
        assumed=f"{_BUCKETS}; {_SOFTMAX}",
        make=partial(_segmenter, model, size, each * gpus, sgd),
        strategy=Strategy(data=gpus, precision="fp16" if fp16 else "fp32", sync_batchnorm=True),
        device="V100-32GB",
        extra_bytes=lambda parameters: 4 * parameters,
        softmax_keeps_input=True,
    )


_CHECKPOINTED = Strategy(microbatches=4, recompute="blocks", recompute_modules=("*.encoder.layer.*",))
_convnext, _swin, _resnet = models.upernet_convnext, models.upernet_swin, models.upernet_resnet

FIGURES = [
    Figure(
        name="ConvNeXt-XL",
        published_bytes=43.28 * GIB,
        measure="allocated",
        source=NIO,
        assumed="bf16 autocast, AdamW, a classifier, no stochastic depth; the source states none of these",
        make=partial(convnext_xl, 0.0),
        strategy=Strategy(precision="bf16"),
        device="A100-80GB",
        others={"stochastic depth 0.4": partial(convnext_xl, 0.4)},
    ),
    Figure(
        name="ConvNeXt-XL, recompute",
        published_bytes=11.89 * GIB,
        measure="allocated",
        source=NIO,
        assumed="as above; every block recomputed",
        make=partial(convnext_xl, 0.0),
        strategy=Strategy(precision="bf16", recompute="blocks"),
        device="A100-80GB",
        others={"stochastic depth 0.4": partial(convnext_xl, 0.4)},
    ),
    _trainer("batch 4", 14949, Strategy(microbatches=2, clip_norm=1.0), 8),
    _trainer("batch 1, accumulated 4 times", 8681, Strategy(microbatches=4, clip_norm=1.0), 4),
    _trainer("batch 1, recompute", 6775, _CHECKPOINTED, 4),
    _trainer("batch 4, fp16", 13939, Strategy(microbatches=2, precision="fp16", clip_norm=1.0), 8),
    _trainer("batch 1, recompute, fp16", 7275, Strategy(
        microbatches=4, precision="fp16", recompute="blocks", recompute_modules=("*.encoder.layer.*",)), 4),
    _trainer("batch 4, Adafactor", 12295, Strategy(microbatches=2, clip_norm=1.0), 8, adafactor=True),
    Figure(
        name="simplified U-Net (6, 72)",
        published_bytes=20.3 * GIB,
        measure="reserved",
        source=GPIPE,
        assumed=_KEPT,
        make=partial(_unet, 6, 72, 64),
        strategy=Strategy(microbatches=2),
        device="V100-32GB",
    ),
    Figure(
        name="simplified U-Net (11, 128), image by image",
        published_bytes=20.5 * GIB,
        measure="reserved",
        source=f"{GPIPE}, pipeline-1: 32 chunks, checkpoints",
        assumed="one chunk's activations at a time, as with 32 microbatches",
        make=partial(_unet, 11, 128, 32),
        strategy=Strategy(microbatches=32),
        device="V100-32GB",
    ),
    Figure(
        name="ViT-L/16, one image, Adam",
        published_bytes=6 * GB,
        measure="allocated",
        source=f"{TUTORIAL}: '~6GB'",
        assumed="the source gives one digit",
        make=_vit,
        strategy=Strategy(),
        device="A100-80GB",
    ),
    Figure(
        name="ViT-L/16, one image, Adam, update in backward",
        published_bytes=4 * GB,
        measure="allocated",
        source=f"{TUTORIAL}: '~4GB'",
        assumed="the source gives one digit",
        make=_vit,
        strategy=Strategy(update_in_backward=True),
        device="A100-80GB",
    ),
    _mmseg("ConvNeXt-T, fp16", "convnext", 4.23, partial(_convnext, [96, 192, 384, 768], [3, 3, 9, 3]), (512, 512),
           fp16=True),
    _mmseg("ConvNeXt-S, fp16", "convnext", 5.16, partial(_convnext, [96, 192, 384, 768], [3, 3, 27, 3]), (512, 512),
           fp16=True),
    _mmseg("ConvNeXt-B, fp16", "convnext", 6.33, partial(_convnext, [128, 256, 512, 1024], [3, 3, 27, 3]), (512, 512),
           fp16=True),
    _mmseg("ConvNeXt-B, fp16", "convnext", 8.53, partial(_convnext, [128, 256, 512, 1024], [3, 3, 27, 3]), (640, 640),
           fp16=True),
    _mmseg("ConvNeXt-L, fp16", "convnext", 12.08, partial(_convnext, [192, 384, 768, 1536], [3, 3, 27, 3]), (640, 640),
           fp16=True),
    _mmseg("Swin-T", "swin", 5.02, partial(_swin, 96, [2, 2, 6, 2], [3, 6, 12, 24]), (512, 512)),
    _mmseg("Swin-S", "swin", 6.17, partial(_swin, 96, [2, 2, 18, 2], [3, 6, 12, 24]), (512, 512)),
    _mmseg("Swin-B", "swin", 7.61, partial(_swin, 128, [2, 2, 18, 2], [4, 8, 16, 32]), (512, 512)),
    _mmseg("ResNet-50, Cityscapes", "upernet", 6.4, partial(_resnet, [3, 4, 6, 3], 19), (512, 1024), gpus=4, sgd=True),
    _mmseg("ResNet-101, Cityscapes", "upernet", 7.4, partial(_resnet, [3, 4, 23, 3], 19), (512, 1024), gpus=4,
           sgd=True),
    _mmseg("ResNet-50, ADE20K", "upernet", 8.1, partial(_resnet, [3, 4, 6, 3], 150), (512, 512), each=4, gpus=4,
           sgd=True),
    _mmseg("ResNet-50, VOC", "upernet", 6.4, partial(_resnet, [3, 4, 6, 3], 21), (512, 512), each=4, gpus=4,
           sgd=True),
]  # fmt: skip
