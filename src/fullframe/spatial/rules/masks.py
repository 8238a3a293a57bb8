"""Boolean masks: each rank picks, or writes, its own true elements; one small message tells all how many each has.

What is picked stays where it is, so elements of one mask meet without a message; `spatial/selection.py` knows their
order. Their number depends on values: a simulation, which has none, takes all elements as picked.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullframe.geometry.placement import Placement, Placements
from fullframe.spatial.operands import aligned, alike, has_values, in_order, merged, placements_of, united
from fullframe.spatial.redistribute import gather_axes
from fullframe.spatial.rules.pointwise import pointwise
from fullframe.spatial.rules.registry import Merged, Unsupported, rule
from fullframe.spatial.rules.scattering import those_of
from fullframe.spatial.rules.tables import landing
from fullframe.spatial.rules.unsupported import INTO_WHOLE
from fullframe.spatial.selection import Selection, numbers_held, picked, selected
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, whole, wrap

_EVERYTHING = slice(None)
_OF_MASKS = (torch.bool, torch.uint8)


class _Place(NamedTuple):
    """A mask over `dims` of a tensor, the first of which is `dim`."""

    mask: Tensor
    dim: int
    dims: range

    @classmethod
    def of(cls, mask: Tensor, dim: int) -> "_Place":
        return cls(mask, dim, range(dim, dim + len(_shape(mask))))


def is_mask(item: Any) -> bool:
    """Whether an item of an index is a mask of at least one dim."""
    if type(item) is SpatialTensor:
        return item._local.dtype in _OF_MASKS and bool(item.spec.shape)
    return isinstance(item, Tensor) and item.dtype in _OF_MASKS and item.dim() > 0


def _is_index(item: Any) -> bool:
    return isinstance(item, Tensor) and not is_mask(item) and item.dim() > 0


def _is_kept(item: Any) -> bool:
    """Whether a dim remains where an item of an index picks rows, as a number does not."""
    return isinstance(item, (slice, Tensor))


def dims_used(item: Any) -> int:
    """How many dims of a tensor an item of an index is for."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.dim() if is_mask(item) else 1


def _shape(t: Tensor) -> tuple[int, ...]:
    """Of a shell without a call of torch's, each of which takes longer than all else that is asked here."""
    return t.spec.shape if type(t) is SpatialTensor else tuple(t.shape)


def masked(x: Tensor, items: Sequence[Any]) -> Tensor:
    """`x[items]` with one mask among slices, numbers and None: (..., true elements, ...), split as the mask lies.

    Beside it index tensors may stand that have one number for each true element, or one for all. Either of tensor and
    mask may be whole; what is too little to be split is.
    """
    if len(items) == 1 and type(x) is type(items[0]) is SpatialTensor and _lies_alike(x, items[0]):
        mask = items[0]
        return _picked_by(local_of(mask), mask.spec, local_of(x), x.spec, _Place(mask, 0, range(len(mask.spec.shape))))
    if any(map(_is_index, items)):
        return _beside_tensors(x, items)
    x, place = _placed(x, items)
    spec = (x if isinstance(x, SpatialTensor) else _shell(place.mask)).spec
    of_mask = tuple(p.at(p.dim + place.dim) for p in placements_of(place.mask))
    # At the mask's boundaries, so that what else the mask picks is cut alike, and meets this without a message.
    spec = spec.with_(_shape(x), united([tuple(map(partial(_as_the_mask, of_mask), placements_of(x))), of_mask]))
    return _picked_from(aligned(x, spec), spec, place)


def _as_the_mask(of_mask: Placements, p: Placement) -> Placement:
    """A placement of a tensor at the boundaries of the mask's, where that splits the same factor over the same axis."""
    return next((q for q in of_mask if q.axis == p.axis and alike(q, p)), p)


def _lies_alike(x: SpatialTensor, mask: SpatialTensor) -> bool:
    """Whether a bool mask covers the first dims of a tensor and is cut as that is: there is nothing to align."""
    spec, own = x.spec, mask.spec
    known: bool | None = spec.plans.get((_lies_alike, own))
    if known is None:
        known = own.spatial is spec.spatial and own.shape == spec.shape[: len(own.shape)] and not spec.fleeting
        if known:
            united_ = spec.with_(spec.shape, united([spec.placements, own.placements]))
            known = united_ is spec and _mask_spec(spec, _Place(mask, 0, range(len(own.shape)))) is own
        if not (spec.fleeting or own.fleeting):
            spec.plans[_lies_alike, own] = known
    return known and mask._local.dtype is torch.bool


