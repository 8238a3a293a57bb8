"""Sampling at positions of the user's choice: any rank may read any row, so the image is gathered, the grid not."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.operands import aligned, say_gathered
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


@rule(F.grid_sample)
def _grid_sample(
    func: Any,
    input: Tensor,
    grid: Tensor,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool | None = None,
) -> Tensor:
    """Image (N, C, ...), grid (N, ..., 2 or 3); the result lies where the grid lies."""
    if isinstance(input, SpatialTensor):
        say_gathered("grid_sample", "a grid may point anywhere in the image", input)
        input = input.full()
    if not isinstance(grid, SpatialTensor):
        return func(input, grid, mode, padding_mode, align_corners)  # type: ignore[no-any-return]
    spec = grid.spec
    spec.require_whole("the coordinates of the grid are split", -1)
    batch = tuple(p for p in spec.placements if p.dim == 0)
    image = aligned(input, spec.with_(tuple(input.shape), batch))
    shape = (*input.shape[:2], *spec.shape[1:-1])
    placements = tuple(p if p.dim == 0 else p.at(p.dim + 1) for p in spec.placements)
    return wrap(func(image, local_of(grid), mode, padding_mode, align_corners), spec.with_(shape, placements))
