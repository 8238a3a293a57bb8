"""grid_sample: a split grid, a split image, and places that are infinite."""

import math
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.spatial.cases import MESHES, Case, Op, one, require_the_numbers_of_one_process
from tests.spatial.corners import Corners, autocast, last, noise, require_no_faults

CASES: dict[str, Case] = {
    "grid_sample": one(lambda x: F.grid_sample(x, x[:, :2].tanh().permute(0, 2, 3, 1), align_corners=False)),
}  # fmt: skip
CORNERS = Corners()


def sample(image: Tensor, grid: Tensor, **options: Any) -> Tensor:
    """A grid (N, 2, H, W) or (N, 3, D, H, W), so that it is split over the image."""
    return F.grid_sample(image, grid.movedim(1, -1), **options)


def sampling() -> None:
    """Where torch's own CPU kernels do not read wild memory: bilinear and nearest do at NaN and by reflection."""
    image, grid = noise(2, 3, 13, 11), noise(2, 2, 13, 11)
    for mode, value, padding in (
        *product(("bilinear", "nearest"), (math.inf,), ("zeros", "border")),
        *product(("bicubic",), (math.inf, math.nan), ("zeros", "border", "reflection")),
    ):
        places = grid.clone()
        places[0, 0, 3, 4] = places[1, 1, 12, 1] = value
        op = partial(sample, mode=mode, padding_mode=padding, align_corners=False)
        CORNERS.add(f"{mode} {padding} {value}", op, [image, places])
        CORNERS.add(f"{mode} {padding} {value} whole grid", op, [image], [places])
        CORNERS.add(f"{mode} {padding} {value} whole image", swapped(op), [places], [image])
    op = partial(sample, align_corners=True)
    CORNERS.add("channels last", op, [last(image), grid])
    CORNERS.add("autocast", autocast(op), [image.bfloat16(), grid.float()])
    CORNERS.add("a volume", op, [noise(1, 2, 4, 13, 11), noise(1, 3, 3, 12, 9)])


def swapped(op: Op) -> Op:
    return lambda a, b: op(b, a)


sampling()


@pytest.mark.parametrize("name", CASES)
def test_as_in_one_process(name: str) -> None:
    require_the_numbers_of_one_process(__name__, name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_corners(mesh: tuple[int, int]) -> None:
    require_no_faults(__name__, *mesh)
