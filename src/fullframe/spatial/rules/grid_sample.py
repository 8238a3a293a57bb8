"""Sampling at positions of the user's choice: any rank may read any row.

At few positions each rank adds up what it holds of the rows around each, and the sums are added. At many split ones
each rank borrows the rows between the first and the last that its own positions read, which all ranks agree on first.
Whole ones are cut as the image is where there is one for each pixel, as in a warp, or one for each in several planes.
At others, more than the image has pixels, the image is made whole; the grid never is.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fullframe.ranks.collectives import all_gather_no_grad, all_sum
from fullframe.ranks.recording import recorder
from fullframe.spatial.operands import aligned, has_values, say_gathered
from fullframe.spatial.redistribute import gather_axes, refetched, sliced
from fullframe.spatial.rules.points import at_own
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, whole, wrap

_EXACT = torch.float32, torch.float64  # shorter floats torch rounds in its own way
_TAPS = {"nearest": 1, "bilinear": 2, "bicubic": 4}  # rows along each dim that a position reads


_MODES, _PADDINGS = ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection")


@rule(torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d)
def _grid_sampler(
    func: Any, input: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    """What `grid_sample` calls, with numbers for words."""
    return F.grid_sample(input, grid, _MODES[interpolation_mode], _PADDINGS[padding_mode], align_corners)


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
    where = _Where(mode, padding_mode, bool(align_corners), input.dim() == 5 or input.device.type != "cpu")
    if isinstance(input, SpatialTensor) and not isinstance(grid, SpatialTensor):
        grid = _cut_as(input, grid)
    if isinstance(input, SpatialTensor) and _is_little(input, grid, mode):
        found = _at_positions(input, whole(grid), where)
        spec = _of_result(grid, input.shape[1]) if isinstance(grid, SpatialTensor) else None
        return found if spec is None else wrap(sliced(found, spec), spec)
    if isinstance(input, SpatialTensor) and isinstance(grid, SpatialTensor) and _is_borrowed(input, grid):
        own = _at_own_positions(input, grid, where)
        if own is not None:
            return wrap(own, _of_result(grid, input.shape[1]))
    if isinstance(input, SpatialTensor) and any(p.dim >= 2 for p in input.spec.placements):
        if isinstance(grid, SpatialTensor) or input.numel() > 4 * prod(grid.shape[:-1]) * input.shape[1]:
            say_gathered("grid_sample", "a grid may point anywhere in the image", input)
        input = input.full()  # little beside what is made of it, whole on each rank
    if isinstance(input, SpatialTensor) and not isinstance(grid, SpatialTensor):
        spec = input.spec.with_((*input.shape[:2], *grid.shape[1:-1]), input.spec.placements)
        grid = sliced(grid, spec.with_(tuple(grid.shape), spec.cuts(0)))
        return wrap(func(local_of(input), grid, mode, padding_mode, align_corners), spec)
    if not isinstance(grid, SpatialTensor):
        return func(input, grid, mode, padding_mode, align_corners)  # type: ignore[no-any-return]
    result = _of_result(grid, input.shape[1])
    image = aligned(input, grid.spec.with_(tuple(input.shape), grid.spec.cuts(0)))
    return wrap(func(image, local_of(grid), mode, padding_mode, align_corners), result)


def _cut_as(image: SpatialTensor, grid: Tensor) -> Tensor:
    """A whole grid (N, k * H, W, 2) or (N, k * D, H, W, 3), cut as the image (..., H, W); any other stays whole."""
    sizes, places = image.shape[2:], grid.shape[1:-1]
    if any(p.dim < 2 or not p.is_plain for p in image.spec.placements) or places[1:] != sizes[1:]:
        return grid
    planes, left = divmod(places[0], max(sizes[0], 1))
    if left or not planes:
        return grid
    cuts = (replace(p.at(p.dim - 1), outer=planes if p.dim == 2 else 1) for p in image.spec.placements)
    spec = image.spec.with_(tuple(grid.shape), tuple(cuts))
    return wrap(sliced(grid, spec), spec)


def _of_result(grid: SpatialTensor, channels: int) -> Spec:
    """(N, ..., 2 or 3) to (N, C, ...), cut as the grid is."""
    spec = grid.spec
    spec.require_whole("the coordinates of the grid are split", -1)
    shape = (spec.shape[0], channels, *spec.shape[1:-1])
    return spec.with_(shape, tuple(p if p.dim == 0 else p.at(p.dim + 1) for p in spec.placements))


def _is_little(input: SpatialTensor, grid: Tensor, mode: str) -> bool:
    """Whether all that is read at the positions is less than the image."""
    if input.dtype not in _EXACT or grid.dtype != input.dtype:
        return False
    reads = prod(grid.shape[:-1]) * input.shape[1] * _TAPS[mode] ** (input.dim() - 2)
    sent = grid.numel() if isinstance(grid, SpatialTensor) else 0
    return all(p.dim >= 2 for p in input.spec.placements) and 0 < reads + sent <= input.numel()


class _Where(NamedTuple):
    """How a position in a grid, -1 to 1, is one in the image; to the last bit as torch's kernel has it."""

    mode: str
    padding: str
    corners: bool
    exactly: bool  # the kernels of a GPU, and of volumes: they skip rows outside, others multiply zeros by weights

    def row(self, place: Tensor, size: int) -> Tensor:
        """A coordinate of the grid, counted in rows."""
        if not self.exactly:
            return (place + 1) * ((size - 1) / 2) if self.corners else (place + 1) * (size / 2) - 0.5
        return (place + 1) / 2 * (size - 1) if self.corners else ((place + 1) * size - 1) / 2

    @property
    def skips(self) -> bool:
        """Whether rows outside are left out, rather than read as zeros that weights are multiplied with."""
        return self.exactly and self.mode != "bicubic"

    def inside(self, row: Tensor, size: int) -> Tensor:
        """The row that is read for one outside the image; the image's own borders have no gradient."""
        if self.padding == "reflection":
            row = self._reflected(row, size)
        if self.padding == "zeros":
            return row
        if self.exactly:
            row = _Clipped.apply(row, size)  # type: ignore[no-untyped-call]
        else:
            row = torch.where((row > 0) & (row < size - 1), row, row.detach().nan_to_num(0.0).clamp(0, size - 1))
        return row

    def lost(self, places: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """Which positions (N, P, 2 or 3) have no gradient, as kernels that skip rows find none for them backward.

        With zeros around the image they have no result either.
        """
        if not self.skips:
            return None
        rows = [self.row(places[..., -1 - dim].detach(), size) for dim, size in enumerate(sizes)]
        return torch.stack([row.isnan() if self.padding == "border" else ~row.isfinite() for row in rows]).any(0)

    def _reflected(self, row: Tensor, size: int) -> Tensor:
        low, span = (0.0, size - 1) if self.corners else (-0.5, size)
        if span == 0:
            return torch.where(torch.zeros_like(row, dtype=torch.bool), row, 0.0)
        away = (row - low).abs()
        if self.exactly:
            extra, flips = away.fmod(span), (away / span).floor()
            flips = torch.where(flips < 2**31, flips, 0 if row.device.type == "cpu" else 1)  # as casts to int have it
            return torch.where(flips % 2 == 0, extra, span - extra) + low
        extra = away - (away / (2 * span)).detach().trunc() * (2 * span)
        return torch.where(extra > 2 * span - extra, 2 * span - extra, extra) + low

    def taps(self, place: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
        """The rows that are read for a coordinate, whole numbers, perhaps outside the image, and their weights."""
        row = self.row(place, size)
        if self.mode == "nearest":  # torch gives the grid a gradient of zeros
            return [(self.inside(row, size).round(), torch.where(torch.zeros_like(row, dtype=torch.bool), row, 1.0))]
        if self.mode == "bilinear":
            row = self.inside(row, size)
            first = row.detach().floor()
            return [(first, 1 - (row - first)), (first + 1, row - first)]
        first = row.detach().floor()
        weights = _cubic(row - first)
        return [(self.inside(first + n - 1, size), weight) for n, weight in enumerate(weights)]


class _Clipped(torch.autograd.Function):
    """A row within the image; backward multiplies by 1 or 0, so that what is NaN stays so."""

    @staticmethod
    def forward(ctx: Any, row: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(~((row <= 0) | (row >= size - 1)))
        return row.nan_to_num(size - 1 if row.device.type == "cpu" else 0.0).clamp(0, size - 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (kept,) = ctx.saved_tensors
        return gradient * kept, None


class _Pixels(_Where):
    """Positions that are counted in pixels already."""

    def row(self, place: Tensor, size: int) -> Tensor:
        return place


def at_pixels(image: SpatialTensor, places: SpatialTensor) -> Tensor:
    """An image (N, C, H, W) at positions (N, ..., 2), x and y in pixels of it: bilinear, and zeros outside.

    The result (N, C, ...) lies where the positions lie. Raises Unsupported where these are not split beside the image.
    """
    if not _is_borrowed(image, places):
        raise Unsupported(
            "map and positions are not both float32 or float64, or are split so that no rows can be borrowed"
        )
    own = _at_own_positions(image, places, _Pixels("bilinear", "zeros", False, True))
    if own is None:
        raise Unsupported("some positions are not finite")
    return wrap(own, _of_result(places, image.shape[1]))


def _cubic(t: Tensor) -> list[Tensor]:
    """The weights of the four rows around a position that is `t` behind the second, by torch's kernel (A = -0.75)."""
    a = -0.75
    near: Callable[[Tensor], Tensor] = lambda x: ((a + 2) * x - (a + 3)) * x * x + 1  # noqa: E731
    far: Callable[[Tensor], Tensor] = lambda x: ((a * x - 5 * a) * x + 8 * a) * x - 4 * a  # noqa: E731
    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _at_positions(image: SpatialTensor, grid: Tensor, where: _Where) -> Tensor:
    """(N, C, ...) at the positions of a whole grid, whole on all ranks: each adds up the rows that it holds."""
    channels, sizes = image.shape[1], image.shape[2:]
    places = grid.flatten(1, -2)  # (N, P, 2 or 3), the last dim's coordinate first
    lost = where.lost(places, sizes)
    if lost is not None and where.padding == "zeros":
        places = places.masked_fill(lost[..., None], 0)
    taps = product(*(where.taps(places[..., len(sizes) - 1 - dim], size) for dim, size in enumerate(sizes)))
    rows, inside, weights = (
        torch.stack(of_all, 1)
        for of_all in zip(*(_joint(tap, sizes, sizes, [0] * len(sizes)) for tap in taps), strict=True)
    )
    flat = image.flatten(2)
    assert isinstance(flat, SpatialTensor)
    local, points, held = at_own(local_of(flat), flat.spec, [None, None, rows])
    number = points[2]
    assert number is not None
    found = local.gather(2, number.flatten(1)[:, None].expand(-1, channels, -1)).unflatten(2, rows.shape[1:])
    outside = ~(inside if held is None else inside & held)  # (N, taps, P), of `found` (N, C, taps, P)
    if lost is not None and where.padding == "zeros":
        outside = outside | lost[:, None]
    elif lost is not None:
        weights = torch.where(lost[:, None], weights.detach(), weights)
        found = torch.where(lost[:, None, None], found.detach(), found)
    total = _weighted(found, weights, outside, where).sum(2)
    total = all_sum(total, flat.spec.group)
    return torch.ops.aten._unsafe_view(total, (*total.shape[:2], *grid.shape[1:-1]))  # type: ignore[no-any-return]


def _weighted(found: Tensor, weight: Tensor, outside: Tensor, where: _Where) -> Tensor:
    """What was read (N, C, ...) by its weights (N, ...), zero `outside`."""
    read = found.masked_fill(outside[:, None], 0) * weight[:, None]
    return read.masked_fill(outside[:, None], 0) if where.skips else read


def _is_borrowed(input: SpatialTensor, grid: SpatialTensor) -> bool:
    """Whether each rank can borrow the rows that its own positions read."""
    plain = all(p.dim >= 2 and p.is_plain for p in input.spec.placements)
    cut = grid.spec.is_split(0) or grid.spec.is_split(-1)
    return plain and not cut and input.dtype in _EXACT and grid.dtype == input.dtype


def _at_own_positions(image: SpatialTensor, grid: SpatialTensor, where: _Where) -> Tensor | None:
    """This rank's part of the result: (N, C, ...) at its own positions, from rows that it owns or borrows.

    None on all ranks where one's positions are not all finite: which rows these read is the kernel's own choice.

    What is read is not kept for backward: it is read again, for one of the rows around each position after the other.
    """
    own, sizes = local_of(grid), image.shape[2:]
    borrowed = _borrowed(image, own.detach(), where)
    if borrowed is None:
        return None
    piece, first = borrowed
    shape, places = [max(held, 1) for held in piece.shape[2:]], own.flatten(1, -2)
    flat = piece.flatten(2)
    flat = torch.cat([flat, flat.new_zeros((*flat.shape[:2], prod(shape)))], 2) if not flat.shape[2] else flat
    total = flat.new_zeros(())
    for which in product(range(_TAPS[where.mode]), repeat=len(sizes)):
        total = total + checkpoint(_one_tap, flat, places, which, sizes, shape, first, where,
                                   use_reentrant=False, preserve_rng_state=False)  # fmt: skip
    return torch.ops.aten._unsafe_view(total, (*total.shape[:2], *own.shape[1:-1]))  # type: ignore[no-any-return]


def _one_tap(
    flat: Tensor,
    places: Tensor,
    which: Sequence[int],
    sizes: Sequence[int],
    shape: Sequence[int],
    first: Sequence[int],
    where: _Where,
) -> Tensor:
    """(N, C, P): the row `which` of each dim around each position, by its weight; of the rows from `first` on."""
    tap = [where.taps(places[..., -1 - dim], size)[n] for dim, (n, size) in enumerate(zip(which, sizes, strict=True))]
    number, inside, weight = _joint(tap, sizes, shape, first)
    found = flat.gather(2, number[:, None].expand(-1, flat.shape[1], -1))
    return _weighted(found, weight, ~inside, where)


def _borrowed(image: SpatialTensor, grid: Tensor, where: _Where) -> tuple[Tensor, list[int]] | None:
    """The rows of a split image that this rank's part of a grid reads, and the first of them in each sampled dim.

    None where any rank's part of the grid is not finite.
    """
    local, spec, first = local_of(image), image.spec, [0] * (image.dim() - 2)
    spatial, cuts = spec.spatial, spec.placements
    if not has_values(grid):  # any row may be read: in a simulation, which sends as much, and in a compiled block
        if recorder() is None:
            reach_of_none = grid.new_zeros((len(cuts) + 1, 2), dtype=torch.int64)
            all_gather_no_grad(reach_of_none, spatial.replica, "rows of a grid")
        return gather_axes(local, spec, [p.axis for p in cuts])[0], first
    reach = [_reach(grid[..., 1 - p.dim], spec.shape[p.dim], where) for p in cuts]
    mine = torch.tensor([*reach, (int(grid.isfinite().all()), 0)], device=grid.device)
    everyone = all_gather_no_grad(mine, spatial.replica, "rows of a grid").tolist()
    if not all(rank[-1][0] for rank in everyone):
        return None
    for number, p in enumerate(cuts):
        reaches = [reach[number] for reach in everyone]
        # What ranks want that differ in the axes of later cuts alone is borrowed by each: those cuts share it.
        later = {q.axis for q in cuts[number + 1 :]}
        reaches = _of_all([[c for name, c in place.items() if name not in later] for place in spatial.places], reaches)
        axis = spatial.axis(p.axis)
        wanted = tuple(range(*reaches[spatial.replica_ranks.index(rank)]) for rank in axis.ranks)
        local = refetched(local, spec, p, wanted)
        first[p.dim - 2] = wanted[axis.coordinate].start
    return local, first


def _of_all(places: list[list[int]], reaches: list[list[int]]) -> list[list[int]]:
    """For each rank the rows from the first to the last that the ranks of its place read."""
    found = []
    for mine in places:
        near = [reach for place, reach in zip(places, reaches, strict=True) if place == mine and reach[1] > reach[0]]
        found.append([min(start for start, _ in near), max(stop for _, stop in near)] if near else [0, 0])
    return found


def _reach(place: Tensor, size: int, where: _Where) -> tuple[int, int]:
    """The first row of an image that is read for coordinates of a grid, and the one behind the last; 0, 0 for none."""
    rows = [row[(row >= 0) & (row <= size - 1)] for row, _ in where.taps(place, size)]
    ends = [end for row in rows if row.numel() for end in row.aminmax()]
    return (int(min(ends)), int(max(ends)) + 1) if ends else (0, 0)


def _joint(
    tap: Sequence[tuple[Tensor, Tensor]], sizes: Sequence[int], shape: Sequence[int], first: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of each dim as one number in a flat piece of the image; whether they are inside; their joint weight.

    The piece has a `shape` and begins at the rows `first`.
    """
    number, inside, weight = torch.zeros_like(tap[0][0], dtype=torch.int64), None, None
    for (row, share), size, held, start in zip(tap, sizes, shape, first, strict=True):
        here = (row >= 0) & (row <= size - 1)
        number = number * held + torch.where(here, row.detach() - start, 0).long()
        inside = here if inside is None else inside & here
        weight = share if weight is None else weight * share
    assert inside is not None and weight is not None
    return number, inside, weight
