"""Architectures of timm and torchvision, where those packages import; elsewhere the reason why they are left out."""

import importlib
from collections.abc import Callable
from typing import Any

import transformers
from torch import nn

from tests.models.architectures import Architecture, on_outputs, own, reader

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
TIMM = (
    "resnet18",
    "resnest14d",
    "regnety_002",
    "densenet121",
    "ghostnet_100",
    "hrnet_w18_small",
    "dla34",
    "efficientnet_b0",
    "mobilenetv3_small_050",
    "convnext_atto",
    "edgenext_xx_small",
    "poolformer_s12",
    "repvgg_a0",
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


def timm_model(name: str) -> nn.Module:
    return undropped(importlib.import_module("timm").create_model(name, pretrained=False))


def timm_backbone(name: str) -> nn.Module:
    config = transformers.TimmBackboneConfig(name, use_pretrained_backbone=False, out_indices=(1, 2, 3, 4))
    return undropped(transformers.TimmBackbone(config))


def _later(build: Callable[[str], nn.Module], name: str) -> Callable[[], nn.Module]:
    return lambda: build(name)


def installed() -> tuple[dict[str, tuple[Architecture, ...]], dict[str, str]]:
    """Groups of architectures by title, and for each package that does not import the reason."""
    groups, missing = {}, {}
    for package, names, build in (("torchvision", TORCHVISION, torchvision_model), ("timm", TIMM, timm_model)):
        try:
            importlib.import_module(package)
        except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision built for another torch
            missing[package] = f"{type(error).__name__}: {error}"
            continue
        entries = [own(f"{package} {name}", _later(build, name)) for name in names]
        if package == "timm":
            maps = on_outputs("feature_maps")
            entries.append(reader("TimmBackbone resnet18", _later(timm_backbone, "resnet18"), maps))
        groups[package] = tuple(entries)
    return groups, missing
