"""Ops along one dim that need it whole: the split moves to another dim for as long as the op runs.

Each rank has all rows of a part of the other dims, and sends and receives what changes hands, no more: an exchange of
all with all before the op and one behind it.
"""

from collections.abc import Callable

from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.geometry.window import proportional_extents
from fullframe.ranks.exchange import fetch, joined
from fullframe.ranks.transposition import transposed
from fullframe.spatial.redistribute import gather_axes
from fullframe.spatial.rules.window_plan import nonempty
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


def along(x: SpatialTensor, dim: int, op: Callable[[Tensor], Tensor]) -> Tensor:
    """`op` of a tensor whose `dim` is whole, which may come out of another size; other dims keep theirs.

    The result is split where `x` is, or whole there where it has fewer rows than ranks.
    """
    spec, local = x.spec, local_of(x)
    dim %= len(spec.shape)
    placement = spec.of(dim)
    if placement is None:
        local = op(local)
        return wrap(local, spec.resized(dim, local.shape[dim]))
    axis, other = spec.spatial.axis(placement.axis), _other(spec, dim)
    if other is None:
        local = op(fetch(local, dim, placement.extents, (range(spec.shape[dim]),) * axis.size, axis))
    else:
        pieces = Extents.even(local.shape[other], axis.size)
        local = _of_any(op, transposed(local, dim, placement.extents, other, pieces, axis), other)
    size = local.shape[dim]
    same = size == spec.shape[dim]
    extents = placement.extents if same else nonempty(proportional_extents(placement.extents, size))
    if extents is None:
        goal = spec.whole_along([axis.name]).resized(dim, size)
        if other is not None:
            local = fetch(local, other, pieces, (range(pieces.size),) * axis.size, axis)
        return wrap(local, goal)
    goal = spec.resized(dim, size, extents)
    if other is not None:
        return wrap(transposed(local, other, pieces, dim, extents, axis), goal)
    rows = extents.ranges[axis.coordinate]
    return wrap(local.narrow(dim, rows.start, len(rows)), goal)


def _of_any(op: Callable[[Tensor], Tensor], local: Tensor, cut: int) -> Tensor:
    """`op` of a tensor that may have nothing in dim `cut`, which some functions of torch refuse."""
    if local.shape[cut]:
        return op(local)
    row = local.new_zeros((*local.shape[:cut], 1, *local.shape[cut + 1 :]))
    return op(joined([local, row], cut)).narrow(cut, 0, 0)


def _other(spec: Spec, dim: int) -> int | None:
    """The longest dim beside `dim`, a whole one if there is one with rows for each rank; None where there is none."""
    rows = {d: size for d, size in enumerate(spec.shape) if d != dim and size > 1}
    placement = spec.of(dim)
    assert placement is not None
    whole = {d: size for d, size in rows.items() if not spec.is_split(d) and size >= placement.extents.parts}
    rows = whole or rows
    return max(rows, key=lambda d: rows[d]) if rows else None


def moved_from(x: SpatialTensor, dim: int) -> Tensor:
    """`x` with `dim` whole and another whole dim split in its place, or whole along the axis where there is none."""
    spec = x.spec
    dim %= len(spec.shape)
    placement = spec.of(dim)
    if placement is None:
        return x
    axis, other = spec.spatial.axis(placement.axis), _other(spec, dim)
    if other is None or spec.is_split(other) or spec.shape[other] < axis.size:
        return wrap(*gather_axes(local_of(x), spec, [axis.name]))
    pieces = Extents.even(spec.shape[other], axis.size)
    local = transposed(local_of(x), dim, placement.extents, other, pieces, axis)
    moved = tuple(p.recut(pieces).at(other) if p is placement else p for p in spec.placements)
    return wrap(local, spec.with_(spec.shape, moved))
