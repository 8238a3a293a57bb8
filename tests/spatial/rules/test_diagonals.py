"""Diagonals taken from split matrices and put into them: offsets, rectangles, infinities beside them."""

import math
from functools import partial

import torch
from torch import Tensor

from tests.spatial.cases import Case, as_in_one_process, small
from tests.spatial.corners import Corners, corners_as_in_torch, noise, spoiled

CASES: dict[str, Case] = {
    **{f"diagonal {n}": small(partial(torch.diagonal, offset=n, dim1=2, dim2=3)) for n in (0, 2, -3, 10, -6, 11, -7)},
    "diagonal of columns and rows": small(lambda x: x.diagonal(1, -1, -2)),
    "diagonal of channels and columns": small(lambda x: x.diagonal(0, 1, 3)),
    "diagonal of whole dims": small(lambda x: x.diagonal()),
    "linalg.diagonal": small(torch.linalg.diagonal),
    "diagonal_copy": small(lambda x: torch.diagonal_copy(x, 1, 2, 3)),
    "trace": small(lambda x: torch.trace(x[0, 0]) * torch.trace(x[1, 2])),
    "diag": small(lambda x: x[0, 0].diag(2)),
    "diag_embed": small(torch.diag_embed),
    "diag_embed below, other dims": small(lambda x: torch.diag_embed(x, -2, 1, 3)),
    "diagflat": small(lambda x: torch.diagflat(x[0, 0, :3, :5])),
    "diagonal_scatter": small(lambda x: x.diagonal_scatter(x[:, :, 0, :6].sin() * 2, -1, 2, 3)),
}
CORNERS = Corners()


def _scattered(x: Tensor, d: Tensor) -> Tensor:
    return torch.diagonal_scatter(x, d, 0, 2, 3)


for value in (math.inf, math.nan, -0.0):
    CORNERS.add(f"diagonal {value}", lambda x: x.diagonal(0, 2, 3), [spoiled(1, 2, 6, 6, value=value)])
    CORNERS.add(f"embedded {value}", torch.diag_embed, [spoiled(1, 2, 3, 5, value=value)])
    CORNERS.add(f"scattered {value}", _scattered, [spoiled(1, 2, 7, 5, value=value)], [noise(1, 2, 5)])
for kind in (torch.bool, torch.int32, torch.complex128):
    CORNERS.add(f"diagonal {kind}", lambda x, k=kind: x.to(k).diagonal(1, 2, 3).to(torch.float64), [noise(1, 2, 6, 7)])
    CORNERS.add(f"embedded {kind}", lambda x, k=kind: torch.diag_embed(x.to(k)).real.double(), [noise(1, 2, 3, 5)])


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)
