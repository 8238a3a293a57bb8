"""Ops along one dim that need it whole: what becomes of the boundaries, and of parts without rows."""

import torch
from torch import Tensor

import fullframe as ff
from fullframe.spatial.rules.transposing import along
from tests.exactness import mesh
from tests.rank_group import rank_group
from tests.spatial.corners import noise


def _reversed_sums(local: Tensor) -> Tensor:
    return local.flip(3).cumsum(3)


def _cases(height: int, width: int) -> list[tuple[str, bool]]:
    found = []
    for shape in ((2, 3, 7, 11), (1, 1, 4, 5), (1, 1, 2, 3), (1, 1, 1, 5)):
        if shape[2] < height or shape[3] < width:
            continue
        whole = noise(*shape)
        x = ff.shard(whole, mesh(height, width))
        same = along(x, 3, _reversed_sums)
        shorter = along(x, -1, lambda t: t[..., 1:3] * 2)
        single = along(x, 3, lambda t: t.sum(3, keepdim=True))
        assert isinstance(same, ff.SpatialTensor)
        found.append((f"{shape} placements", same.placements == x.placements))
        for name, got, expected in (
            ("same size", same, _reversed_sums(whole)),
            ("shorter", shorter, whole[..., 1:3] * 2),
            ("one row", single, whole.sum(3, keepdim=True)),
        ):
            full = got.full() if isinstance(got, ff.SpatialTensor) else got
            found.append((f"{shape} {name}", torch.allclose(full, expected, rtol=1e-12, atol=1e-12)))
    return found


def test_the_result_is_cut_as_the_operand_or_whole_where_it_is_too_small() -> None:
    for height, width in ((1, 2), (2, 2), (1, 3)):
        for found in rank_group(height * width).run(_cases, height, width):
            assert all(right for _, right in found), found
