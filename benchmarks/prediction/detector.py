"""A detector without anchors, with what data decide: task-aligned assignment (Feng et al., ICCV 2021), masked losses.

The boxes of all images of a batch lie in one tensor, and `batch_idx` tells which image each is of.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from benchmarks.networks import pair

CLASSES = 8
STRIDES = (8, 16, 32)
NEAREST = 10  # places that a box is assigned to


class Boxes(Dataset[dict[str, Tensor]]):
    """Images of noise, with five to nine boxes (left, top, right, bottom) in pixels."""

    def __init__(self, height: int, width: int):
        self.size = height, width

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        count = 5 + index % 5
        size = torch.tensor(self.size).flip(0)
        corner, extent = torch.rand(count, 2) * 0.6, torch.rand(count, 2) * 0.3 + 0.1
        boxes = torch.cat([corner * size, (corner + extent) * size], 1)
        return {"image": torch.randn(3, *self.size), "boxes": boxes, "classes": torch.randint(CLASSES, (count,))}


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The boxes of all images one after another."""
    counts = torch.tensor([len(sample["classes"]) for sample in samples])
    return {
        "image": torch.stack([sample["image"] for sample in samples]),
        "boxes": torch.cat([sample["boxes"] for sample in samples]),
        "classes": torch.cat([sample["classes"] for sample in samples]),
        "batch_idx": torch.arange(len(samples)).repeat_interleave(counts),
    }


def cut(batch: Mapping[str, Tensor], count: int) -> Iterator[dict[str, Tensor]]:
    """`count` batches of equally many images, with their boxes."""
    size = len(batch["image"]) // count
    for start in range(0, len(batch["image"]), size):
        mine = (batch["batch_idx"] >= start) & (batch["batch_idx"] < start + size)
        yield {
            "image": batch["image"][start : start + size],
            "boxes": batch["boxes"][mine],
            "classes": batch["classes"][mine],
            "batch_idx": batch["batch_idx"][mine] - start,
        }


class Detector(nn.Module):
    """Five halving stages, a feature pyramid of three, one head: logits (N, P, classes), distances (N, P, 4)."""

    def __init__(self, width: int = 32):
        super().__init__()
        widths = [width, width * 2, width * 4, width * 8, width * 8]
        self.stages = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), *pair(before, after))
            for before, after in zip([3, *widths[:-1]], widths, strict=True)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(channels, width * 4, 1) for channels in widths[2:])
        self.tower = pair(width * 4, width * 4)
        self.head = nn.Conv2d(width * 4, CLASSES + 4, 1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
        levels, x = [], image
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if number >= 2:
                levels.append(self.lateral[number - 2](x))
        for finer, coarser in ((1, 2), (0, 1)):
            levels[finer] = levels[finer] + F.interpolate(levels[coarser], size=levels[finer].shape[-2:])
        maps = [self.head(self.tower(level)) for level in levels]
        logits, distances = torch.cat([m.flatten(2) for m in maps], 2).transpose(1, 2).split([CLASSES, 4], 2)
        return logits, distances, maps


def loss(model: nn.Module, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Classes by cross entropy over all places, boxes by overlap over those that are assigned; a sum and its count."""
    logits, distances, maps = model(batch["image"])
    places, strides = _places(maps)
    reach = F.softplus(distances) * strides[:, None]
    predicted = torch.cat([places - reach[..., :2], places + reach[..., 2:]], 2)
    true, kinds, there = _padded(batch, len(batch["image"]))
    with torch.no_grad():
        chosen, target, score = _assigned(logits.sigmoid(), predicted, places, true, kinds, there)
    wrong = F.binary_cross_entropy_with_logits(logits, score, reduction="sum")
    off = ((1 - _overlap(predicted[chosen], target[chosen])) * score.sum(-1)[chosen]).sum()
    return wrong + off, score.sum().clamp(min=1)


def _places(maps: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Centres (P, 2) in pixels, x first, and strides (P,)."""
    centres, strides = [], []
    for found, stride in zip(maps, STRIDES, strict=True):
        height, width = found.shape[-2:]
        y = (torch.arange(height, device=found.device) + 0.5) * stride
        x = (torch.arange(width, device=found.device) + 0.5) * stride
        grid = torch.meshgrid(y, x, indexing="ij")
        centres.append(torch.stack([grid[1], grid[0]], -1).view(-1, 2))
        strides.append(torch.full((height * width,), float(stride), device=found.device))
    return torch.cat(centres), torch.cat(strides)


def _padded(batch: Mapping[str, Tensor], images: int) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes (N, M, 4), classes (N, M), and which of them there are (N, M)."""
    owner = batch["batch_idx"]
    most = int(torch.bincount(owner, minlength=images).max())
    boxes = batch["boxes"].new_zeros(images, most, 4)
    kinds = batch["classes"].new_zeros(images, most)
    there = torch.zeros(images, most, dtype=torch.bool, device=owner.device)
    for image in range(images):
        mine = owner == image
        count = int(mine.sum())
        boxes[image, :count], kinds[image, :count] = batch["boxes"][mine], batch["classes"][mine]
        there[image, :count] = True
    return boxes, kinds, there


def _assigned(
    likely: Tensor, predicted: Tensor, places: Tensor, true: Tensor, kinds: Tensor, there: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Which places have a box (N, P), which box (N, P, 4), and what each class is to score there (N, P, classes)."""
    inside = torch.cat([places - true[:, :, None, :2], true[:, :, None, 2:] - places], 3).amin(3) > 0
    inside = inside & there[:, :, None]  # (N, M, P)
    of_class = likely.transpose(1, 2).gather(1, kinds[:, :, None].expand(-1, -1, likely.shape[1]))
    shared = _overlap(predicted[:, None], true[:, :, None]).clamp(min=0) * inside
    fit = of_class.sqrt() * shared.pow(6)
    best = fit.topk(NEAREST, dim=2).indices
    taken = torch.zeros_like(fit).scatter_(2, best, 1.0) * inside
    several = taken.sum(1, keepdim=True) > 1
    nearest = torch.zeros_like(fit).scatter_(1, shared.argmax(1, keepdim=True), 1.0)
    taken = torch.where(several, nearest * inside, taken)
    chosen, owner = taken.sum(1) > 0, taken.argmax(1)
    target = true.gather(1, owner[..., None].expand(-1, -1, 4))
    fit = fit * taken
    scale = (shared * taken).amax(2, keepdim=True) / fit.amax(2, keepdim=True).clamp(min=1e-9)
    score = F.one_hot(kinds.gather(1, owner), CLASSES) * (fit * scale).amax(1)[..., None]
    return chosen, target, score * chosen[..., None]


def _overlap(one: Tensor, other: Tensor) -> Tensor:
    """Generalized intersection over union (Rezatofighi et al., CVPR 2019) of boxes (..., 4)."""
    first, last = torch.maximum(one[..., :2], other[..., :2]), torch.minimum(one[..., 2:], other[..., 2:])
    outer = torch.maximum(one[..., 2:], other[..., 2:]) - torch.minimum(one[..., :2], other[..., :2])
    both = (last - first).clamp(min=0).prod(-1)
    either = (one[..., 2:] - one[..., :2]).prod(-1) + (other[..., 2:] - other[..., :2]).prod(-1) - both
    around = outer.prod(-1).clamp(min=1e-9)
    return both / either.clamp(min=1e-9) - (around - either) / around
