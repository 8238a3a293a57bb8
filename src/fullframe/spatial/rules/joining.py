"""cat and stack: along a whole dim nothing moves; along a split dim the largest operand stays where it is, unless one
rank would hold much more of the result than the others.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fullframe.geometry.extents import Extents, overlap
from fullframe.ranks.exchange import fetch, joined
from fullframe.spatial.operands import aligned, say_gathered, united
from fullframe.spatial.redistribute import gather_axes
from fullframe.spatial.rules.indexing import sliced_rows
from fullframe.spatial.rules.registry import TooSmall, rule
from fullframe.spatial.rules.window_plan import nonempty
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, on_local, wrap

MOST_OF_A_SHARE = 1.25  # a Swin's shift, a class token and circular padding stay below it, and move what they must


@rule(torch.cat, torch.concat, torch.concatenate)
def _cat(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Along a whole dim nothing is sent; along a split one the rows of all but the largest operand may move."""
    specs = tuple(t.spec if type(t) is SpatialTensor else None for t in tensors)
    plans = specs[0].plans if specs and specs[0] is not None else {}
    key = _cat, dim, specs
    known: Spec | None = plans.get(key)  # of parts that lie alike
    if known is not None:
        return wrap(torch.cat([local_of(t) for t in tensors], dim), known)  # type: ignore[arg-type]
    empty = [t for t in tensors if t.dim() == 1 and not t.numel()]  # torch lets them stand beside any others
    tensors = [t for t in tensors if t.dim() != 1 or t.numel()]
    if empty:
        joined: Tensor = func(tensors, dim)
        return joined + sum(t.sum() for t in empty) if any(t.requires_grad for t in empty) else joined
    shells = [t for t in tensors if isinstance(t, SpatialTensor)]
    reference = max(shells, key=lambda shell: shell.spec.shape[dim]).spec
    dim %= len(reference.shape)
    if any(shell.spec.is_split(dim) for shell in shells):
        return _cat_split(tensors, dim)
    sizes = [t.shape[dim] for t in tensors]
    spec = _common(shells)
    result = spec.resized(dim, sum(sizes))
    parts = [spec.resized(dim, size) for size in sizes]
    if all(own is part and not part.fleeting for own, part in zip(specs, parts, strict=True)):
        plans[key] = result
    return wrap(torch.cat([aligned(t, part) for t, part in zip(tensors, parts, strict=True)], dim), result)


def _common(shells: Sequence[SpatialTensor]) -> Spec:
    """A spec that is cut wherever one of the shells is, at the boundaries of the first that is."""
    first = shells[0].spec
    return first.with_(first.shape, united([shell.spec.placements for shell in shells]))


@rule(torch.stack)
def _stack(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Joined along a new dim, which is whole; operands are brought to the cuts of the first."""
    spec = _common([t for t in tensors if isinstance(t, SpatialTensor)])
    dim %= len(spec.shape) + 1
    local = torch.stack([aligned(t, spec) for t in tensors], dim)
    shape = (*spec.shape[:dim], len(tensors), *spec.shape[dim:])
    return wrap(local, spec.with_(shape, tuple(p if p.dim < dim else p.at(p.dim + 1) for p in spec.placements)))


@rule(torch.roll, Tensor.roll)
def _roll(func: Any, x: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    """Rows moved round a split dim by joining two slices; without dims, elements round the flattened tensor."""
    if dims is None or dims == ():
        return _rolled_over(x, shifts if isinstance(shifts, int) else shifts[0], x.dim() - 1)
    pairs = zip(*(((v,) if isinstance(v, int) else v) for v in (shifts, dims)), strict=True)
    for shift, dim in pairs:
        if not isinstance(x, SpatialTensor) or not x.spec.is_split(dim):
            x = on_local(x, partial(torch.roll, shifts=shift, dims=dim))
            continue
        dim, size = dim % x.dim(), x.shape[dim]
        if shift % size:
            at = size - shift % size
            x = joined([sliced_rows(x, dim, at, size), sliced_rows(x, dim, 0, at)], dim)
    return x


def _rolled_over(x: Tensor, shift: int, dim: int) -> Tensor:
    """`x` with its elements moved on by `shift` in the order of dims 0 to `dim`, dim by dim as an odometer turns."""
    size = x.shape[dim]
    if not size:
        return x.clone()
    turns, rest = divmod(shift, size)
    if dim == 0:
        return torch.roll(x, rest, 0)
    moved = torch.roll(x, rest, dim) if rest else x
    if not rest:
        return _rolled_over(moved, turns, dim - 1)
    came_round = torch.arange(size, device=x.device) < rest
    came_round = came_round.view(-1, *(1,) * (x.dim() - 1 - dim))
    return torch.where(came_round, _rolled_over(moved, turns + 1, dim - 1), _rolled_over(moved, turns, dim - 1))


def _cat_split(tensors: Sequence[Tensor], dim: int) -> Tensor:
    sizes = [t.shape[dim] for t in tensors]
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    split = [n for n, t in enumerate(tensors) if isinstance(t, SpatialTensor) and t.spec.of(dim) is not None]
    main = max(split, key=lambda n: sizes[n])
    spec = tensors[main].spec  # type: ignore[attr-defined]
    placement = spec.of(dim)
    moved = tuple(b + starts[main] for b in placement.extents.bounds[1:-1])
    extents = nonempty(_balanced(Extents((0, *moved, sum(sizes)))))
    if extents is None:
        raise TooSmall([placement.axis])
    axis = spec.spatial.axis(placement.axis)
    others = spec.whole_along([axis.name])
    parts = []
    for t, start, size in zip(tensors, starts, sizes, strict=True):
        rows = range(start, start + size)
        wanted = tuple(range(o.start - start, o.stop - start) for o in (overlap(r, rows) for r in extents.ranges))
        parts.append(_rows(t, dim, wanted, axis, others))
    return wrap(joined(parts, dim), spec.resized(dim, sum(sizes), extents))


def _balanced(extents: Extents) -> Extents:
    """These parts, or even ones where one is much more than its share: halves that changed places (fftshift)."""
    most = MOST_OF_A_SHARE * -(-extents.size // extents.parts)
    return extents if max(extents.sizes) <= most else Extents.even(extents.size, extents.parts)


def _rows(t: Tensor, dim: int, wanted: tuple[range, ...], axis: Any, others: Spec) -> Tensor:
    """This rank's `wanted` rows of one operand, cut along the other axes as `others` is."""
    mine = wanted[axis.coordinate]
    if isinstance(t, SpatialTensor) and (p := t.spec.of(dim)) is not None and p.axis != axis.name:
        say_gathered("torch.cat", f"{p} meets a larger operand that is split over {axis.name}", t)
        t = wrap(*gather_axes(local_of(t), t.spec, [p.axis]))
    if not isinstance(t, SpatialTensor) or (own := t.spec.of(dim)) is None:
        local = aligned(t, others.with_(t.shape, others.placements))
        return local.narrow(dim, mine.start if mine else 0, len(mine))
    wanted = tuple(r if r else range(0) for r in wanted)
    local = fetch(local_of(t), dim, own.extents, wanted, axis)
    rest = t.spec.whole_along([own.axis])
    if rest.placements == others.placements:
        return local
    cut = rest.resized(dim, len(mine))
    return aligned(wrap(local, cut), others.with_(cut.shape, others.placements))