def _beside_tensors(x: Tensor, items: Sequence[Any]) -> Tensor:
    """What the mask picks, and of that the numbers that the index tensors say: one of each row."""
    _require_one_mask(items)
    place, advanced, dim = 0, [], 0  # in the result of the mask alone: of the mask, of index tensors
    for item in items:
        if is_mask(item):
            place = dim
        elif isinstance(item, Tensor):
            advanced.append((dim, item))
        dim += _is_kept(item)
    dims = sorted([place, *(dim for dim, _ in advanced)])
    picked = masked(x, [_EVERYTHING if isinstance(i, Tensor) and not is_mask(i) else i for i in items])
    rows = picked.movedim([place, *(dim for dim, _ in advanced)], list(range(len(dims))))
    flat: Any = 0
    for number, (_, index) in enumerate(advanced, start=1):
        size = rows.shape[number]
        _require_inside(index, size)
        flat = flat * size + torch.where(index < 0, index + size, index)
    rows = rows.flatten(1, len(advanced))
    index = flat.expand(rows.shape[0]).reshape(-1, 1, *(1,) * (rows.dim() - 2))
    found = rows.gather(1, index.expand(-1, 1, *rows.shape[2:])).squeeze(1)
    return found.movedim(0, dims[0] if dims[-1] - dims[0] == len(dims) - 1 else 0)


def _require_one_mask(items: Sequence[Any]) -> None:
    if any(item is None for item in items) or sum(map(is_mask, items)) > 1:
        raise Unsupported("it indexes by a mask and index tensors beside None or other masks", "Index one by one.")
    if any(_is_index(item) and item.dim() > 1 for item in items):
        raise Unsupported("it indexes by a mask beside index tensors of more than one dim", "Index one by one.")


def _require_inside(index: Tensor, size: int) -> None:
    outside = ((index < -size) | (index >= size)).any()
    if has_values(outside) and outside:
        raise IndexError(f"an index beside a mask is out of bounds for a dimension with size {size}")


def write(x: Tensor, items: Sequence[Any], value: Any) -> None:
    """`x[items] = value` with one mask among slices, numbers and None; each rank writes its own true elements.

    Beside the mask index tensors along dims that are not split may stand, as `masked` takes them. Refuses a whole `x`.
    """
    if not isinstance(x, SpatialTensor):
        raise Unsupported("a split value is written into a whole tensor", INTO_WHOLE)
    if any(map(_is_index, items)):
        return _write_beside_tensors(x, items, value)
    part, place = _placed(x, items)
    if part is not x:  # a view, whose own write reaches `x`
        part[(_EVERYTHING,) * place.dim + (place.mask,)] = value
        return
    spec, local = x.spec, local_of(x)
    mask = _local_mask(spec, place)
    if isinstance(value, Tensor) and value.dim():
        value = _value_for(value, spec, place, mask)
    local[(_EVERYTHING,) * place.dim + (mask,)] = value


def _write_beside_tensors(x: SpatialTensor, items: Sequence[Any], value: Any) -> None:
    """One element, or row of elements, of each that the mask picks: labels as one-hot rows, say."""
    _require_one_mask(items)
    part, place = _placed(x, [_EVERYTHING if _is_index(item) else item for item in items])
    if part is not x:  # a view, whose own write reaches `x`
        kept = [item if isinstance(item, Tensor) else _EVERYTHING for item in items if _is_kept(item)]
        if len(kept) < len(items) and isinstance(value, Tensor) and value.dim():
            raise Unsupported("it writes a tensor at a mask, index tensors and numbers", "Index one by one.")
        part[tuple(kept)] = value
        return
    spec, local = x.spec, local_of(x)
    firsts = accumulate(items[:-1], lambda dim, item: dim + max(dims_used(item), 1), initial=0)
    beside = {dim: item for dim, item in zip(firsts, items, strict=True) if _is_index(item)}
    spec.require_whole("an index beside the mask is for a split dim", *beside)
    mask, of_mask = _local_mask(spec, place), _mask_spec(spec, place)
    own: tuple[Placement, ...] = ()
    if of_mask.placements:
        picks, cells = selected(mask, of_mask)
        own, count = (picks.placement(0),), picks.extents.size
    else:
        cells = those_of(mask)
        count = len(cells)
    at: list[Any] = [_EVERYTHING] * len(spec.shape)
    for dim, index in beside.items():
        if index.shape[0] not in (1, count):
            raise IndexError(f"{index.shape[0]} numbers stand beside a mask of {count} true elements")
        _require_inside(index, spec.shape[dim])
        at[dim] = aligned(index, spec.with_((count,), own)) if len(index) == count else whole(index)
    for dim, numbers in zip(place.dims, torch.unravel_index(cells, mask.shape), strict=True):
        at[dim] = numbers
    if not isinstance(value, Tensor):  # a copy from the host would wait for the device
        value = torch.full((), value, dtype=local.dtype, device=local.device)
    if value.dim():
        rest = [dim for dim, item in enumerate(at) if not isinstance(item, Tensor)]
        first = landing([item if isinstance(item, Tensor) else None for item in at])
        rows = value.dim() - 1 - (len(rest) - first)
        if rows < 0 or value.shape[rows] == 1:
            own, count = (), 1
        others = [p.at(rest.index(p.dim) + (rest.index(p.dim) >= first)) for p in spec.placements if p.dim in rest]
        sizes = [spec.shape[dim] for dim in rest]
        placements = in_order([*others, *(p.at(first) for p in own)])
        value = _broadcast(value, spec.with_((*sizes[:first], count, *sizes[first:]), placements))
    local[tuple(at)] = value


