"""The architectures of `docs/models.md`: how a user builds each, one batch, a loss.

A model that has a loss of its own for classification or segmentation is trained on it; detectors and mask models both
on theirs and, as the others, on the mean squared distance of their outputs from a fixed uneven pattern.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.models import dense_networks as dense
from tests.models import detectors, prompted
from tests.models import from_transformers as hf
from tests.models import matching_networks as matching
from tests.models import perception_inputs as given
from tests.models import perception_networks as perception
from tests.models import region_networks as regions
from tests.models.zoo import (
    ZOO,
    Inputs,
    class_maps,
    classified,
    images,
    model_loss,
    segmentation_loss,
    segmented,
    stereo,
)

TOLERANCE = 1e-9  # relative, in float64
FLOAT32_INSIDE = 3e-5  # of a model that casts to float32 itself: each rank's part of a sum is rounded there
AWKWARD = (100, 150)  # 75 columns a rank: no stride from 2 on divides it


class Architecture(NamedTuple):
    """A model with one batch and its loss; nothing here knows about splitting."""

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int], Inputs]  # (height, width) of the image -> one batch, whole
    loss: Callable[[Any, Inputs], Tensor]
    split: tuple[str, ...]  # the inputs whose last two dims are the image's
    size: tuple[int, int] = AWKWARD
    tolerance: float = TOLERANCE
    double_defaults: bool = False  # it mixes tensors of torch's default dtype with its own: run with float64 as default


def distance_from_pattern(outputs: Iterable[Tensor]) -> Tensor:
    """Differs at every element, so that an output in the wrong place shows."""
    losses = []
    for output in outputs:
        pattern = torch.arange(output.numel(), dtype=torch.float64).mul(0.7).cos().view(output.shape)
        losses.append((output - pattern).square().mean())
    return torch.stack(losses).sum()


def on_outputs(*names: str) -> Callable[[Any, Inputs], Tensor]:
    """A loss on the named outputs of a `transformers` model."""

    def loss(model: Any, inputs: Inputs) -> Tensor:
        result = model(**inputs)
        return distance_from_pattern(tree_leaves([result[name] for name in names]))

    return loss


def on_result(model: Any, inputs: Inputs) -> Tensor:
    """A loss on all that a plain network returns."""
    return distance_from_pattern(tree_leaves(model(*inputs.values())))


def unlabelled(height: int, width: int) -> Inputs:
    return {"pixel_values": images(2, height, width)}


def labelled(classes: int) -> Callable[[int, int], Inputs]:
    def inputs(height: int, width: int) -> Inputs:
        return {"pixel_values": images(2, height, width), "labels": class_maps(2, height, width, classes)}

    return inputs


def interpolated(height: int, width: int) -> Inputs:
    """An image of another size than the position embeddings were made for."""
    return {**classified(height, width), "interpolate_pos_encoding": True}  # type: ignore[dict-item]


def video(frames: int) -> Callable[[int, int], Inputs]:
    def inputs(height: int, width: int) -> Inputs:
        return {"pixel_values": images(2, height, width, frames), "labels": torch.tensor([1, 3])}

    return inputs


def with_trimap(height: int, width: int) -> Inputs:
    trimap = class_maps(2, height, width, 3).clamp(max=2).double().unsqueeze(1) / 2
    return {"pixel_values": torch.cat([images(2, height, width), trimap], dim=1)}


def with_task(height: int, width: int) -> Inputs:
    return {"pixel_values": images(2, height, width), "task_inputs": torch.arange(14.0, dtype=torch.float64).view(2, 7)}


def volume(height: int, width: int) -> Inputs:
    generator = torch.Generator().manual_seed(3)
    return {"volume": torch.randn(2, 1, 5, height, width, generator=generator, dtype=torch.float64)}


def two_images(height: int, width: int) -> Inputs:
    return {key: value for key, value in stereo(height, width).items() if key in ("left", "right")}


def image(height: int, width: int) -> Inputs:
    return {"image": images(2, height, width)}


PIXELS = ("pixel_values",)
WITH_MAP = ("pixel_values", "labels")
BOXES = on_outputs("logits", "pred_boxes")
MASKS = on_outputs("class_queries_logits", "masks_queries_logits")
DEPTH = on_outputs("predicted_depth")
PROMPTED_MASKS = on_outputs("pred_masks", "iou_scores")


def classifier(name: str, build: Callable[[], nn.Module], size: tuple[int, int] = AWKWARD) -> Architecture:
    return Architecture(name, build, classified, model_loss, PIXELS, size)


def segmenter(name: str, build: Callable[[], nn.Module], classes: int, size: tuple[int, int] = AWKWARD) -> Architecture:
    return Architecture(name, build, labelled(classes), model_loss, WITH_MAP, size)


def reader(
    name: str, build: Callable[[], nn.Module], loss: Callable[[Any, Inputs], Tensor], size: tuple[int, int] = AWKWARD
) -> Architecture:
    return Architecture(name, build, unlabelled, loss, PIXELS, size)


def detector(name: str, build: Callable[[], nn.Module], size: tuple[int, int]) -> Architecture:
    """Trained on the model's own loss: the predictions are matched with the objects."""
    return Architecture(f"{name}, its loss", build, given.with_boxes, model_loss, PIXELS, size, double_defaults=True)


