"""A local tensor and its spec, cut otherwise: made whole along an axis, moved to other boundaries, sliced.

Knows no shell. All ranks of the axes in question call these together, but for `sliced`, which sends nothing, unless
it is the first that asks for the order of what a mask picked.
"""

from collections.abc import Sequence
from math import prod

from torch import Tensor, strided

from fullframe.errors import ShapeError
from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement, Placements, local_factors
from fullframe.ranks.collectives import in_one_row
from fullframe.ranks.exchange import fetch
from fullframe.ranks.mesh import Axis, axes_in
from fullframe.ranks.transposition import transposed
from fullframe.spatial.rules.registry import Merged, Unsupported
from fullframe.spatial.rules.unsupported import OF_SPARSE
from fullframe.spatial.spec import Spec


def gather_axes(local: Tensor, spec: Spec, axes: Sequence[str]) -> tuple[Tensor, Spec]:
    """(local, spec) made whole along the named mesh axes; differentiable."""
    for placement in spec.placements:
        if placement.axis in axes:
            everything = (range(placement.extents.size),) * placement.extents.parts
            local = refetched(local, spec, placement, everything)
            spec = spec.whole_along([placement.axis])
    return local, spec


def refetched(local: Tensor, spec: Spec, placement: Placement, wanted: tuple[range, ...]) -> Tensor:
    """`local` with the rows `wanted[coordinate]` of one placement's dim instead of its own; differentiable.

    Rows are those of the split factor: a merged dim is taken apart into (outer, rows, inner) for the exchange. Of what
    a mask picked all rows are to be had, in their order, or none.
    """
    axis = spec.spatial.axis(placement.axis)
    if placement.is_plain:
        return _fetched(local, placement.dim, placement.extents, wanted, axis)
    dim, order = placement.dim, placement.order
    if order is not None and any(len(rows) != placement.extents.size for rows in wanted):
        raise Merged(spec, dim)
    split = local.unflatten(dim, local_factors(placement, spec.placements, spec.coordinates))
    found = _fetched(split, dim + 1, placement.extents, wanted, axis)
    return (found if order is None else found.index_select(dim + 1, order.of_all)).flatten(dim, dim + 2)


def _fetched(local: Tensor, dim: int, extents: Extents, wanted: tuple[range, ...], axis: Axis) -> Tensor:
    """`fetch`; but equal parts that all ranks want whole come by one collective, where gloo does not send them."""
    whole = axis.size > 1 and all(len(rows) == extents.size for rows in wanted)
    if whole and len(set(extents.sizes)) == 1 and axis.channel.gathers:
        return in_one_row(local, dim, axis.group)
    return fetch(local, dim, extents, wanted, axis)


def in_runs(local: Tensor, spec: Spec, dim: int) -> tuple[Tensor, Spec]:
    """A dim merged from several factors cut in runs of rows over one mesh axis instead, or whole where it is small.

    The tensor is made whole along the axes in question for a moment: an exchange of all with all.
    """
    here = spec.cuts(dim)
    local, spec = gather_axes(local, spec, [p.axis for p in here])
    axis = max((spec.spatial.axis(name) for p in here for name in axes_in(p.axis)), key=lambda a: a.size)
    if spec.shape[dim] < max(2, axis.size):
        return local, spec
    runs = Placement(axis.name, dim, Extents.even(spec.shape[dim], axis.size))
    cut = spec.with_(spec.shape, (*spec.placements, runs))
    return sliced(local, spec.with_(spec.shape, (runs,))), cut


def resplit(local: Tensor, spec: Spec, axis: str, extents: Extents) -> tuple[Tensor, Spec]:
    """(local, spec) with other boundaries along one mesh axis; the rows in between change hands. Differentiable."""
    placement = next(p for p in spec.placements if p.axis == axis)
    if placement.extents == extents:
        return local, spec
    local = refetched(local, spec, placement, extents.ranges)
    return local, spec.recut(placement, placement.recut(extents))


def moved(local: Tensor, spec: Spec, placement: Placement, dim: int, extents: Extents) -> tuple[Tensor, Spec]:
    """(local, spec) with a plain split moved to the whole dim `dim`, cut there at `extents`; differentiable.

    An exchange of all with all: no rank holds more than its part before and its part behind.
    """
    axis = spec.spatial.axis(placement.axis)
    local = transposed(local, placement.dim, placement.extents, dim, extents, axis)
    return local, spec.recut(placement, placement.recut(extents).at(dim))


def sliced(whole: Tensor, spec: Spec, cut: Placements = ()) -> Tensor:
    """This rank's part of an operand that broadcasts against `spec`, sends nothing.

    `cut` are the placements (in dims of `spec`) by which the operand is split already.
    """
    offset = len(spec.shape) - whole.dim()
    for p in spec.placements:
        dim = p.dim - offset
        if dim < 0 or whole.shape[dim] == 1 or any(q.axis == p.axis for q in cut):
            continue
        factors = (1, p.extents.size, 1) if p.is_plain else local_factors(p, cut, spec.coordinates)
        if whole.shape[dim] != prod(factors):  # torch would refuse any other but 1
            shape = tuple(whole.shape)
            raise ShapeError(f"an operand of shape {shape} does not broadcast to {spec.shape} in dim {p.dim}")
        rows = spec.rows(p)
        if whole.layout is not strided:
            raise Unsupported(*OF_SPARSE)
        if p.is_plain:
            whole = whole.narrow(dim, rows.start, len(rows))
        else:
            parts = whole.unflatten(dim, factors)
            if p.order is None:
                parts = parts.narrow(dim + 1, rows.start, len(rows))
            else:
                parts = parts.index_select(dim + 1, p.order.own.to(parts.device))  # the host, in `verify`
            whole = parts.flatten(dim, dim + 2)
        cut = (*cut, p)
    return whole
