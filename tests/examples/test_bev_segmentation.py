"""The bird's-eye example: drawn streets are where their tables say, the split is exact, and training learns."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import fullframe as ff
from fullframe.data import CAMERAS, NuScenes
from tests.examples.small import PNG, module, predicted_bytes, small, trained, verified

HEIGHT, WIDTH = 48, 128
SMALL = {"height": HEIGHT, "width": WIDTH, "scenes": 10, "samples": 2}


@pytest.fixture(scope="module")
def streets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bev") / "streets"
    module("bev_segmentation", "street").write(root, *SMALL.values())
    return root


@pytest.fixture
def path(streets: Path, tmp_path: Path) -> Path:
    return small("bev_segmentation", tmp_path, root=str(streets), steps=6, **SMALL)


def surfaces(root: Path, frame: Mapping[str, Any]) -> Iterator[Tensor]:
    """The points (n, 3) that each camera sees within 30 m, in the sample's frame, from what the tables say of it."""
    v, u = torch.meshgrid(torch.arange(HEIGHT) + 0.5, torch.arange(WIDTH) + 0.5, indexing="ij")
    pixels = torch.stack([u, v, torch.ones_like(u)], -1).double()
    for camera, name in enumerate(CAMERAS):
        with Image.open(root / "depth" / name / f"{frame['token']}.png") as image:
            depth = torch.from_numpy(np.array(image).astype(np.float64)) / 256
        pose = frame["extrinsics"][camera].double()
        in_camera = pixels * depth[..., None] @ frame["intrinsics"][camera].double().inverse().T
        yield (in_camera @ pose[:3, :3].T + pose[:3, 3])[(depth > 0) & (depth < 30)]


def test_what_is_drawn_lies_where_the_tables_say(streets: Path) -> None:
    frames = NuScenes(streets, module("bev_segmentation", "street").VERSION, classes=None)
    assert len(frames) == SMALL["scenes"] * SMALL["samples"]
    on_boxes = 0
    for index in (0, 1, 7):  # the second key frame of a scene: the vehicle has driven on
        frame = frames[index]
        x, y, z, width, length, height, yaw = frame["boxes"].double().unbind(1)
        for points in surfaces(streets, frame):
            east, north = points[:, :1] - x, points[:, 1:2] - y
            along, across = east * yaw.cos() + north * yaw.sin(), north * yaw.cos() - east * yaw.sin()
            out = [along.abs() - length / 2, across.abs() - width / 2, (points[:, 2:] - z).abs() - height / 2]
            off = torch.stack(out).amax(0).abs().amin(1)  # from the surface of the nearest box
            on_box = off < 0.05
            assert bool((on_box | (points[:, 2].abs() < 0.05)).all()), "a point is neither on a box nor on the ground"
            on_boxes += int((on_box & (points[:, 2] > 0.1)).sum())
    assert on_boxes > 1000


def test_points_are_splat_into_the_cells_that_vehicles_cover(streets: Path) -> None:
    lift, recipe, street = (module("bev_segmentation", name) for name in ("lift_splat", "recipe", "street"))
    grid = lift.Grid(cells=48, reach=24.0, depths=(3.0, 21.0, 10))
    ahead = street.camera(0.0, HEIGHT, WIDTH)
    pose = torch.eye(4)
    pose[:3, :3], pose[:3, 3] = torch.from_numpy(ahead.rotation), torch.from_numpy(ahead.translation)
    found = lift.cells(grid, torch.from_numpy(ahead.intrinsics).float()[None, None], pose[None, None], (6, 16, 8))
    assert found.shape == (1, 1, 10, 6, 16)
    box = torch.tensor([[11.8, 0.5, 1.0, 0.9, 0.9, 2.0, 0.0]])  # 11 m in front of the camera, half a metre to the left
    covered = recipe.seen_from_above(box, grid)[0].flatten().nonzero().flatten().tolist()
    assert covered == [(24 + 11) * 48 + 24]
    seen = found[0, 0, 4, 2]  # a plane 11 m ahead, at the height of the horizon
    columns = {cell % 48 for cell, u in zip(seen.tolist(), range(16), strict=True) if u == 7}
    assert set((seen // 48).tolist()) == {24 + 11} and columns == {24}
    assert bool((found == 48**2).any())  # outside


@pytest.mark.slow
def test_split_over_ranks(path: Path) -> None:
    verdict = verified(path, ff.Strategy(width=2))
    assert verdict.exact, verdict
    whole, part = (predicted_bytes(path, ff.Strategy(width=width)) for width in (1, 2))
    assert part < 0.9 * whole


def test_training_learns_and_draws(path: Path, tmp_path: Path) -> None:
    records = trained(path, tmp_path / "run")
    assert records[-1]["loss"] < 0.9 * records[0]["loss"]
    results = json.loads((tmp_path / "run" / "held_out.json").read_text())
    assert 0 < results["everywhere"] <= results["map"] < 0.5 and records[-1]["iou"] == pytest.approx(results["network"])
    assert (tmp_path / "run" / "held_out.png").read_bytes().startswith(PNG)
