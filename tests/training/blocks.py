"""A network of repeated blocks with everything in them that a second pass could get wrong."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

SIZE = (13, 22)
SAMPLES = 4


class Block(nn.Module):
    """Several inputs and outputs, a keyword, a list it writes to, statistics, draws from every generator."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.mix = nn.Conv2d(channels, channels, 1)
        self.dropout = dropout

    def forward(self, x: Tensor, seen: list[int], *, extra: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        seen.append(len(seen))
        y = F.dropout(self.mix(F.gelu(self.norm(self.conv(x)))), self.dropout, self.training)
        if self.dropout:
            y = (y * (1 + random.random()) + float(np.random.rand())).sin()
        return x + y * extra["scale"], {"mean": y.mean((2, 3), keepdim=True), "number": len(seen)}


class Blocks(nn.Module):
    """Stem, blocks (the last of them twice), head. The samples mix in the batch statistics alone."""

    def __init__(self, dropout: float = 0.0, spectral: bool = False, channels: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, stride=2, padding=1), nn.BatchNorm2d(channels))
        self.blocks = nn.ModuleList(Block(channels, dropout) for _ in range(3))
        self.head = nn.Conv2d(channels, 4, 1)
        if spectral:
            for block in self.blocks:
                block.mix = spectral_norm(block.mix)

    def forward(self, image: Tensor) -> Tensor:
        x, seen = self.stem(image), list[int]()
        for block in (*self.blocks, self.blocks[-1]):
            x, found = block(x, seen, extra={"scale": 0.5, "unused": None})
            x = x + found["mean"]
            assert found["number"] == len(seen)
        assert seen == [0, 1, 2, 3], "a block that runs again must not be seen outside"
        return F.interpolate(self.head(x), size=image.shape[-2:], mode="bilinear")


def network(dtype: torch.dtype = torch.float64, **options: Any) -> Blocks:
    torch.manual_seed(0)
    return Blocks(**options).to(dtype)


def batch(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randn(SAMPLES, 3, *SIZE, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(-1, 4, (SAMPLES, *SIZE), generator=generator)
    target[1, :, ::2] = -1  # uneven counts
    return {"image": image, "target": target}


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Cross entropy where there is a class, as (sum, count)."""
    used = batch["target"] >= 0
    values = F.cross_entropy(model(batch["image"]), torch.where(used, batch["target"], 0), reduction="none")
    return torch.where(used, values, 0.0).sum(), used.sum()