def masker(name: str, build: Callable[[], nn.Module], size: tuple[int, int]) -> Architecture:
    """As `detector`; the lists of masks stay whole, as the loss copies them into a whole tensor of its own."""
    return Architecture(f"{name}, its loss", build, given.with_masks, model_loss, PIXELS, size, double_defaults=True)


def own(
    name: str, build: Callable[[], nn.Module], inputs: Callable[[int, int], Inputs] = image, **options: Any
) -> Architecture:
    return Architecture(name, build, inputs, on_result, tuple(inputs(32, 32)), **options)


def own_segmenter(name: str, build: Callable[[], nn.Module]) -> Architecture:
    return Architecture(name, build, segmented(5), segmentation_loss, ("image", "labels"))


CONVOLUTIONAL = (
    classifier("BiT", hf.bit),
    classifier("ConvNeXtV2", hf.convnextv2),
    reader("DINOv3 ConvNeXt", hf.dinov3_convnext, on_outputs("last_hidden_state")),
    classifier("MobileNetV1", hf.mobilenet_v1),
    classifier("MobileNetV2 classifier", hf.mobilenet_v2),
    classifier("EfficientNet", hf.efficientnet),
    classifier("PoolFormer", hf.poolformer),
    classifier("TextNet", hf.textnet),
    classifier("HGNet-V2", hf.hgnet_v2),
    reader("PP-LCNet", hf.pp_lcnet, on_outputs("last_hidden_state")),
    Architecture(
        "SuperPoint encoder", hf.superpoint, lambda h, w: {"input": images(2, h, w)[:, :1]}, on_result, ("input",)
    ),
)

ATTENTIVE = (
    classifier("SegFormer classifier", hf.segformer_classifier),
    classifier("MobileViT", hf.mobilevit),
    segmenter("MobileViT + DeepLabV3", lambda: hf.mobilevit("ForSemanticSegmentation"), 4),
    classifier("MobileViTV2", hf.mobilevitv2),
    segmenter("MobileViTV2 + DeepLabV3", lambda: hf.mobilevitv2("ForSemanticSegmentation"), 4),
    classifier("FocalNet", hf.focalnet),
    classifier("PVT", hf.pvt, (96, 96)),
    classifier("PVTv2", lambda: hf.pvt_v2(linear_attention=False)),
    classifier("PVTv2 linear", lambda: hf.pvt_v2(linear_attention=True)),
    classifier("CvT", hf.cvt),
    classifier("LeViT", hf.levit, (96, 96)),
    classifier("SwiftFormer", hf.swiftformer),
    classifier("Swin", hf.swin, (60, 92)),
    classifier("Swinv2", hf.swinv2, (60, 92)),
    reader("Swin2SR", hf.swin2sr, on_outputs("reconstruction"), (28, 40)),
    classifier("Donut Swin", hf.donut_swin, (60, 92)),
    classifier("Hiera", hf.hiera, (96, 160)),
    reader("VitDet", hf.vitdet, on_outputs("feature_maps"), hf.PATCHED),
    reader("SAM image encoder", hf.sam_vision, on_outputs("last_hidden_state"), (96, 96)),
)

