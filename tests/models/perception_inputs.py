"""One batch for each of `perception_networks`: random objects, points, frames and depths, the same at every call."""

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
