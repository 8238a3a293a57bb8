"""Batches for `perception_networks` and detectors: random objects, points, frames, depths, the same at every call."""

from typing import Any

import torch
from torch import Tensor

from tests.models.zoo import Inputs, class_maps, images


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pillars(height: int, width: int) -> Inputs:
    """30 pillars of 5 points in each of two maps; no two pillars in one cell."""
    generator = _generator(11)
    cells = torch.stack([torch.randperm(height * width, generator=generator)[:30] for _ in range(2)])
    return {
        "image": images(2, height, width),
        "points": torch.randn(2, 30, 5, 4, generator=generator, dtype=torch.float64),
        "cells": torch.stack([cells // width, cells % width], -1),
    }


def frames(height: int, width: int) -> Inputs:
    return {"image": images(2, height, width, 3)}


def centers(height: int, width: int) -> Inputs:
    """Heat maps at a quarter of the image, ones at the objects' cells, and the objects' sizes and offsets."""
    generator = _generator(12)
    h, w = -(-height // 4), -(-width // 4)
    cells = torch.stack([torch.randperm(h * w, generator=generator)[:4] for _ in range(2)])
    heat = torch.rand(2, 3, h, w, generator=generator, dtype=torch.float64) * 0.9
    heat = heat.flatten(2).scatter(2, cells.unsqueeze(1).expand(-1, 3, -1), 1.0).view(2, 3, h, w)
    sizes, offsets = torch.rand(2, 2, 4, 2, generator=generator, dtype=torch.float64)
    return {"image": images(2, height, width), "heat": heat, "cells": cells, "sizes": sizes, "offsets": offsets}


def assigned(height: int, width: int) -> Inputs:
    """A class a pixel, 3 where there is none, and distances to four sides."""
    sides = torch.rand(2, 4, height, width, generator=_generator(13), dtype=torch.float64) * 4
    return {"image": images(2, height, width), "classes": class_maps(2, height, width, 4).clamp(max=3), "sides": sides}


def objects(height: int, width: int) -> Inputs:
    """Rows of image, class and box, as YOLO's loaders give them."""
    generator = _generator(14)
    boxes = torch.rand(7, 4, generator=generator, dtype=torch.float64).mul(0.8).add(0.1)
    head: Tensor = torch.tensor([[0, 1], [0, 0], [0, 2], [1, 1], [1, 1], [1, 0], [1, 2]]).double()
    return {"image": images(2, height, width), "objects": torch.cat([head, boxes], 1)}


def with_depth(height: int, width: int) -> Inputs:
    """Depths, a third of them unknown (0)."""
    depth = torch.rand(2, height, width, generator=_generator(15), dtype=torch.float64) * 5 + 0.6
    unknown = torch.rand(2, height, width, generator=_generator(16)) < 0.3
    return {"pixel_values": images(2, height, width), "depth": depth.masked_fill(unknown, 0.0)}


def with_boxes(height: int, width: int) -> Inputs:
    """Two objects in the first image, three in the second: classes, and boxes as shares of the image."""
    generator = torch.Generator().manual_seed(5)
    labels = []
    for objects in (2, 3):
        corner, size = torch.rand(2, objects, 2, generator=generator, dtype=torch.float64).mul(0.4).add(0.1)
        labels.append({"class_labels": torch.arange(objects) % 3, "boxes": torch.cat([corner + size / 2, size], 1)})
    return {"pixel_values": images(2, height, width), "labels": labels}  # type: ignore[dict-item]


def boxes_and_masks(height: int, width: int) -> Inputs:
    """As `with_boxes`, each object with its mask, split as the image is."""
    given: Any = with_boxes(height, width)
    for label, masks in zip(given["labels"], mask_lists(height, width), strict=True):
        label["masks"] = masks
    return given


def with_masks(height: int, width: int) -> Inputs:
    """A list of masks (objects, H, W) for each image, and their classes."""
    masks = mask_lists(height, width)
    classes = [torch.arange(len(image)) % 3 for image in masks]
    return {"pixel_values": images(2, height, width), "mask_labels": masks, "class_labels": classes}  # type: ignore[dict-item]


def mask_lists(height: int, width: int) -> list[Tensor]:
    """Two objects in the first image, three in the second: overlapping discs, 0.0 or 1.0."""
    y = torch.linspace(0, 1, height, dtype=torch.float64).view(-1, 1)
    x = torch.linspace(0, 1, width, dtype=torch.float64)
    circles = ([(0.3, 0.4, 0.2), (0.7, 0.6, 0.3)], [(0.5, 0.5, 0.4), (0.2, 0.8, 0.15), (0.9, 0.1, 0.3)])
    return [
        torch.stack([((y - a) ** 2 + (x - b) ** 2 < r**2).double() for a, b, r in of_image]) for of_image in circles
    ]
