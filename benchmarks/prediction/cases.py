"""What is predicted and measured: recipes and strategies, each a few hundred MiB to 2 GiB a rank."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from benchmarks.networks import UNet, UNet3D, convnext_tiny, resnet50
from benchmarks.prediction import detector
from benchmarks.spatial_memory.models import nine_layers
from fullframe.recipe import Recipe, load_recipe
from fullframe.strategy import Strategy
from fullframe.techniques.unrolling.unroll import unroll

CLASSES = 8
STEREO = Path(__file__).parents[2] / "examples" / "stereo_depth" / "recipe.py"


class Frames(Dataset[dict[str, Tensor]]):
    """Images, or volumes, of noise with a class a pixel."""

    def __init__(self, *size: int):
        self.size = size

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        channels = 3 if len(self.size) == 2 else 1
        return {"image": torch.randn(channels, *self.size), "target": torch.randint(0, CLASSES, self.size)}


def segmentation(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Cross entropy at every pixel."""
    return F.cross_entropy(model(batch["image"]), batch["target"])


def square(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The mean square of the output."""
    return model(batch["image"]).square().mean()  # type: ignore[no-any-return]


def features(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Reads the last feature map and the pooled output, so that every parameter has a gradient."""
    output = model(pixel_values=batch["image"])
    return output.last_hidden_state.square().mean() + output.pooler_output.tanh().mean()  # type: ignore[no-any-return]


def accuracy(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The share of pixels of the right class."""
    right = model(batch["image"]).argmax(1) == batch["target"]
    return {"accuracy": (right.sum(), right.numel())}


def swin() -> nn.Module:
    """`transformers` SwinModel at its default, tiny size, no stochastic depth."""
    import transformers

    return transformers.SwinModel(transformers.SwinConfig(drop_path_rate=0.0))


def vit() -> nn.Module:
    """`transformers` ViTModel of 8 layers and 384 channels on 256x512 images."""
    import transformers

    config = transformers.ViTConfig(
        image_size=(256, 512), hidden_size=384, num_hidden_layers=8, num_attention_heads=6, intermediate_size=1536
    )
    return transformers.ViTModel(config)


class Iterations(nn.Module):
    """Twelve iterations of a learned step that all share, between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.end = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 3, 1)
        step = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1), nn.Tanh())
        self.run = unroll(step, 12)

    def forward(self, image: Tensor) -> Tensor:
        """(N, 3, H, W) both."""
        return self.end(self.run(self.start(image)))  # type: ignore[no-any-return]


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW, learning rate 1e-4."""
    return torch.optim.AdamW(parameters, lr=1e-4)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


def _recipe(
    model: Callable[[], nn.Module],
    loss: Callable[..., Tensor | tuple[Tensor, Tensor]],
    batch_size: int,
    size: tuple[int, ...],
    optimizer: Callable[..., torch.optim.Optimizer] = adamw,
) -> Recipe:
    return Recipe(model=model, loss=loss, optimizer=optimizer, data=lambda: Frames(*size), batch_size=batch_size)


def _detector() -> Recipe:
    trained = _recipe(detector.Detector, detector.loss, 2, (384, 512))
    return replace(trained, data=lambda: detector.Boxes(384, 512), collate=detector.collate, cut=detector.cut)


def _evaluated(model: Callable[[], nn.Module], crop: tuple[int, ...], frame: tuple[int, ...]) -> Recipe:
    """Trained on crops, and evaluated on three whole frames."""
    trained = _recipe(model, segmentation, 2, crop)
    return replace(trained, evaluate=accuracy, evaluation_data=lambda: Subset(Frames(*frame), range(3)))


_RECIPES: dict[str, Callable[[], Recipe]] = {
    "nine conv-BN-ReLU": lambda: _recipe(nine_layers, square, 2, (384, 512)),
    "UNet": lambda: _recipe(UNet, segmentation, 2, (384, 512)),
    "ResNet-50": lambda: _recipe(resnet50, features, 4, (256, 512)),
    "ResNet-50, SGD": lambda: _recipe(resnet50, features, 4, (256, 512), sgd),
    "ConvNeXt-tiny": lambda: _recipe(convnext_tiny, features, 2, (256, 512)),
    "Swin-tiny": lambda: _recipe(swin, features, 2, (224, 448)),
    "ViT": lambda: _recipe(vit, features, 4, (256, 512)),
    "3-D UNet": lambda: _recipe(UNet3D, segmentation, 1, (48, 64, 64)),
    "unrolled": lambda: _recipe(Iterations, square, 2, (256, 384)),
    "stereo network": lambda: replace(load_recipe(STEREO), evaluate=None, evaluation_data=None),
    "detector": _detector,
    "UNet, evaluated": lambda: _evaluated(UNet, (96, 128), (768, 1024)),
    "3-D UNet, evaluated": lambda: _evaluated(UNet3D, (16, 32, 32), (64, 96, 96)),
}


@dataclass(frozen=True)
class Case:
    """One recipe under one strategy."""

    model: str
    strategy: Strategy

    @property
    def recipe(self) -> Recipe:
        """Made anew."""
        return _RECIPES[self.model]()

    @property
    def technique(self) -> str:
        """What differs from a plain strategy, in words."""
        plain = Strategy()
        said = {name: getattr(self.strategy, name) for name in Strategy.__dataclass_fields__}
        return ", ".join(f"{name} {value}" for name, value in said.items() if value != getattr(plain, name)) or "plain"


_MIB = 2**20
CASES = [
    Case("nine conv-BN-ReLU", Strategy()),
    Case("nine conv-BN-ReLU", Strategy(height=2)),
    Case("nine conv-BN-ReLU", Strategy(width=2, precision="bf16")),
    Case("UNet", Strategy()),
    Case("UNet", Strategy(precision="bf16")),
    Case("UNet", Strategy(microbatches=2)),
    Case("UNet", Strategy(recompute="blocks")),
    Case("UNet", Strategy(width=2)),
    Case("UNet", Strategy(height=2, recompute="blocks")),
    Case("UNet", Strategy(data=2)),
    Case("ResNet-50", Strategy()),
    Case("ResNet-50, SGD", Strategy(microbatches=2)),
    Case("ResNet-50", Strategy(data=2, microbatches=2)),
    Case("ResNet-50", Strategy(height=2, precision="bf16")),
    Case("ResNet-50", Strategy(data=2, shard_parameters=True)),
    Case("ConvNeXt-tiny", Strategy()),
    Case("ConvNeXt-tiny", Strategy(recompute="blocks")),
    Case("ConvNeXt-tiny", Strategy(recompute="budget", recompute_budget_bytes=300 * _MIB)),
    Case("ConvNeXt-tiny", Strategy(width=2)),
    Case("ConvNeXt-tiny", Strategy(optimizer="adafactor")),
    Case("ConvNeXt-tiny", Strategy(update_in_backward=True)),
    Case("ConvNeXt-tiny", Strategy(clip_norm=1.0, ema_decay=0.99)),
    Case("ConvNeXt-tiny", Strategy(data=2, shard_optimizer=True)),
    Case("ConvNeXt-tiny", Strategy(data=2, shard_parameters=True, recompute="blocks")),
    Case("Swin-tiny", Strategy()),
    Case("Swin-tiny", Strategy(width=2)),
    Case("ViT", Strategy()),
    Case("ViT", Strategy(height=2, precision="bf16", recompute="blocks")),
    Case("stereo network", Strategy()),
    Case("stereo network", Strategy(width=2)),
    Case("3-D UNet", Strategy()),
    Case("3-D UNet", Strategy(depth=2)),
    Case("3-D UNet", Strategy(depth=2, height=2)),
    Case("3-D UNet", Strategy(depth=2, recompute="blocks")),
    Case("nine conv-BN-ReLU", Strategy(stages=2, microbatches=2)),
    Case("nine conv-BN-ReLU", Strategy(stages=2, width=2)),
    Case("unrolled", Strategy()),
    Case("unrolled", Strategy(recompute="blocks")),
    Case("unrolled", Strategy(stages=2, microbatches=2)),
    Case("unrolled", Strategy(stages=3, recompute="blocks")),
    Case("unrolled", Strategy(recompute="nested")),
    Case("unrolled", Strategy(recompute="nested", recompute_states=6)),
    Case("unrolled", Strategy(recompute="nested", recompute_states=3)),
    Case("unrolled", Strategy(recompute="nested", recompute_states=1)),
    Case("unrolled", Strategy(recompute="nested", offload=True)),
    Case("unrolled", Strategy(width=2, recompute="nested", recompute_states=3)),
    Case("unrolled", Strategy(stages=2, microbatches=2, recompute="nested")),
    Case("UNet", Strategy(compile=True)),
    Case("UNet", Strategy(width=2, compile=True)),
    Case("ResNet-50", Strategy(compile=True)),
    Case("ResNet-50", Strategy(height=2, compile=True)),
    Case("ConvNeXt-tiny", Strategy(compile=True)),
    Case("ConvNeXt-tiny", Strategy(width=2, compile=True)),
    Case("ConvNeXt-tiny", Strategy(recompute="blocks", compile=True)),
    Case("UNet, evaluated", Strategy()),
    Case("UNet, evaluated", Strategy(precision="bf16")),
    Case("UNet, evaluated", Strategy(width=2)),
    Case("UNet, evaluated", Strategy(clip_norm=1.0, ema_decay=0.99)),
    Case("UNet, evaluated", Strategy(data=2, shard_parameters=True)),
    Case("3-D UNet, evaluated", Strategy()),
    Case("3-D UNet, evaluated", Strategy(depth=2)),
    Case("detector", Strategy()),
    Case("detector", Strategy(width=2)),
    Case("detector", Strategy(microbatches=2)),
    Case("detector", Strategy(height=2, precision="bf16")),
    Case("detector", Strategy(data=2, recompute="blocks")),
]
