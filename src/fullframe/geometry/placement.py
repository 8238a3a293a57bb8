"""Where a split lies in a tensor's shape, and where it goes when dims are moved, merged or cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from fullframe.geometry.extents import Extents


@dataclass(frozen=True)
class Placement:
    """Tensor dim `dim` is `outer x extents.size x inner`, and the middle factor is split over mesh axis `axis`."""

    axis: str
    dim: int
    extents: Extents
    outer: int = 1
    inner: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether the dim is nothing but the split factor."""
        return self.outer == 1 and self.inner == 1

    def at(self, dim: int) -> "Placement":
        """The same split at another dim."""
        return replace(self, dim=dim)

    def recut(self, extents: Extents) -> "Placement":
        """The same factor cut at other boundaries, of as many rows as these say."""
        return replace(self, extents=extents)

    def __str__(self) -> str:
        factors = "" if self.is_plain else f" as {self.outer}x{self.extents.size}x{self.inner}"
        return f"dim {self.dim}{factors} over {self.axis} at {self.extents.bounds}"


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
    """The same splits, each with the whole dims behind it in its dim taken into its rows where no other split is."""
    result = []
    for p in placements:
        inside = [q for q in placements if q is not p and q.dim == p.dim and q.outer > p.outer]
        if p.inner > 1 and not inside:
            bounds = tuple(b * p.inner for b in p.extents.bounds)
            p = replace(p, extents=Extents(bounds), inner=1)
        result.append(p)
    return tuple(result)


def grain(p: Placement, shape: Sequence[int], new_shape: Sequence[int]) -> int:
    """The run of rows of `p` that a reshape keeps together: its boundaries must be multiples of it.

    1 where the reshape does not cut the split factor; 0 where no boundaries would do.
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
    """Dim `p.dim` of a rank's tensor as (outer, rows, inner) around the factor that `p` splits.

    `others` are the placements that this tensor is already cut by (`p` itself or not); `coordinates` by axis.
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
