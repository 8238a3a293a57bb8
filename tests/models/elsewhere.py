"""Architectures of timm and torchvision, where those packages import; elsewhere the reason why they are left out."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.models.architectures import Architecture, on_outputs, own, reader
from tests.models.zoo import Inputs, images

TORCHVISION = (
    "resnet18",
    "resnext50_32x4d",
    "densenet121",
    "mobilenet_v2",
    "mobilenet_v3_small",
    "shufflenet_v2_x0_5",
    "squeezenet1_1",
    "efficientnet_b0",
    "regnet_y_400mf",
    "mnasnet0_5",
    "convnext_tiny",
    "swin_t",
    "segmentation.lraspp_mobilenet_v3_large",
    "segmentation.deeplabv3_mobilenet_v3_large",
    "segmentation.fcn_resnet50",
)
DETECTION = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "maskrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "fcos_resnet50_fpn",
    "ssdlite320_mobilenet_v3_large",
)
# The smallest of each of its files, but for those that do not run on small images (halonet) or compute in float32.
TIMM = (
    "test_byobnet cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 test_convnext cpubone_nano "
    "crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny deit_tiny_patch16_224 densenet121 "
    "dla46x_c dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0 test_efficientnet efficientvim_m1 "
    "efficientvit_m0 vit_tiny_patch16_dinov3_qkvb fasternet_t0 fastvit_t8 focalnet_tiny_srf "
    "gcvit_xxtiny ghostnet_050 hardcorenas_b hgnetv2_b0 hiera_tiny_224 sam2_hiera_tiny hrnet_w18_small iformer_t "
    "inception_next_atto inception_v3 lcnetv2_small levit_128s lowformer_b0 test_mambaout test_coatnet "
    "poolformerv2_s12 gmlp_ti16_224 mobilenetv3_small_050 mobilevit_xxs mvitv2_tiny nest_tiny nextvit_small "
    "test_nfnet pit_ti_224 pvt_v2_b0 rdnet_tiny regnetx_002 repghostnet_050 repvit_m1 res2next50 resnest14d "
    "test_resnet resnetv2_18 rexnet_100 selecsls42 legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 "
    "starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window16_256 swinv2_cr_tiny_224 "
    "tiny_vit_5m_224 tnt_s_legacy_patch16_224 tresnet_m twins_svt_small visformer_tiny test_vit "
    "vit_tiny_r_s16_p8_224 test_vit_relpos vitamin_small_224 volo_d1_224 ese_vovnet19b_slim_dw legacy_xception "
    "xception41p xcit_nano_12_p8_224"
)


def undropped(model: nn.Module) -> nn.Module:
    """The model with the rates of its dropout and stochastic depth modules at zero."""
    for module in model.modules():
        for rate in ("p", "drop_prob"):
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return model


def torchvision_model(name: str) -> nn.Module:
    home: Any = importlib.import_module("torchvision.models")
    *folder, name = name.split(".")
    home = getattr(home, folder[0]) if folder else home
    backbone = {"weights_backbone": None} if folder else {}
    return undropped(getattr(home, name)(weights=None, **backbone))


def torchvision_detector(name: str) -> nn.Module:
    home: Any = importlib.import_module("torchvision.models.detection")
    # Its own resizing of images, which makes small ones large, is left to these sizes; SSD has one of its own.
    sizes = {} if name.startswith("ssd") else {"min_size": 96, "max_size": 160}
    return undropped(getattr(home, name)(weights=None, weights_backbone=None, num_classes=3, **sizes))


def objects(height: int, width: int) -> Inputs:
    boxes = torch.tensor([[[4, 5, 60, 70], [30, 20, 90, 80], [70, 10, 140, 60]],
                          [[10, 8, 50, 44], [60, 30, 130, 95], [2, 50, 40, 90]]], dtype=torch.float64)  # fmt: skip
    masks = torch.zeros(2, 3, height, width, dtype=torch.uint8)
    for sample, of_sample in enumerate(boxes.int().tolist()):
        for number, (left, top, right, bottom) in enumerate(of_sample):
            masks[sample, number, top:bottom, left : right - 3] = 1
    labels = torch.tensor([[1, 2, 1], [2, 1, 2]])
    return {"image": images(2, height, width).sigmoid(), "boxes": boxes, "labels": labels, "masks": masks}


def detection_losses(model: Any, inputs: Inputs) -> Tensor:
    """The sum of the model's own; it wants lists of images, and of objects by name."""
    targets = [{key: inputs[key][n] for key in ("boxes", "labels", "masks")} for n in range(len(inputs["image"]))]
    losses: dict[str, Tensor] = model(list(inputs["image"].unbind()), targets)
    return torch.stack(list(losses.values())).sum()


def timm_model(name: str) -> nn.Module:
    return undropped(importlib.import_module("timm").create_model(name, pretrained=False))


def timm_backbone(name: str) -> nn.Module:
    config = transformers.TimmBackboneConfig(name, use_pretrained_backbone=False, out_indices=(1, 2, 3, 4))
    return undropped(transformers.TimmBackbone(config))


def _size(package: str, name: str) -> dict[str, tuple[int, int]]:
    """Of the image, where a model takes no other."""
    if package != "timm":
        return {}
    config = importlib.import_module("timm").get_pretrained_cfg(name)
    return {"size": config.input_size[1:]} if config is not None and config.fixed_input_size else {}


def _later(build: Callable[[str], nn.Module], name: str) -> Callable[[], nn.Module]:
    return lambda: build(name)


def installed() -> tuple[dict[str, tuple[Architecture, ...]], dict[str, str]]:
    """Groups of architectures by title, and for each package that does not import the reason."""
    groups, missing = {}, {}
    for package, names, build in (("torchvision", TORCHVISION, torchvision_model), ("timm", TIMM.split(), timm_model)):
        try:
            importlib.import_module(package)
        except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision built for another torch
            missing[package] = f"{type(error).__name__}: {error}"
            continue
        entries = [own(f"{package} {name}", _later(build, name), **_size(package, name)) for name in names]
        if package == "torchvision":
            entries += [
                Architecture(
                    f"torchvision {name}, its losses", _later(torchvision_detector, name), objects, detection_losses,
                    ("image",), double_defaults=True,
                )
                for name in DETECTION
            ]  # fmt: skip
        if package == "timm":
            maps = on_outputs("feature_maps")
            entries.append(reader("TimmBackbone resnet18", _later(timm_backbone, "resnet18"), maps))
        groups[package] = tuple(entries)
    return groups, missing
