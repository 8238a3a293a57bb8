"""The exchange of all with all: every element arrives, at uneven boundaries, and comes home by the adjoint."""

import torch
from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.ranks.mesh import init_mesh, spatial_of
from fullframe.ranks.transposition import transposed
from tests.rank_group import rank_group

ROWS, PIECES = Extents((0, 1, 4, 4)), Extents((0, 3, 4, 6))  # 4 rows, of which the last rank has none; 6 columns


def _there_and_back(_: int) -> tuple[bool, bool, bool, bool]:
    axis = spatial_of(init_mesh(1, 3)).axis("width")
    whole = torch.arange(48, dtype=torch.float64).view(4, 2, 6)
    rows, piece = ROWS.ranges[axis.coordinate], PIECES.ranges[axis.coordinate]
    mine: Tensor = whole[rows.start : rows.stop].clone().requires_grad_()
    columns = transposed(mine, 0, ROWS, 2, PIECES, axis)
    (columns * columns).sum().backward()
    home = transposed(columns, 2, PIECES, 0, ROWS, axis)
    alone = transposed(whole, 0, Extents((0, 4)), 2, Extents((0, 6)), spatial_of(init_mesh(3, 1)).axis("width"))
    assert mine.grad is not None
    return (
        torch.equal(columns, whole[..., piece.start : piece.stop]),
        torch.equal(home, mine),
        torch.equal(mine.grad, 2 * mine),
        alone is whole,
    )


def test_every_element_arrives_once_and_its_gradient_comes_home() -> None:
    assert rank_group(3).run(_there_and_back, 0) == [(True, True, True, True)] * 3