def _placed(x: Tensor, items: Sequence[Any]) -> tuple[Tensor, _Place]:
    """`x` indexed by all but the mask, and the mask with the dim of that where it begins."""
    at = next(n for n, item in enumerate(items) if is_mask(item))
    before, mask, behind = list(items[:at]), items[at], list(items[at + 1 :])
    if any(isinstance(item, (Tensor, bool)) for item in (*before, *behind)):
        raise Unsupported("it indexes by a mask beside other index tensors", "Index by one after the other.")
    sizes, dtype = _shape(mask), mask._local.dtype if type(mask) is SpatialTensor else mask.dtype
    place = _Place.of(mask if dtype == torch.bool else mask.bool(), sum(not _is_number(item) for item in before))
    basic = (*before, *(_EVERYTHING,) * len(sizes), *behind)
    if sum(item is not None for item in basic) > len(_shape(x)):
        raise IndexError(f"too many indices for tensor of dimension {x.dim()}")
    if any(item is None or _is_number(item) or item != _EVERYTHING for item in basic):
        x = x[basic]
    shape = _shape(x)
    for number, dim in enumerate(place.dims):
        if sizes[number] != shape[dim]:
            raise IndexError(
                f"The shape of the mask {list(sizes)} at index {number} does not match the shape of the indexed "
                f"tensor {list(shape)} at index {dim}"
            )
    return x, place


def _is_number(item: Any) -> bool:
    return item is not None and not isinstance(item, slice)


def _shell(t: Tensor) -> SpatialTensor:
    assert isinstance(t, SpatialTensor)
    return t


def _local_mask(spec: Spec, place: _Place) -> Tensor:
    """The mask's local part, cut as the tensor with `spec` is."""
    return aligned(place.mask, _mask_spec(spec, place))


def _mask_spec(spec: Spec, place: _Place) -> Spec:
    own = [p for p in spec.placements if p.dim in place.dims]
    for p in own:
        if p.order is not None and (len(place.dims) > 1 or (p.outer, p.inner) != (1, 1)):
            raise Merged(spec, p.dim)
    return spec.with_([spec.shape[dim] for dim in place.dims], tuple(p.at(p.dim - place.dim) for p in own))


def _spec_of_rows(spec: Spec, place: _Place, rows: int, *own: Placement) -> Spec:
    """That of a tensor with `rows` rows, placed by `own`, where one with `spec` has the dims of the mask."""
    fewer = len(place.dims) - 1
    others = [p if p.dim < place.dim else p.at(p.dim - fewer) for p in spec.placements if p.dim not in place.dims]
    return spec.with_((*spec.shape[: place.dim], rows, *spec.shape[place.dims.stop :]), in_order([*others, *own]))


def _spec_of(spec: Spec, place: _Place, picks: Selection) -> Spec:
    """That of the elements that are picked from a tensor with `spec`, as dim `place.dim`."""
    return _spec_of_rows(spec, place, picks.extents.size, picks.placement(place.dim))


def _picked_from(local: Tensor, spec: Spec, place: _Place) -> Tensor:
    return _picked_by(_local_mask(spec, place), _mask_spec(spec, place), local, spec, place)


def _picked_by(mask: Tensor, of_mask: Spec, local: Tensor, spec: Spec, place: _Place) -> Tensor:
    """What a mask's local part, cut by `of_mask`, picks of the local part of a tensor with `spec`."""
    if not of_mask.placements:
        found = local[(_EVERYTHING,) * place.dim + (mask,)]
        return wrap(found, _spec_of_rows(spec, place, found.shape[place.dim]))
    picks, rows = selected(mask, of_mask)
    return _in_parts(picked(local, place.dim, len(place.dims), rows), _spec_of(spec, place, picks), picks)


def _in_parts(local: Tensor, spec: Spec, picks: Selection) -> Tensor:
    """The shell around what each rank has picked; whole, in order, where there is too little of it to be split."""
    if picks.extents.size < max(2, picks.axis.size):
        return wrap(*gather_axes(local, spec, [picks.axis.name]))
    return wrap(local, spec)