PLAIN_TRANSFORMERS = (
    classifier("ViT", hf.vit, hf.PATCHED),
    Architecture("ViT at another size", lambda: hf.vit(image_size=64), interpolated, model_loss, PIXELS, (112, 176)),
    classifier("DeiT", lambda: hf.vit("DeiT"), hf.PATCHED),
    classifier("I-JEPA", lambda: hf.vit("IJepa"), hf.PATCHED),
    classifier("BEiT", lambda: hf.beit("ForImageClassification"), (96, 96)),
    segmenter("BEiT + UperNet", lambda: hf.beit("ForSemanticSegmentation"), 4, (96, 96)),
    classifier("DINOv2", hf.dinov2, (98, 98)),
    classifier("DINOv2 SwiGLU", lambda: hf.dinov2(use_swiglu_ffn=True), (98, 98)),
    classifier("DINOv2 with registers", lambda: hf.dinov2("Dinov2WithRegisters"), (98, 98)),
    classifier("DINOv2 at another size", hf.dinov2, (84, 126))._replace(tolerance=FLOAT32_INSIDE),
    reader("DINOv3 ViT", hf.dinov3_vit, on_outputs("last_hidden_state"), hf.PATCHED),
)

ENCODERS = (
    Architecture("VideoMAE", hf.videomae, video(4), model_loss, PIXELS, (96, 96)),
    Architecture("TimeSformer", hf.timesformer, video(3), model_loss, PIXELS, (96, 96)),
    Architecture("ViViT", hf.vivit, video(4), model_loss, PIXELS, (96, 96)),
    reader("CLIP image encoder", hf.clip_vision, on_outputs("last_hidden_state", "pooler_output"), (96, 96)),
    reader(
        "SigLIP image encoder",
        lambda: hf.clip_vision("SiglipVision"),
        on_outputs("last_hidden_state", "pooler_output"),
        (96, 96),
    ),
    reader("SAM 2 Hiera", hf.sam2_hiera, on_outputs("last_hidden_state", "intermediate_hidden_states"), (96, 160)),
    reader("Pixio", hf.pixio, on_outputs("feature_maps"), (96, 96)),
    classifier("Data2Vec vision", hf.data2vec, (96, 96)),
)

DENSE_HEADS = (
    segmenter("UperNet on Swin", hf.upernet_swin, 5, (60, 92)),
    reader("DPT depth", hf.dpt, DEPTH, (112, 112)),
    segmenter("DPT segmentation", lambda: hf.dpt("ForSemanticSegmentation"), 5, (112, 112)),
    reader("GLPN", hf.glpn, DEPTH, (96, 160)),
    reader("Depth Anything", hf.depth_anything, DEPTH, (98, 98)),
    reader("ZoeDepth", hf.zoedepth, DEPTH, (96, 96)),
    Architecture("ViTMatte", hf.vitmatte, with_trimap, on_outputs("alphas"), PIXELS, hf.PATCHED),
    reader("ViTPose", hf.vitpose, on_outputs("heatmaps"), hf.PATCHED),
)

DETECTORS = (
    reader("DETR", detectors.detr, BOXES),
    reader("DETR segmentation", lambda: detectors.detr(task="ForSegmentation"), on_outputs("logits", "pred_masks")),
    reader("Table Transformer", lambda: detectors.detr("TableTransformer"), BOXES),
    reader("Conditional DETR", lambda: detectors.detr("ConditionalDetr"), BOXES),
    reader("Deformable DETR", lambda: detectors.detr("DeformableDetr", num_feature_levels=4), BOXES),
    reader("RT-DETR", detectors.rt_detr, BOXES, (96, 160)),
    reader("RT-DETRv2", lambda: detectors.rt_detr("RTDetrV2"), BOXES, (96, 160)),
    reader("D-FINE", lambda: detectors.rt_detr("DFine"), BOXES, (96, 160)),
    reader("LW-DETR", detectors.lw_detr, BOXES, (128, 192)),
    reader("RF-DETR", lambda: detectors.lw_detr("RfDetr"), BOXES, (112, 112)),
    reader("YOLOS", hf.yolos, BOXES, hf.PATCHED),
    reader("MaskFormer", detectors.maskformer, MASKS, (60, 92)),
    reader("Mask2Former", detectors.mask2former, MASKS, (60, 92)),
    Architecture("OneFormer", detectors.oneformer, with_task, MASKS, PIXELS, (60, 92)),
    reader("EoMT", detectors.eomt, MASKS, (96, 96)),
)

