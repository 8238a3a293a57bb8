"""Slices, selects, chunks, flips: a slice of a split dim keeps its rows where they are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fullframe.geometry.extents import Extents, overlap
from fullframe.geometry.window import Slice
from fullframe.spatial.fallback import settle
from fullframe.spatial.operands import has_gradients, has_values, shells_in
from fullframe.spatial.redistribute import refetched
from fullframe.spatial.rules.masks import dims_used, is_mask, masked, write
from fullframe.spatial.rules.points import read_at
from fullframe.spatial.rules.reduction import without
from fullframe.spatial.rules.registry import TooSmall, Unsupported, rule
from fullframe.spatial.rules.scattering import put_at
from fullframe.spatial.rules.unsupported import INTO_WHOLE
from fullframe.spatial.rules.window_plan import plan_windows, region
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, viewed, wrap


def sliced_rows(x: Tensor, dim: int, start: int, stop: int, step: int = 1) -> Tensor:
    """Rows `start:stop:step` of a dim, all inside the tensor: a view of `x`."""
    if not isinstance(x, SpatialTensor) or not x.spec.placements:
        return x[(slice(None),) * dim + (slice(start, stop, step),)]
    spec = x.spec
    size = max(0, -(-(stop - start) // step))
    if not spec.is_split(dim):
        local = local_of(x)[(slice(None),) * dim + (slice(start, stop, step),)]
        result = spec.resized(dim, size)
    elif (start, stop, step) == (0, spec.shape[dim], 1):
        return x
    else:
        local, result = _rows(x, dim, range(start, stop, step))

    def replay(base: SpatialTensor) -> Tensor:
        again = sliced_rows(base, dim, start, stop, step)
        assert isinstance(again, SpatialTensor)
        return again._local

    return viewed(x, local, result, replay, lambda view: put_rows(x, view, dim, range(start, stop, step)))


def _rows(x: SpatialTensor, dim: int, rows: range) -> tuple[Tensor, Spec]:
    """This rank's share of some rows of a split dim; all of them where they are too few to be split."""
    spec, step = x.spec, rows.step
    goal = spec.resized(dim, len(rows))
    try:
        plan = plan_windows(spec, [dim], [Slice(rows.start, step)], [len(rows)], goal.shape)
        local, goal = region(local_of(x), plan), plan.spec
    except TooSmall as small:
        placement = spec.of(dim)
        assert placement is not None
        wanted = range(rows.start, rows.stop if rows else rows.start)
        local = refetched(local_of(x), spec, placement, (wanted,) * placement.extents.parts)
        goal = goal.whole_along(small.axes)
    return local[(slice(None),) * dim + (slice(None, None, step),)] if step > 1 else local, goal