def _value_for(value: Tensor, spec: Spec, place: _Place, mask: Tensor) -> Tensor:
    """The local part of a value that is written at a mask: one for all elements, or one each, in torch's order."""
    rows, of_mask = value.dim() - 1 - (len(spec.shape) - place.dims.stop), _mask_spec(spec, place)
    if rows < 0 or value.shape[rows] == 1:
        goal = _spec_of_rows(spec, place, 1)
    elif of_mask.placements:
        goal = _spec_of(spec, place, selected(mask, of_mask)[0])
    else:
        goal = _spec_of_rows(spec, place, int(mask.sum()) if has_values(mask) else mask.numel())
    return _broadcast(value, goal)


def _broadcast(value: Tensor, goal: Spec) -> Tensor:
    """The local part of a value that is written where `goal` lies."""
    extra = max(value.dim() - len(goal.shape), 0)
    fits = zip(reversed(value.shape), (*reversed(goal.shape), *(1,) * extra), strict=False)
    if any(size not in (1, wanted) for size, wanted in fits):
        raise RuntimeError(
            f"shape mismatch: value tensor of shape {list(value.shape)} cannot be broadcast to indexing result of "
            f"shape {list(goal.shape)}"
        )
    return aligned(value.flatten(0, extra) if extra else value, goal)


@rule(torch.masked_select, Tensor.masked_select)
def _masked_select(func: Any, x: Tensor, mask: Tensor) -> Tensor:
    """(true elements,) of a tensor and a mask that broadcast."""
    if mask.dtype != torch.bool:
        raise RuntimeError("masked_select: expected BoolTensor for mask")
    spec = merged([mask, x])  # of one size, at the mask's boundaries, as for an index
    spec = spec.with_(spec.shape, spec.placements)
    local, mask_ = torch.broadcast_tensors(aligned(x, spec), aligned(mask, spec))
    return _picked_from(local, spec, _Place.of(wrap(mask_, spec), 0))


@rule(torch.masked_scatter, Tensor.masked_scatter, Tensor.masked_scatter_)
def _masked_scatter(func: Any, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The first elements of `source`, in order, at the true places of a mask that broadcasts.

    Refuses a whole `x` where it is written in place, and a split `source` beside a whole `x` and mask.
    """
    in_place = func is Tensor.masked_scatter_
    if not isinstance(x, SpatialTensor) and (in_place or not isinstance(mask, SpatialTensor)):
        fix = INTO_WHOLE if in_place else "Give the source as source.full()."
        raise Unsupported("split values are written into a whole tensor", fix)
    spec = x.spec if in_place else merged([x, mask])  # type: ignore[attr-defined]
    spec = spec.with_(spec.shape, spec.placements)
    local, mask_ = aligned(x, spec), aligned(mask, spec)
    mask_ = mask_.expand(local.shape) if in_place else torch.broadcast_tensors(mask_, local)[0]
    place = _Place.of(wrap(mask_, spec), 0)
    picks, _ = selected(mask_, _mask_spec(spec, place))
    if not has_values(mask_):
        raise Unsupported("what it takes of the source depends on the values, which a simulation does not have")
    if source.numel() < picks.extents.size:
        raise RuntimeError("Number of elements of source < number of ones in mask")
    values = aligned(source.flatten()[: picks.extents.size], _spec_of(spec, place, picks))
    result = func(local, mask_, values)
    return x if result is local else wrap(result, spec)


@rule(torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere)
def _nonzero(func: Any, x: SpatialTensor, *, as_tuple: bool = False) -> Any:
    """(true elements, dims) where the elements that are not zero stand in the whole tensor."""
    spec = x.spec.with_(x.spec.shape, x.spec.placements)
    place = _Place.of(x != 0, 0)
    for p in spec.placements:
        if p.order is not None:
            raise Merged(spec, p.dim)
    local = local_of(x)
    picks, cells = selected(local_of(_shell(place.mask)), _mask_spec(spec, place))
    places = torch.unravel_index(cells, local.shape)
    held = [numbers_held(spec, dim, spec.coordinates).to(local.device) for dim in range(local.dim())]
    found = [numbers[at] for numbers, at in zip(held, places, strict=True)]
    flat = _spec_of(spec, place, picks)
    result = _in_parts(torch.stack(found, 1), flat.with_((*flat.shape, len(found)), flat.placements), picks)
    return torch.unbind(result, 1) if as_tuple else result


@rule(torch.where, Tensor.where)
def _where(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Element by element of two tensors; of a condition alone, where it is true."""
    if len(args) == 1 and not kwargs:
        return _nonzero(torch.nonzero, args[0], as_tuple=True)
    return pointwise(func, *args, **kwargs)
