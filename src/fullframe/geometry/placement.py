"""Where a split lies in a tensor's shape, and where it goes when dims are moved, merged or cut.

A split dim is `outer x rows x inner`; only the middle factor is cut. An image of 2 rows and 4 columns, split on W:

    (H, W) = (2, 4)                0 1 | 2 3        dim 1: outer 1, rows 4, inner 1
                                   4 5 | 6 7
    flatten to (8,)                0 1 | 2 3   4 5 | 6 7        dim 0: outer 2, rows 4, inner 1
    rank 0 holds 0 1 4 5, rank 1 holds 2 3 6 7: as before, so nothing is sent

    (W, H) = (4, 2)                0 4   1 5 | 2 6   3 7        flattened, dim 0: outer 1, rows 4, inner 2;
                                                                or, in one run a rank, `canonical`: rows 8, inner 1
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from fullframe.errors import ShapeError
from fullframe.geometry.extents import Extents


@dataclass(frozen=True)
class Placement:
    """Tensor dim `dim` is `outer x extents.size x inner`, and the middle factor is split over mesh axis `axis`.

    `order` is None where each rank's rows follow those of the rank before it. Else they are what a mask picked, each
    rank's number of them known, and `order` is what knows where they stand in the whole tensor.
    """

    axis: str
    dim: int
    extents: Extents
    outer: int = 1
    inner: int = 1
    order: Any = None

    @property
    def is_plain(self) -> bool:
        """Whether the dim is nothing but the split factor, with its rows in order."""
        return self.outer == 1 and self.inner == 1 and self.order is None

    def at(self, dim: int) -> "Placement":
        """The same split at another dim."""
        return self if dim == self.dim else replace(self, dim=dim)

    def recut(self, extents: Extents) -> "Placement":
        """The same factor cut at other boundaries, of as many rows as these say; ShapeError for a mask's."""
        if self.order is not None:
            raise ShapeError(f"{self} has no other boundaries; use x.full() there")
        return replace(self, extents=extents)

    def __str__(self) -> str:
        factors = "" if self.is_plain else f" as {self.outer}x{self.extents.size}x{self.inner}"
        rows = "" if self.order is None else ", the elements of a mask"
        return f"dim {self.dim}{factors} over {self.axis} at {self.extents.bounds}{rows}"


Placements = tuple[Placement, ...]


def local_shape(shape: Sequence[int], placements: Placements, coordinates: Sequence[int]) -> tuple[int, ...]:
    """The shape one rank holds; `coordinates[i]` is its part along placement `i`."""
    local = list(shape)
    for placement, part in zip(placements, coordinates, strict=True):
        local[placement.dim] = local[placement.dim] // placement.extents.size * placement.extents.sizes[part]
    return tuple(local)


def permuted(placements: Placements, order: Sequence[int]) -> Placements:
    """Placements after `permute(order)`: new dim `i` is old dim `order[i]`."""
    return tuple(p.at(list(order).index(p.dim)) for p in placements)


def reshaped(placements: Placements, shape: Sequence[int], new_shape: Sequence[int]) -> Placements | None:
    """Placements after a row-major reshape, or None where a split factor would be cut in pieces."""
    moved = []
    for p in placements:
        inner = p.inner * prod(shape[p.dim + 1 :])
        outer = p.outer * prod(shape[: p.dim])
        placement = _place(p, outer, inner, new_shape)
        if placement is None:
            return None
        moved.append(placement)
    return canonical(tuple(moved))


def canonical(placements: Placements) -> Placements:
    """The same splits with `inner` made 1 where no other split lies within it: boundaries are multiplied by it.

    So a reshape and the way back end at equal placements, however they were written.
    """
    result = []
    for p in placements:
        inside = [q for q in placements if q is not p and q.dim == p.dim and q.outer > p.outer]
        if p.inner > 1 and p.order is None and not inside:
            bounds = tuple(b * p.inner for b in p.extents.bounds)
            p = replace(p, extents=Extents(bounds), inner=1)
        result.append(p)
    return tuple(result)


def grain(p: Placement, shape: Sequence[int], new_shape: Sequence[int]) -> int:
    """How many rows of `p` a reshape keeps together in one new row: its boundaries must be multiples of that.

    H = 12 split, (C, H) to (C, 3, 4): 4, as a row of the new dim 1 is 4 of the old rows. 1 where the reshape does not
    cut the split factor; 0 where no boundaries would do.
    """
    inner = p.inner * prod(shape[p.dim + 1 :])
    cuts = [prod(new_shape[dim:]) for dim in range(1, len(new_shape))]
    inside = [cut for cut in cuts if inner < cut < inner * p.extents.size]
    if not inside:
        return 1
    return max(inside) // inner if max(inside) % inner == 0 and p.extents.size % (max(inside) // inner) == 0 else 0


def coarsened(p: Placement, rows: int) -> Placement:
    """The same split, counted in runs of `rows` rows; the boundaries must be multiples of `rows`."""
    return replace(p, extents=Extents(tuple(b // rows for b in p.extents.bounds)), inner=p.inner * rows)


def _place(p: Placement, outer: int, inner: int, new_shape: Sequence[int]) -> Placement | None:
    """The dim of `new_shape` that holds the factor with `outer` elements before it and `inner` behind it."""
    for dim, size in enumerate(new_shape):
        before, behind = prod(new_shape[:dim]), prod(new_shape[dim + 1 :])
        if size <= 1 or not before or not behind or outer % before or inner % behind:
            continue
        if (outer // before) * p.extents.size * (inner // behind) == size:
            return replace(p, dim=dim, outer=outer // before, inner=inner // behind)
    return None


def local_factors(p: Placement, others: Placements, coordinates: dict[str, int]) -> tuple[int, int, int]:
    """The sizes (outer, rows, inner) of dim `p.dim` in one rank's tensor, `rows` being the factor that `p` splits.

    A tensor (H * W) split on both: for the placement of W, `outer` is this rank's share of H. `others` are the
    placements that the tensor is already cut by, with `p` or without (then `rows` are all); `coordinates` by axis.
    """
    outer, inner, rows = p.outer, p.inner, p.extents.size
    for q in others:
        if q.axis == p.axis:
            rows = p.extents.sizes[coordinates[p.axis]]
        elif q.dim == p.dim and q.outer < p.outer:
            outer = outer // q.extents.size * q.extents.sizes[coordinates[q.axis]]
        elif q.dim == p.dim:
            inner = inner // q.extents.size * q.extents.sizes[coordinates[q.axis]]
    return outer, rows, inner
