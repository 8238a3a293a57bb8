"""The models of the exactness tests: small `transformers` configurations and the networks of `networks.py`, unmodified.

An entry says how a user builds the model, what one batch looks like and how the loss is taken; nothing of it knows
about splitting. The test decides which inputs to split from `Entry.split`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.models.networks import ASPP, FPN, LiftSplat, UNet, UnrolledStereo

Inputs = dict[str, Tensor]


class Entry(NamedTuple):
    """A model with one batch and its loss."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]  # (height, width) of the image -> one batch, whole
    loss: Callable[[Any, Inputs], Tensor]
    split: tuple[str, ...]  # the inputs whose last two dims are the image's
    unsupported: str = "error"
    find_unused_parameters: bool = False


def resnet(layer_type: str) -> nn.Module:
    widths = [8, 8, 12, 16] if layer_type == "basic" else [16, 16, 24, 32]
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=widths, depths=[2, 1, 2, 1], layer_type=layer_type, num_labels=4
    )
    return transformers.ResNetForImageClassification(config)


def regnet() -> nn.Module:
    # 16 channels in, so that squeeze-and-excitation keeps 4: with 2 its ReLU can be dead and tests nothing.
    config = transformers.RegNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 16, 16, 24],
        depths=[1, 1, 2, 1],
        groups_width=4,
        layer_type="y",
        num_labels=4,
    )
    return transformers.RegNetForImageClassification(config)


def convnext() -> nn.Module:
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 8, 12, 16], depths=[1, 1, 2, 1], layer_scale_init_value=0.5, drop_path_rate=0.0, num_labels=4
    )
    return transformers.ConvNextForImageClassification(config)


def segformer() -> nn.Module:
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        drop_path_rate=0.0,
        initializer_range=0.2,  # the default 0.02 leaves attention uniform, and the queries without a gradient
        num_labels=5,
    )
    return transformers.SegformerForSemanticSegmentation(config)


def mobilenet() -> nn.Module:
    config = transformers.MobileNetV2Config(
        depth_multiplier=0.25, classifier_dropout_prob=0.0, semantic_loss_ignore_index=255, num_labels=5
    )
    return transformers.MobileNetV2ForSemanticSegmentation(config)


