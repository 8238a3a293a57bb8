"""A local part and its spec, cut otherwise; every part is checked against a slice of the whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fullframe as ff
from fullframe.errors import ShapeError
from fullframe.geometry.extents import Extents
from fullframe.ranks.mesh import Axis, spatial_of
from fullframe.simulation.fake.replaced import replaced
from fullframe.spatial.redistribute import gather_axes, in_runs, resplit, sliced
from tests.rank_group import rank_group
from tests.spatial.fake import on_height, on_width, spatial, spec

WHOLE = torch.arange(2 * 4 * 6).view(2, 4, 6)
LEFT, EVEN = (0, 1, 6), (0, 3, 6)


def test_a_slice_needs_no_message() -> None:
    with spatial(2, 2, rank=3) as on:
        both = spec(on, (2, 4, 6), on_height((0, 3, 4), 1), on_width(LEFT, 2))
        assert torch.equal(sliced(WHOLE, both), WHOLE[:, 3:, 1:])
        assert torch.equal(sliced(WHOLE[0], both), WHOLE[0, 3:, 1:])
        assert torch.equal(sliced(WHOLE[:, :1], both), WHOLE[:, :1, 1:])  # what broadcasts is not cut
        assert torch.equal(sliced(WHOLE[:, 3:], both, both.placements[:1]), WHOLE[:, 3:, 1:])
        with pytest.raises(ShapeError, match="does not broadcast"):
            sliced(WHOLE[..., :5], both)


def test_a_factor_of_a_dim_is_cut() -> None:
    """(2, 24) whose columns are 4 x 6, the 6 split: each rank holds 4 runs."""
    with spatial(1, 2, rank=1) as on:
        merged = spec(on, (2, 24), on_width(LEFT, 1, outer=4))
        assert torch.equal(sliced(WHOLE.flatten(1), merged), WHOLE[..., 1:].flatten(1))


def _moved() -> list[bool]:
    on = spatial_of(ff.init_mesh(2, 2))
    both = spec(on, (2, 4, 6), on_height((0, 3, 4), 1), on_width(LEFT, 2))
    local = sliced(WHOLE, both)
    rows, columns = both.rows(both.placements[0]), both.rows(both.placements[1])
    found = []

    def check(got: tuple[Tensor, ff.SpatialTensor], expected: Tensor) -> None:
        found.append(torch.equal(got[0], expected) and torch.equal(got[0], sliced(WHOLE.view(got[1].shape), got[1])))

    check(gather_axes(local, both, ["width"]), WHOLE[:, rows.start : rows.stop])
    check(gather_axes(local, both, ["height", "width"]), WHOLE)
    moved = range(3, 6) if on.axis("width").coordinate else range(3)
    expected = WHOLE[:, rows.start : rows.stop, moved.start : moved.stop]
    check(resplit(local, both, "width", Extents(EVEN)), expected)
    found.append(resplit(local, both, "width", both.placements[1].extents)[0] is local)
    flat = spec(on, (2, 24), on_width(LEFT, 1, outer=4))
    runs, cut = in_runs(sliced(WHOLE.flatten(1), flat), flat, 1)
    half = slice(12 * on.axis("width").coordinate, 12 * on.axis("width").coordinate + 12)
    found.append(torch.equal(runs, WHOLE.flatten(1)[:, half]) and cut.of(1) is not None)
    return [*found, len(columns) in (1, 5)]


def test_parts_are_made_whole_moved_and_cut_in_runs() -> None:
    for found in rank_group(4).run(_moved):
        assert all(found), found


@contextmanager
def as_between_gpus(axis: Axis) -> Iterator[list[int]]:
    """Messages go by collectives without heads; how many gathers there were."""
    channel, counted = axis.channel, [0]
    kept = channel.boxes, channel.carrier, channel.tagged, channel.gathers
    gather = dist.ProcessGroup._allgather_base

    def counting(group: dist.ProcessGroup, *args: Any) -> Any:
        counted[0] += 1
        return gather(group, *args)

    channel.boxes, channel.carrier, channel.tagged, channel.gathers = None, None, False, True
    try:
        with replaced(dist.ProcessGroup, "_allgather_base", counting):
            yield counted
    finally:
        channel.boxes, channel.carrier, channel.tagged, channel.gathers = kept


def _gathered() -> list[bool]:
    """Equal parts of plain and merged dims by one collective, unequal ones by none; their gradients added up."""
    mesh = ff.init_mesh(1, 2)
    axis = spatial_of(mesh).axis("width")
    draws = torch.Generator().manual_seed(2)
    found = []
    for columns, layout in ((6, "plain"), (6, "merged"), (6, "channels last"), (5, "plain")):
        x = torch.randn(2, 3, 4, columns, generator=draws, dtype=torch.float64)
        x = x.to(memory_format=torch.channels_last) if layout == "channels last" else x
        x.requires_grad_()
        seed = torch.randn(x.shape, generator=draws, dtype=torch.float64)
        with as_between_gpus(axis) as gathers:
            shell = ff.shard(x, mesh, check=False).sin()
            made = shell.flatten(2).full().view(x.shape) if layout == "merged" else shell.full()
            (made * seed).sum().backward()
        found += [gathers[0] == (columns == 6), torch.allclose(made, x.sin(), rtol=0, atol=1e-15)]
        found += [torch.allclose(x.grad, x.detach().cos() * seed), layout != "channels last" or made.stride(1) == 1]  # type: ignore[arg-type]
    return found


def test_equal_parts_are_gathered_by_one_collective() -> None:
    for found in rank_group(2).run(_gathered):
        assert all(found), found
