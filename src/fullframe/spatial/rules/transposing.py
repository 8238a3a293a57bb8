"""Ops along one dim that need it whole: the split moves to another dim for as long as the op runs.

Each rank has all rows of a part of the other dims, and sends and receives what changes hands, no more: an exchange of
all with all before the op and one behind it.
"""

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.geometry.window import proportional_extents
from fullframe.ranks.exchange import fetch, joined
from fullframe.ranks.transposition import transposed
from fullframe.spatial.operands import united
from fullframe.spatial.redistribute import gather_axes, moved, sliced
from fullframe.spatial.rules.window_plan import nonempty
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, local_or_whole, wrap


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


def with_whole(x: Tensor, dims: Sequence[int], op: Callable[[Tensor], Tensor]) -> Tensor:
    """`op` of `x` with all of `dims` whole, which may come out of other sizes; the result is split where `x` is.

    It is whole there where it has fewer rows than ranks. Other dims keep their sizes.
    """
    split = [d for d in dims if isinstance(x, SpatialTensor) and x.spec.is_split(d)]
    if not split:
        return op(x)
    assert isinstance(x, SpatialTensor)
    dim, turned = split[0], moved_from(x, split[0], dims)
    placement = x.spec.of(dim)
    assert placement is not None
    axis, found = x.spec.spatial.axis(placement.axis), with_whole(turned, dims, op)
    extents = nonempty(proportional_extents(placement.extents, found.shape[dim]))
    spec = found.spec if isinstance(found, SpatialTensor) else x.spec.with_(tuple(found.shape), ())
    local = local_or_whole(found)
    there = next((p for p in spec.placements if p.axis == axis.name), None)
    if extents is None:
        return wrap(*gather_axes(local, spec, [axis.name]))
    goal = (*(p for p in spec.placements if p is not there), placement.recut(extents))
    result = spec.with_(spec.shape, united([goal]))
    if there is None:
        return wrap(sliced(local, result, spec.placements), result)
    return wrap(transposed(local, there.dim, there.extents, dim, extents, axis), result)


def _of_any(op: Callable[[Tensor], Tensor], local: Tensor, cut: int) -> Tensor:
    """`op` of a tensor that may have nothing in dim `cut`, which some functions of torch refuse."""
    if local.shape[cut]:
        return op(local)
    row = local.new_zeros((*local.shape[:cut], 1, *local.shape[cut + 1 :]))
    return op(joined([local, row], cut)).narrow(cut, 0, 0)


def _other(spec: Spec, dim: int, besides: Collection[int] = ()) -> int | None:
    """The longest dim beside `dim`, a whole one if there is one with rows for each rank; None where there is none."""
    rows = {d: size for d, size in enumerate(spec.shape) if d != dim and d not in besides and size > 1}
    placement = spec.of(dim)
    assert placement is not None
    whole = {d: size for d, size in rows.items() if not spec.is_split(d) and size >= placement.extents.parts}
    rows = whole or rows
    return max(rows, key=lambda d: rows[d]) if rows else None


def moved_from(x: SpatialTensor, dim: int, besides: Collection[int] = ()) -> Tensor:
    """`x` with `dim` whole and another whole dim split in its place, or whole along the axis where there is none.

    The other dim is none of `besides`.
    """
    spec = x.spec
    dim %= len(spec.shape)
    placement = spec.of(dim)
    if placement is None:
        return x
    axis, other = spec.spatial.axis(placement.axis), _other(spec, dim, {d % len(spec.shape) for d in besides})
    if other is None or spec.is_split(other) or spec.shape[other] < axis.size:
        return wrap(*gather_axes(local_of(x), spec, [axis.name]))
    return wrap(*moved(local_of(x), spec, placement, other, Extents.even(spec.shape[other], axis.size)))