PROMPTED = (
    Architecture("SAM, by points", prompted.sam, prompted.with_points, PROMPTED_MASKS, PIXELS, (96, 96)),
    Architecture("SAM 2, by points", prompted.sam2, prompted.with_points, PROMPTED_MASKS, PIXELS, (128, 128)),
    Architecture("CLIPSeg", prompted.clipseg, prompted.with_text, model_loss, WITH_MAP, (96, 96)),
    Architecture("SegGPT", prompted.seggpt, prompted.with_example, model_loss, prompted.WITH_EXAMPLE, (64, 64)),
    Architecture(
        "Prompt Depth Anything",
        partial(hf.depth_anything, "PromptDepthAnything"),
        prompted.with_coarse_depth,
        DEPTH,
        prompted.WITH_DEPTH,
        (98, 98),
    ),
)

TRAINED_DETECTORS = (
    detector("DETR", detectors.detr, AWKWARD),
    detector("Conditional DETR", lambda: detectors.detr("ConditionalDetr"), AWKWARD),
    detector("Deformable DETR", detectors.deformable_detr, AWKWARD),
    detector("DAB-DETR", detectors.dab_detr, AWKWARD)._replace(tolerance=FLOAT32_INSIDE),
    detector("RT-DETR", detectors.rt_detr, (96, 160)),
    detector("RT-DETRv2", lambda: detectors.rt_detr("RTDetrV2"), (96, 160)),
    detector("LW-DETR", detectors.lw_detr, (128, 192)),
    detector("RF-DETR", lambda: detectors.lw_detr("RfDetr"), (112, 112)),
    detector("YOLOS", lambda: hf.yolos(), hf.PATCHED),
    Architecture(
        "DETR segmentation, its loss",
        lambda: detectors.detr(task="ForSegmentation"),
        given.boxes_and_masks,
        model_loss,
        PIXELS,
        double_defaults=True,
    ),
    masker("MaskFormer", detectors.maskformer, (60, 92)),
    masker("Mask2Former", detectors.mask2former, (60, 92)),
    masker("EoMT", detectors.eomt, (96, 96)),
)

OWN = (
    own_segmenter("UNet++", dense.NestedUNet),
    own_segmenter("Attention U-Net", dense.AttentionUNet),
    own_segmenter("PSPNet", dense.PSPNet),
    own_segmenter("MobileNetV3 + LR-ASPP", dense.MobileNetV3),
    own_segmenter("HRNet", dense.HRNet),
    own_segmenter("Token encoder (nn.TransformerEncoder)", matching.TokenEncoder),
    own("Query decoder (nn.TransformerDecoder)", matching.QueryDecoder),
    own("DenseNet", dense.DenseNet),
    own("GhostNet with channel shuffle", dense.GhostNet),
    own("Hourglass with soft-argmax", dense.Hourglass),
    own("CBAM", dense.CBAM),
    own("EDSR (pixel shuffle)", dense.EDSR, size=(25, 37)),
    own("3D U-Net", dense.UNet3D, volume, size=(36, 50)),
    own("Unrolled denoiser", matching.UnrolledDenoiser, size=(50, 75)),
    own("Stereo cost volume (3-D)", matching.CostVolume, two_images),
    own("Stereo with convex upsampling", matching.ConvexStereo, two_images),
    own("RAFT", matching.RAFT, two_images, size=(104, 152)),
)

Own = Callable[[Any, Inputs], Tensor]


def perceiving(
    name: str,
    build: Callable[[], nn.Module],
    inputs: Callable[[int, int], Inputs],
    loss: Own,
    split: tuple[str, ...],
    size: tuple[int, int] = AWKWARD,
) -> Architecture:
    return Architecture(name, build, inputs, loss, split, size)


