"""A job that takes milliseconds: a small segmentation network, random frames, augmentation, uneven counts."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import fullframe as ff

SIZE = (9, 14)


class Frames(Dataset[dict[str, Any]]):
    """Sample i: an image with random brightness and noise from three sources, and a target with holes (-1)."""

    def __init__(self, samples: int = 12, augment: bool = True, dtype: torch.dtype = torch.float64):
        generator = torch.Generator().manual_seed(1)
        self.images = torch.randn(samples, 3, *SIZE, generator=generator, dtype=dtype)
        self.targets = torch.randint(-1, 4, (samples, *SIZE), generator=generator)
        for sample in range(samples):  # a different share of every target is to be ignored
            self.targets[sample, :, : sample % 5 * 2] = -1
        self.augment = augment

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self.images[index]
        if self.augment:
            image = image * random.uniform(0.5, 1.5) + float(np.random.normal()) + torch.randn_like(image)
        return {"image": image, "target": self.targets[index], "name": f"frame {index}", "index": index}


class Network(nn.Module):
    """Strided, normalised, with dropout, back to the size it came from."""

    def __init__(self, dropout: float = 0.0, dtype: torch.dtype = torch.float64):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Conv2d(6, 4, 3, padding=1))
        self.to(dtype)

    def forward(self, image: Tensor) -> Tensor:
        return F.interpolate(self.head(self.body(image)), size=image.shape[-2:], mode="bilinear")


class Plain(nn.Module):
    """No statistics over the batch, so that microbatches and replicas must give the numbers of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 4, 1)).double()

    def forward(self, image: Tensor) -> Tensor:
        return self.layers(image)


def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Cross entropy where the target has no hole, as (sum, count)."""
    used = batch["target"] >= 0
    target = torch.where(used, batch["target"], 0)
    values = F.cross_entropy(model(batch["image"]), target, reduction="none")
    return torch.where(used, values, 0.0).sum(), used.sum()


def mean_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """A scalar mean over all pixels."""
    return F.cross_entropy(model(batch["image"]), batch["target"].clamp(min=0))


def evaluate(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean loss, and the share of pixels that are right."""
    total, count = loss(model, batch)
    used = batch["target"] >= 0
    right = (model(batch["image"]).argmax(1) == batch["target"]) & used
    return {"entropy": (total, count), "accuracy": (right.sum(), used.sum())}


def recipe(**changes: Any) -> ff.Recipe:
    """The whole job."""
    fields: dict[str, Any] = {
        "model": lambda: Network(dropout=0.2),
        "loss": loss,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        "data": Frames,
        "batch_size": 4,
        "seed": 3,
        "steps": 10,
    }
    return ff.Recipe(**(fields | changes))