def upernet() -> nn.Module:
    backbone = transformers.ConvNextConfig(
        hidden_sizes=[8, 8, 12, 16],
        depths=[1, 1, 1, 1],
        layer_scale_init_value=0.5,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = transformers.UperNetConfig(
        backbone_config=backbone, hidden_size=8, auxiliary_in_channels=12, auxiliary_channels=8, num_labels=5
    )
    return transformers.UperNetForSemanticSegmentation(config)


def images(batch: int, height: int, width: int, *middle: int) -> Tensor:
    generator = torch.Generator().manual_seed(height * 10_000 + width)
    return torch.randn(batch, *middle, 3, height, width, generator=generator, dtype=torch.float64)


def class_maps(batch: int, height: int, width: int, classes: int) -> Tensor:
    """Labels (N, H, W) with a fifth ignored (255), unevenly over the image."""
    generator = torch.Generator().manual_seed(height * 10_000 + width + 1)
    labels = torch.randint(0, classes, (batch, height, width), generator=generator)
    ignored = torch.rand(batch, height, width, generator=generator) < torch.linspace(0.0, 0.4, width)
    return labels.masked_fill(ignored, 255)


def classified(height: int, width: int) -> Inputs:
    return {"pixel_values": images(2, height, width), "labels": torch.tensor([1, 3])}


def segmented(classes: int, batch: int = 2) -> Callable[[int, int], Inputs]:
    def inputs(height: int, width: int) -> Inputs:
        return {"image": images(batch, height, width), "labels": class_maps(batch, height, width, classes)}

    return inputs


def labelled(height: int, width: int) -> Inputs:
    """As `segmented`, under the names of `transformers`."""
    return {"pixel_values": images(2, height, width), "labels": class_maps(2, height, width, 5)}


def detected(height: int, width: int) -> Inputs:
    generator = torch.Generator().manual_seed(7)
    objects = torch.rand(2, 3, height, width, generator=generator, dtype=torch.float64) < 0.3
    boxes = torch.rand(2, 4, height, width, generator=generator, dtype=torch.float64) * 5
    return {"image": images(2, height, width), "objects": objects.double(), "boxes": boxes}


def surrounded(height: int, width: int) -> Inputs:
    generator = torch.Generator().manual_seed(8)
    occupied = torch.rand(2, 1, 10, 10, generator=generator, dtype=torch.float64) < 0.2
    return {"images": images(2, height, width, 3), "occupied": occupied.double()}


def stereo(height: int, width: int) -> Inputs:
    generator = torch.Generator().manual_seed(9)
    disparity = torch.rand(2, height, width, generator=generator, dtype=torch.float64) * 20
    valid = torch.rand(2, height, width, generator=generator) < torch.linspace(0.1, 0.9, width)
    left = images(2, height, width)
    right = torch.roll(left, -3, dims=-1) + 0.1 * images(2, height, width).flip(-1)
    return {"left": left, "right": right, "disparity": disparity, "valid": valid}


def model_loss(model: Any, inputs: Inputs) -> Tensor:
    return model(**inputs).loss


def segmentation_loss(model: Any, inputs: Inputs) -> Tensor:
    return F.cross_entropy(model(inputs["image"]), inputs["labels"], ignore_index=255)


def weighted_segmentation_loss(model: Any, inputs: Inputs) -> Tensor:
    weight = torch.tensor([0.2, 1.0, 2.0, 1.5], dtype=torch.float64)
    return F.cross_entropy(
        model(inputs["image"]), inputs["labels"], weight=weight, ignore_index=255, label_smoothing=0.1
    )


def detection_loss(model: Any, inputs: Inputs) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    positive = torch.tensor([2.0, 1.0, 3.0], dtype=torch.float64).view(3, 1, 1)
    for scores, boxes in model(inputs["image"]):
        objects = F.interpolate(inputs["objects"], size=scores.shape[-2:], mode="nearest")
        targets = F.interpolate(inputs["boxes"], size=scores.shape[-2:], mode="bilinear", align_corners=False)
        total = total + F.binary_cross_entropy_with_logits(scores, objects, pos_weight=positive)
        near = objects.amax(dim=1, keepdim=True)
        total = total + (F.smooth_l1_loss(boxes, targets, reduction="none") * near).sum() / near.sum().clamp(min=1)
    return total


def occupancy_loss(model: Any, inputs: Inputs) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(inputs["images"]), inputs["occupied"])


def sequence_loss(model: Any, inputs: Inputs) -> Tensor:
    """RAFT's: later iterations weigh more; L1 where the disparity is known, plus a little mse."""
    predictions = model(inputs["left"], inputs["right"])
    valid = inputs["valid"].double()
    total = torch.zeros((), dtype=torch.float64)
    for age, prediction in enumerate(reversed(predictions)):
        known = ((prediction - inputs["disparity"]).abs() * valid).sum() / valid.sum()
        total = total + 0.8**age * (known + 0.01 * F.mse_loss(prediction, inputs["disparity"]))
    return total


ZOO = {
    entry.name: entry
    for entry in (
        Entry("resnet_basic", lambda: resnet("basic"), classified, model_loss, ("pixel_values",)),
        Entry("resnet_bottleneck", lambda: resnet("bottleneck"), classified, model_loss, ("pixel_values",)),
        Entry("regnet", regnet, classified, model_loss, ("pixel_values",)),
        Entry("convnext", convnext, classified, model_loss, ("pixel_values",)),
        Entry("segformer", segformer, labelled, model_loss, ("pixel_values", "labels")),
        Entry(
            "mobilenet_v2",
            mobilenet,
            labelled,
            model_loss,
            ("pixel_values", "labels"),
            find_unused_parameters=True,  # its last convolution serves classification only
        ),
        Entry("upernet", upernet, labelled, model_loss, ("pixel_values", "labels")),
        Entry("unet", UNet, segmented(5), segmentation_loss, ("image", "labels")),
        Entry("fpn", FPN, detected, detection_loss, ("image", "objects", "boxes")),
        Entry("aspp", ASPP, segmented(4, batch=3), weighted_segmentation_loss, ("image", "labels")),
        Entry("lift_splat", LiftSplat, surrounded, occupancy_loss, ("images",)),
        Entry(
            "lift_splat_scatter",
            lambda: LiftSplat(pooling="scatter"),
            surrounded,
            occupancy_loss,
            ("images",),
        ),
        Entry("unrolled_stereo", UnrolledStereo, stereo, sequence_loss, ("left", "right", "disparity", "valid")),
    )
}
