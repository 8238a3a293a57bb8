"""Cutting a whole tensor, and the ranks' agreement on what they cut."""

import pytest
import torch
import torch.distributed as dist

import fullframe as ff
from fullframe.errors import ShapeError
from fullframe.spatial.shard import even_spec, shard
from tests.rank_group import rank_group
from tests.spatial.fake import spatial


def test_the_last_two_dims_are_cut_evenly() -> None:
    with spatial(2, 2) as on:
        cut = even_spec((3, 7, 9), on.mesh)
        assert [(p.axis, p.dim, p.extents.bounds) for p in cut.placements] == [
            ("height", 1, (0, 4, 7)),
            ("width", 2, (0, 5, 9)),
        ]
    with spatial(1, 1) as on:
        assert [p.extents.bounds for p in even_spec((7, 9), on.mesh).placements] == [(0, 9)]


@pytest.mark.parametrize(
    ("shape", "said"), [((5,), "dims .*H, W.* is needed"), ((3, 1, 9), "height 1 over 2 ranks.*use height=1")]
)
def test_what_cannot_be_cut_is_refused(shape: tuple[int, ...], said: str) -> None:
    with spatial(2, 2) as on, pytest.raises(ShapeError, match=said):
        even_spec(shape, on.mesh)


def _refused(kind: str) -> str:
    mesh, second = ff.init_mesh(width=2), dist.get_rank() == 1
    x = torch.arange(2 * 600 * 600.0).view(2, 600, 600)
    if kind == "shape":
        x = x[:, : 600 - second]
    elif kind == "dtype":
        x = x.double() if second else x
    elif kind == "values" and second:
        x[1, 599 // (600 // 12 | 1) * (600 // 12 | 1), 0] += 1  # a place that is looked at
    elif kind == "split":
        x = shard(x, mesh)
    elif kind == "nan":
        x[0, 0, 0] = torch.nan
    try:
        shard(x, mesh)
    except ShapeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shape", "rank 0: (2, 600, 600), rank 1: (2, 599, 600)"),
        ("dtype", "shapes or dtypes differ"),
        ("values", "their values differ on ranks [0, 1]"),
        ("split", "is split already"),
    ],
)
def test_ranks_that_pass_different_tensors_are_told(kind: str, said: str) -> None:
    assert all(said in found for found in rank_group(2).run(_refused, kind))


def test_nan_is_equal_to_itself() -> None:
    assert rank_group(2).run(_refused, "nan") == ["", ""]


def _cut() -> tuple[bool, bool, list[int]]:
    x = torch.arange(12.0).view(1, 1, 2, 6).contiguous(memory_format=torch.channels_last).requires_grad_()
    split = shard(x, ff.init_mesh(width=2), check=False)
    (split * 2).sum().backward()
    own = split.local.data_ptr() != x.data_ptr()
    return own, bool((x.grad == 2).all()), split.local.flatten().tolist()  # type: ignore[union-attr]


def test_a_part_is_a_copy_and_its_gradient_is_the_whole_one_s() -> None:
    first, second = rank_group(2).run(_cut)
    assert first == (True, True, [0, 1, 2, 6, 7, 8]) and second == (True, True, [3, 4, 5, 9, 10, 11])
