"""Vehicles from above, seen by six cameras: rendered streets in the nuScenes format, Lift-Splat, two losses."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lift_splat import Grid, LiftSplat
from PIL import Image
from street import DEPTH_UNIT, VERSION, write
from torch import Tensor, nn
from torch.utils.data import Dataset

import fullframe as ff
from fullframe.data import CAMERAS, NuScenes

GRID = Grid(cells=64, reach=24.0, depths=(2.0, 33.0, 32))
HELD_OUT = 8  # scenes, the last ones
RARE = 3.0  # what a vehicle's cell counts more than an empty one
DEPTH_WEIGHT = 0.3


class Streets(Dataset[dict[str, Tensor]]):
    """Samples of fullframe's nuScenes reader, with what is to be learned; a rank reads only its part of the images.

    image: (6, 3, H, W) in 0 to 1. intrinsics, extrinsics: as the reader's. depth: (6, 1, H, W) metres, 0 is the sky.
    vehicles: (1, cells, cells) in 0 to 1, how much of a cell is covered.
    """

    def __init__(self, root: Path, scenes: range, grid: Grid = GRID):
        self.root, self.grid = root, grid
        vehicles = {f"vehicle.{kind}": "vehicle" for kind in ("car", "truck")}
        names = [f"scene-{number:04}" for number in scenes]
        self.frames = NuScenes(root, VERSION, scenes=names, classes=vehicles)

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        height, width = self.size(index)
        return self.read(index, slice(0, height), slice(0, width))

    def size(self, index: int) -> tuple[int, int]:
        return self.frames.size(index)

    def boxes(self, index: int) -> Tensor:
        """As the reader's, without an image."""
        return self.frames.read(index, slice(0, 1), slice(0, 1))["boxes"]

    def read(self, index: int, rows: slice, columns: slice) -> dict[str, Tensor]:
        frame = self.frames.read(index, rows, columns)
        files = [self.root / "depth" / name / f"{frame['token']}.png" for name in CAMERAS]
        stored = torch.stack([depth_of(file, rows, columns) for file in files])
        return {
            "image": frame["image"],
            "intrinsics": frame["intrinsics"],
            "extrinsics": frame["extrinsics"],
            "depth": stored[:, None],
            "vehicles": seen_from_above(frame["boxes"], self.grid),
        }


def depth_of(file: Path, rows: slice, columns: slice) -> Tensor:
    """(rows, columns) in metres."""
    with Image.open(file) as image:
        part = np.array(image.crop((columns.start, rows.start, columns.stop, rows.stop)))
    return torch.from_numpy(part.astype(np.float32) * DEPTH_UNIT)


def seen_from_above(boxes: Tensor, grid: Grid) -> Tensor:
    """(1, cells, cells): 1 where the middle of a cell lies in a box (x, y, z, width, length, height, yaw)."""
    middles = ((torch.arange(grid.cells) + 0.5) / grid.cells * 2 - 1) * grid.reach
    x, y = middles[:, None, None] - boxes[:, 0], middles[None, :, None] - boxes[:, 1]
    cos, sin = boxes[:, 6].cos(), boxes[:, 6].sin()
    along, across = x * cos + y * sin, y * cos - x * sin
    covered = (along.abs() < boxes[:, 4] / 2) & (across.abs() < boxes[:, 3] / 2)
    return covered.any(-1).float()[None]


def loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """How wrong the ground is, and the depth of the nearest thing that each pixel of the feature map sees."""
    ground, depth = model(batch["image"], batch["intrinsics"], batch["extrinsics"])
    weight = 1 + (RARE - 1) * batch["vehicles"]
    wrong = F.binary_cross_entropy_with_logits(ground, batch["vehicles"], weight)
    plane = planes_of(batch["depth"].flatten(0, 1), depth.shape)
    deep = F.cross_entropy(depth, plane, ignore_index=-1, reduction="sum") / plane.numel()  # not by those that count:
    return wrong + DEPTH_WEIGHT * deep  # replicas have unequally many


def planes_of(depth: Tensor, shape: torch.Size) -> Tensor:
    """The plane of the nearest depth below each pixel of the feature map, (M, h, w); -1 where there is none."""
    stride = depth.shape[-1] // shape[-1]
    inverse = torch.where(depth > 0, 1 / depth.clamp(min=1e-3), 0.0)
    nearest = 1 / F.max_pool2d(inverse, stride).squeeze(1).clamp(min=1e-6)
    first, last, count = GRID.depths
    plane = ((nearest - first) / (last - first) * (count - 1)).round().long()
    return torch.where((plane >= 0) & (plane < count), plane, -1)


def evaluate(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Intersection over union of the vehicles' cells over all held-out samples, also of vehicles that none sees."""
    ground, _ = model(batch["image"], batch["intrinsics"], batch["extrinsics"])
    found, true = ground > 0, batch["vehicles"] > 0
    return {"iou": ((found & true).sum(), (found | true).sum())}


def finish(model: nn.Module, run_dir: Path, trained: Streets, held_out: Streets) -> None:
    """Draw held-out samples; what the network and a map that never looks at an image reach, as JSON."""
    from bev_picture import draw

    device = next(model.parameters()).device
    samples = [{key: t[None].to(device) for key, t in held_out[index].items()} for index in range(len(held_out))]
    grounds = [model(s["image"], s["intrinsics"], s["extrinsics"])[0] for s in samples]
    true = torch.cat([sample["vehicles"] for sample in samples]) > 0
    usual = torch.stack([seen_from_above(trained.boxes(index), trained.grid) for index in range(len(trained))]).mean(0)
    thresholds = torch.linspace(0, float(usual.max()), 50)
    results = {
        "network": overlap(torch.cat(grounds) > 0, true),
        "everywhere": overlap(torch.ones_like(true), true),
        "map": max(overlap((usual >= t).to(device).expand_as(true), true) for t in thresholds),
    }
    (run_dir / "held_out.json").write_text(json.dumps(results, indent=2))
    draw(samples[0], grounds[0][0, 0].sigmoid(), results, run_dir / "held_out.png")


def overlap(found: Tensor, true: Tensor) -> float:
    """Intersection over union."""
    return float((found & true).sum() / (found | true).sum())


def recipe(
    root: str = "runs/bev_streets",
    height: int = 96,
    width: int = 256,
    scenes: int = 48,
    samples: int = 3,
    steps: int = 300,
) -> ff.Recipe:
    """What `fullframe train` asks for; the streets are drawn into `root` where they are not there yet."""

    def streets(part: range) -> Streets:
        write(Path(root), height, width, scenes, samples)
        return Streets(Path(root), part)

    def trained() -> Streets:
        return streets(range(scenes - HELD_OUT))

    def held_out() -> Streets:
        return streets(range(scenes - HELD_OUT, scenes))

    def schedule(step: int) -> float:  # up in a straight line, down in half a cosine
        return min(step / 20, 0.5 + 0.5 * math.cos(math.pi * min(step / steps, 1.0)))

    return ff.Recipe(
        model=lambda: LiftSplat(GRID),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=4e-3, weight_decay=0.01),
        data=trained,
        batch_size=4,
        steps=steps,
        schedule=schedule,
        evaluation_data=held_out,
        evaluate=evaluate,
        evaluate_every=100,
        finish=lambda model, run_dir: finish(model, run_dir, trained(), held_out()),
    )
