"""cat and stack: along a whole dim nothing moves; along a split dim the largest operand stays where it is."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.geometry.extents import Extents, overlap
from fullframe.geometry.placement import Placement
from fullframe.ranks.exchange import fetch
from fullframe.spatial.rules.indexing import sliced_rows
from fullframe.spatial.rules.registry import Refused, rule
from fullframe.spatial.rules.window_plan import nonempty
from fullframe.spatial.tensor import Layout, SpatialTensor, aligned, gather_axes, local_of, sliced, united, wrap


@rule(torch.cat, torch.concat, torch.concatenate)
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    empty = [t for t in tensors if t.dim() == 1 and not t.numel()]  # torch lets them stand beside any others
    tensors = [t for t in tensors if t.dim() != 1 or t.numel()]
    if empty:
        joined: Tensor = func(tensors, dim)
        return joined + sum(t.sum() for t in empty) if any(t.requires_grad for t in empty) else joined
    shells = [t for t in tensors if isinstance(t, SpatialTensor)]
    reference = max(shells, key=lambda shell: shell._layout.shape[dim])._layout
    dim %= len(reference.shape)
    if any(shell._layout.is_split(dim) for shell in shells):
        return _cat_split(tensors, dim)
    sizes = [t.shape[dim] for t in tensors]
    layout = _common(shells)
    local = torch.cat([_like(t, layout, dim) for t in tensors], dim)
    return wrap(local, layout.with_((*layout.shape[:dim], sum(sizes), *layout.shape[dim + 1 :]), layout.placements))


def _common(shells: Sequence[SpatialTensor]) -> Layout:
    """A layout that is cut wherever one of the shells is, at the boundaries of the first that is."""
    first = shells[0]._layout
    return first.with_(first.shape, united([shell._layout.placements for shell in shells]))


def _like(t: Tensor, layout: Layout, dim: int) -> Tensor:
    """The local part of an operand that has the shape of `layout` but in `dim`."""
    return aligned(t, layout.with_((*layout.shape[:dim], t.shape[dim], *layout.shape[dim + 1 :]), layout.placements))


@rule(torch.stack)
def _stack(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    layout = _common([t for t in tensors if isinstance(t, SpatialTensor)])
    dim %= len(layout.shape) + 1
    local = torch.stack([aligned(t, layout) for t in tensors], dim)
    shape = (*layout.shape[:dim], len(tensors), *layout.shape[dim:])
    return wrap(local, layout.with_(shape, tuple(p if p.dim < dim else p.at(p.dim + 1) for p in layout.placements)))


@rule(torch.roll, Tensor.roll)
def _roll(func: Any, x: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    if dims is None:
        raise Refused("it rolls over the flattened tensor", "Name the dims.")
    pairs = zip(*(((v,) if isinstance(v, int) else v) for v in (shifts, dims)), strict=True)
    for shift, dim in pairs:
        if not isinstance(x, SpatialTensor) or not x._layout.is_split(dim):
            x = _rolled_whole(x, shift, dim)
            continue
        dim, size = dim % x.dim(), x.shape[dim]
        if shift % size:
            at = size - shift % size
            x = torch.cat([sliced_rows(x, dim, at, size), sliced_rows(x, dim, 0, at)], dim)
    return x


def _rolled_whole(x: Tensor, shift: int, dim: int) -> Tensor:
    if not isinstance(x, SpatialTensor):
        return torch.roll(x, shift, dim)
    return wrap(torch.roll(local_of(x), shift, dim), x._layout)


def _cat_split(tensors: Sequence[Tensor], dim: int) -> Tensor:
    sizes = [t.shape[dim] for t in tensors]
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    split = [n for n, t in enumerate(tensors) if isinstance(t, SpatialTensor) and t._layout.of(dim) is not None]
    main = max(split, key=lambda n: sizes[n])
    layout = tensors[main]._layout  # type: ignore[attr-defined]
    placement = layout.of(dim)
    moved = tuple(b + starts[main] for b in placement.extents.bounds[1:-1])
    extents = nonempty(Extents((0, *moved, sum(sizes))))
    if extents is None:
        whole = [_whole(t, dim) for t in tensors]
        return torch.cat(whole, dim)
    axis = layout.spatial.axis(placement.axis)
    others = layout.with_(layout.shape, tuple(p for p in layout.placements if p is not placement))
    parts = []
    for t, start, size in zip(tensors, starts, sizes, strict=True):
        rows = range(start, start + size)
        wanted = tuple(range(o.start - start, o.stop - start) for o in (overlap(r, rows) for r in extents.ranges))
        parts.append(_rows(t, dim, wanted, axis, others))
    joined = tuple(p if p is not placement else Placement(p.axis, dim, extents) for p in layout.placements)
    shape = (*layout.shape[:dim], sum(sizes), *layout.shape[dim + 1 :])
    return wrap(torch.cat(parts, dim), layout.with_(shape, joined))


def _rows(t: Tensor, dim: int, wanted: tuple[range, ...], axis: Any, others: Layout) -> Tensor:
    """This rank's `wanted` rows of one operand, cut along the other axes as `others` is."""
    mine = wanted[axis.part]
    if not isinstance(t, SpatialTensor):
        return sliced(t, others).narrow(dim, mine.start if mine else 0, len(mine))
    own = t._layout.of(dim)
    if own is None:
        return aligned(t, others.with_(t._layout.shape, others.placements)).narrow(
            dim, mine.start if mine else 0, len(mine)
        )
    if own.axis != axis.name:
        raise Refused("operands are split over different mesh axes along the joined dim")
    wanted = tuple(r if r else range(0) for r in wanted)
    local = fetch(local_of(t), dim, own.extents, wanted, axis)
    rest = t._layout.with_(t._layout.shape, tuple(p for p in t._layout.placements if p.axis != own.axis))
    if rest.placements == others.placements:
        return local
    cut = rest.with_((*rest.shape[:dim], len(mine), *rest.shape[dim + 1 :]), rest.placements)
    return aligned(wrap(local, cut), others.with_(cut.shape, others.placements))


def _whole(t: Tensor, dim: int) -> Tensor:
    if not isinstance(t, SpatialTensor):
        return t
    axes = [p.axis for p in t._layout.placements if p.dim == dim]
    return wrap(*gather_axes(local_of(t), t._layout, axes))