def put_rows(x: SpatialTensor, view: SpatialTensor, dim: int, rows: range) -> None:
    """Write `view`, which is rows `rows` of dim `dim`, into the rows of `x` that this rank owns.

    Every rank writes, if only nothing: the graphs and the versions of its memory are to be alike.
    """
    spec, step = x.spec, rows.step
    placement = spec.of(dim)
    assert placement is not None
    wanted = tuple(  # which of the view's rows lie in each part
        range(*(min(max(-(-(bound - rows.start) // step), 0), len(rows)) for bound in (own.start, own.stop)))
        for own in placement.extents.ranges
    )
    held = view.spec.of(dim)
    mine = wanted[spec.spatial.axis(placement.axis).coordinate]
    if held is None:
        local = local_of(view).narrow(dim, mine.start if mine else 0, len(mine))
    else:
        wanted = tuple(r if r else range(0) for r in wanted)
        local = refetched(local_of(view), view.spec, held, wanted)
    own = spec.rows(placement)
    first = rows.start + mine.start * step - own.start if mine else 0
    stop = first + (len(mine) - 1) * step + 1 if mine else 0
    if mine:
        local_of(x)[(slice(None),) * dim + (slice(first, stop, step),)].copy_(local)
    else:
        write_nothing(local_of(x), local)


def write_nothing(local: Tensor, value: Tensor) -> None:
    """A write by a rank that owns none of the rows: of no element, but in the graph.

    Not a copy into an empty slice, of which torch's second derivative is a constant: this rank would not take part in
    the third one's messages.
    """
    if value.requires_grad and torch.is_grad_enabled() and has_gradients(local):
        local.sub_(value.flatten()[:0].sum().to(local.dtype))
    else:
        local[:0].zero_()  # so that its version counts on alike


@rule(torch.select, Tensor.select)
def _select(func: Any, x: Tensor, dim: int, index: int) -> Tensor:
    """Row `index` of a dim, which is removed: a view of `x`."""
    dim, index = dim % x.dim(), index % x.shape[dim]
    if isinstance(x, SpatialTensor) and x.spec.is_split(dim):
        x, index = sliced_rows(x, dim, index, index + 1), 0
    if not isinstance(x, SpatialTensor):
        return x.select(dim, index)

    def selected(base: SpatialTensor) -> Tensor:
        return local_of(base).select(dim, index)

    return viewed(x, selected(x), without(x.spec, (dim,), False), selected, None)


@rule(Tensor.__getitem__)
def _getitem(func: Any, x: Tensor, index: Any) -> Tensor:
    """Slices, numbers, None, ... and a mask on any dims, or index tensors at once; refuses a mask beside these."""
    items = _spelled_out(x, index)
    if any(map(is_mask, items)):
        return masked(x, items)
    result, points = basic(x, items)
    return read_at(result, points) if any(i is not None for i in points) else result


def basic(x: Tensor, items: Sequence[Any]) -> tuple[Tensor, list[Tensor | None]]:
    """`x` with slices, numbers and None done, and the index tensors that remain, one or None a dim: a view of `x`."""
    points: list[Tensor | None] = []
    for item in items:
        dim, number = len(points), as_number(item)
        if isinstance(item, bool) or (isinstance(item, Tensor) and item.dtype is torch.bool):
            raise Unsupported("indexing with a bool is not split")
        if number is not None:
            x = torch.select(x, dim, number)
            continue
        if item is None:
            x = x.unsqueeze(dim)
        elif isinstance(item, slice):
            rows = range(*item.indices(x.shape[dim]))
            x = sliced_rows(x, dim, rows.start, max(rows.stop, rows.start), rows.step)
        points.append(item if isinstance(item, Tensor) else None)
    return x, points + [None] * (x.dim() - len(points))


def as_number(item: Any) -> int | None:
    """The integer of an index that is one: also a tensor of no dims, which torch takes for one."""
    if isinstance(item, Tensor):
        number = item.dim() == 0 and has_values(item)
        return int(item) if number else None
    return int(item) if hasattr(item, "__index__") and not getattr(item, "shape", ()) else None


@rule(Tensor.__setitem__)
def _setitem(func: Any, x: Tensor, index: Any, value: Any) -> None:
    """Write into slices or at a mask; each rank writes the rows it owns."""
    if not isinstance(x, SpatialTensor):
        return _write_into_whole(x, index, value)
    items = _spelled_out(x, index)
    if any(map(is_mask, items)):
        return write(x, items, value)
    if any(isinstance(i, bool) for i in items):
        raise Unsupported("indexing with a bool is not split")
    if any(isinstance(i, Tensor) for i in items):
        return _put(func, x, items, value)
    strange = any(i is None or (isinstance(i, slice) and i.step not in (None, 1)) for i in items)
    strange = strange or not all(p.is_plain for p in x.spec.placements)  # of which a rank holds several runs of rows
    if isinstance(value, SpatialTensor) or strange:
        _written(x[index], value)
        return
    spec, local, written = x.spec, local_of(x), []
    for dim, item in enumerate(items + [slice(None)] * (x.dim() - len(items))):
        size, own, keep = spec.shape[dim], spec.held(dim), isinstance(item, slice)
        rows = range(*item.indices(size)) if keep else range(size)[item : item + 1 or None]
        mine = overlap(rows, own)
        written.append((keep, rows, mine))
        local = local.narrow(dim, mine.start - own.start if mine else 0, len(mine))
    if isinstance(value, Tensor):
        kept = [(rows, mine) for keep, rows, mine in written if keep]
        for number, (rows, mine) in enumerate(reversed(kept)):
            dim = value.dim() - 1 - number
            if dim >= 0 and value.shape[dim] != 1:
                value = value.narrow(dim, mine.start - rows.start if mine else 0, len(mine))
        for dim in reversed([d for d, (keep, _, _) in enumerate(written) if not keep]):
            behind = x.dim() - 1 - dim
            if value.dim() > behind:
                value = value.unsqueeze(value.dim() - behind)
    if isinstance(value, Tensor) and not all(mine for _, _, mine in written):
        write_nothing(local_of(x), value)  # every rank's graph must hold `value`, or DDP waits for it
    else:
        local[...] = value


def _write_into_whole(x: Tensor, index: Any, value: Any) -> None:
    """A whole tensor, which each rank holds, takes split masks, indices and integers, made whole; no gradients."""
    if has_gradients(x) and any(map(has_gradients, shells_in(index, value))):
        raise Unsupported("a split value is written into a whole tensor", INTO_WHOLE)
    index, value = tree_map_only(SpatialTensor, lambda t: t.full(), (index, value))
    x[index] = value


def _put(func: Any, x: SpatialTensor, items: list[Any], value: Any) -> None:
    """Write at index tensors, and slices beside them."""
    view, points = basic(x, items)
    if isinstance(value, (int, float, complex)):  # a copy from the host would wait for the device
        value = torch.full((), value, dtype=x.dtype, device=x.device)
    if not isinstance(value, Tensor):
        value = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    elif not value.dim():  # torch takes one of the host, too
        value = value.to(x.device)
    if all(i is None for i in points):
        _written(view, value)
        return
    put_at(func, view, points, value)
    if isinstance(view, SpatialTensor):
        settle(view)


def _written(view: Tensor, value: Any) -> None:
    """Write `value` into a slice, whose own write reaches the tensor it was cut from."""
    if isinstance(value, Tensor):
        extra = value.dim() - view.dim()
        view.copy_(value.flatten(0, extra) if extra > 0 else value)
    else:
        view.fill_(value)


def _spelled_out(x: Tensor, index: Any) -> list[Any]:
    """The items of an index: lists and arrays as tensors, all on `x`'s device; an ellipsis as the slices it stands for.

    Beside a mask tensors of no dims are the numbers for which torch takes them.
    """
    items = [_as_tensor(i, x) for i in (index if _stands_for_items(index) else (index,))]
    if any(map(is_mask, items)):
        tensors = [isinstance(i, Tensor) and not is_mask(i) and i.dtype != torch.bool for i in items]
        numbers = [as_number(i) if is_tensor else None for i, is_tensor in zip(items, tensors, strict=True)]
        items = [i if number is None else number for i, number in zip(items, numbers, strict=True)]
    if any(i is Ellipsis for i in items):
        at = next(n for n, i in enumerate(items) if i is Ellipsis)
        used = sum(dims_used(i) for i in items)
        items[at : at + 1] = [slice(None)] * (x.dim() - used)
    return items


def _stands_for_items(index: Any) -> bool:
    """Whether torch takes an index for several: a tuple, or a short sequence that holds more than numbers."""
    if not isinstance(index, Sequence) or isinstance(index, tuple):
        return isinstance(index, tuple)
    return len(index) < 32 and any(
        i is None or i is Ellipsis or isinstance(i, slice) or hasattr(i, "__len__") for i in index
    )


def _as_tensor(item: Any, x: Tensor) -> Any:
    if isinstance(item, Tensor) and item.dim() and item.device != x.device:  # torch takes those of the host
        return item.to(x.device)
    if isinstance(item, Tensor) or not (isinstance(item, Sequence) or hasattr(item, "__array__")):
        return item
    empty = isinstance(item, Sequence) and not item
    return torch.as_tensor(item, dtype=torch.long if empty else None, device=x.device)


@rule(torch.narrow, Tensor.narrow)
def _narrow(func: Any, x: SpatialTensor, dim: int, start: Any, length: int) -> Tensor:
    """`length` rows of a dim from row `start` on."""
    dim %= x.dim()
    start = int(start) % x.shape[dim] if start < 0 else int(start)
    if start + length > x.shape[dim]:
        raise RuntimeError(f"rows {start} to {start + length} exceed dim {dim} of size {x.shape[dim]}")
    return sliced_rows(x, dim, start, start + length)


@rule(torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes)
def _split(func: Any, x: SpatialTensor, split_size_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    """The rows of a dim in pieces of the given size, or sizes; each piece is a view."""
    sizes = named.get("split_size", named.get("split_sizes", split_size_or_sections))
    size = x.shape[dim]
    if isinstance(sizes, int):
        sizes = [min(sizes, size - start) for start in range(0, size, sizes)] if size else [0]
    return _pieces(x, sizes, dim)


def _pieces(x: SpatialTensor, sizes: Sequence[int], dim: int) -> tuple[Tensor, ...]:
    dim %= x.dim()
    if sum(sizes) != x.shape[dim]:
        raise RuntimeError(f"sizes {list(sizes)} do not add up to dim {dim} of size {x.shape[dim]}")
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    return tuple(sliced_rows(x, dim, start, start + n) for start, n in zip(starts, sizes, strict=True))


@rule(torch.chunk, Tensor.chunk)
def _chunk(func: Any, x: SpatialTensor, chunks: int, dim: int = 0) -> Any:
    """The rows of a dim in at most `chunks` pieces of one size, but for the last."""
    size = x.shape[dim]
    rows = -(-size // chunks)
    return _pieces(x, [min(rows, size - start) for start in range(0, size, rows)] if size else [0] * chunks, dim)


@rule(torch.tensor_split, Tensor.tensor_split)
def _tensor_split(func: Any, x: SpatialTensor, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    """The rows of a dim in so many pieces, or between the given places; refuses places that are split."""
    where = named.pop("sections", named.pop("indices", indices_or_sections))
    if isinstance(where, SpatialTensor):
        raise Unsupported("the places to split at are split themselves", "Gather them with .full().")
    where = where.tolist() if isinstance(where, Tensor) else where
    size, dim = x.shape[dim], dim % x.dim()
    if isinstance(where, int):
        return _pieces(x, Extents.even(size, where).sizes, dim)
    slices = [slice(a, b).indices(size) for a, b in zip((None, *where), (*where, None), strict=True)]
    return tuple(sliced_rows(x, dim, a, max(a, b)) for a, b, _ in slices)


@rule(torch.unbind, Tensor.unbind)
def _unbind(func: Any, x: SpatialTensor, dim: int = 0) -> Any:
    """Every row of a dim as a tensor without that dim."""
    return tuple(torch.select(x, dim, index) for index in range(x.shape[dim]))


@rule(Tensor.__iter__)
def _iter(func: Any, x: SpatialTensor) -> Any:
    """A loop over the first dim."""
    return iter(torch.unbind(x, 0))


_FLIPPED = {"flipud": (0,), "fliplr": (1,)}


@rule(torch.flip, Tensor.flip, torch.fliplr, torch.flipud, Tensor.fliplr, Tensor.flipud)
def _flip(func: Any, x: SpatialTensor, *args: Any, dims: Any = ()) -> Tensor:
    """Rows of dims in reverse order; the boundaries of a split dim stay, so rows cross over to the other side."""
    dims = _FLIPPED.get(func.__name__) or args or (dims,)
    flat = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    local, spec = local_of(x), x.spec
    for dim in (d % x.dim() for d in flat):
        placement = spec.of(dim)
        if placement is not None:
            extents = placement.extents
            wanted = tuple(range(extents.size - r.stop, extents.size - r.start) for r in extents.ranges)
            local = refetched(local, spec, placement, wanted)
        local = local.flip(dim)
    return wrap(local, spec)