LABELS = ("image", "labels")
MASKED = ("pixel_values", "masks")
DEPTHS = ("pixel_values", "depth")
PERCEPTION = (
    own_segmenter("SegNet (max unpooling)", perception.SegNet),
    perceiving("PointPillars with a drawn map", perception.PointPillars, given.pillars, on_result, ("image",)),
    perceiving("ConvLSTM", perception.ConvLSTM, given.frames, on_result, ("image",)),
    perceiving(
        "CenterNet, loss and decoding", perception.CenterNet, given.centers, perception.center_loss, ("image", "heat")
    ),
    perceiving("FCOS, its loss", perception.FCOS, given.assigned, perception.fcos_loss, ("image", "classes", "sides")),
    perceiving("Mask R-CNN, its losses", regions.MaskRCNN, regions.objects_with_masks, regions.mask_rcnn_loss, MASKED),
    perceiving("YOLO head with anchors, its loss", perception.YOLO, given.objects, perception.yolo_loss, ("image",)),
    perceiving(
        "Monodepth2, its loss",
        perception.DepthByReprojection,
        two_images,
        perception.reprojection_loss,
        ("left", "right"),
    ),
    perceiving("U-Net by PointRend's loss", ZOO["unet"].build, segmented(5), perception.pointed, LABELS),
    perceiving("U-Net by its hardest pixels", ZOO["unet"].build, segmented(5), perception.hardest_pixels, LABELS),
    perceiving("U-Net by Lovász' loss", ZOO["unet"].build, segmented(5), perception.lovasz, LABELS),
    perceiving(
        "Depth Anything, losses at known depths",
        hf.depth_anything,
        given.with_depth,
        perception.scale_invariant,
        DEPTHS,
        (98, 98),
    ),
    perceiving("DPT, losses at known depths", hf.dpt, given.with_depth, perception.scale_invariant, DEPTHS, (112, 112)),
    perceiving(
        "GLPN, losses at known depths", hf.glpn, given.with_depth, perception.scale_invariant, DEPTHS, (96, 160)
    ),
    perceiving(
        "ZoeDepth, losses at known depths", hf.zoedepth, given.with_depth, perception.scale_invariant, DEPTHS, (96, 96)
    ),
)

ZOO_TITLES = {
    "resnet_basic": "ResNet (basic)",
    "resnet_bottleneck": "ResNet (bottleneck)",
    "regnet": "RegNet Y",
    "convnext": "ConvNeXt",
    "segformer": "SegFormer segmentation",
    "mobilenet_v2": "MobileNetV2 + DeepLabV3+",
    "upernet": "UperNet on ConvNeXt",
    "unet": "U-Net",
    "fpn": "FPN detector",
    "aspp": "ASPP (DeepLabV3)",
    "lift_splat": "Lift-splat BEV, matrix",
    "lift_splat_scatter": "Lift-splat BEV, scatter",
    "unrolled_stereo": "Unrolled stereo (10 GRU steps)",
}
FROM_ZOO = tuple(
    Architecture(title, ZOO[name].build, ZOO[name].inputs, ZOO[name].loss, ZOO[name].split)
    for name, title in ZOO_TITLES.items()
)

GROUPS = {
    "Convolutional (transformers)": (*FROM_ZOO[:4], *CONVOLUTIONAL),
    "Attention and windows (transformers)": ATTENTIVE,
    "Plain vision transformers (transformers)": PLAIN_TRANSFORMERS,
    "Videos and image encoders (transformers)": ENCODERS,
    "Dense prediction (transformers)": (*FROM_ZOO[4:7], *DENSE_HEADS),
    "Detection and masks (transformers)": DETECTORS,
    "Prompted (transformers)": PROMPTED,
    "Detection and masks, trained on their own losses (transformers)": TRAINED_DETECTORS,
    "Written by hand": (*FROM_ZOO[7:], *OWN),
    "Written by hand or trained on losses written by hand: perception": PERCEPTION,
}
ARCHITECTURES = {entry.name: entry for group in GROUPS.values() for entry in group}
