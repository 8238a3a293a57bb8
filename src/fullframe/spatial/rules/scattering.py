"""Writes at index tensors: each rank writes what it holds; what all ranks add to a whole tensor is summed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement
from fullframe.geometry.window import proportional_extents
from fullframe.ranks.collectives import all_sum, all_sum_no_grad
from fullframe.spatial.operands import aligned, has_gradients, has_values, merged
from fullframe.spatial.redistribute import gather_axes
from fullframe.spatial.rules.points import (
    Turns,
    at_own,
    has_many_rows,
    in_turns,
    is_large,
    landed,
    most_besides,
    require_all_inside,
    require_inside,
    spread,
)
from fullframe.spatial.rules.registry import Unsupported, rule, writes
from fullframe.spatial.rules.scattered_reductions import Reduction, extremes_at, own_part, sums_at
from fullframe.spatial.rules.tables import landing
from fullframe.spatial.rules.unsupported import INTO_WHOLE
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, whole, wrap
from fullframe.spatial.whole_rows import sent_home, whole_rows


@rule(
    *(torch.scatter, Tensor.scatter, Tensor.scatter_, torch.scatter_add, Tensor.scatter_add, Tensor.scatter_add_),
    *(torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_),
)
def _scatter(
    func: Any, x: Tensor, dim: int, index: Tensor, src: Any = None, *args: Any, value: Any = None, **kwargs: Any
) -> Tensor:
    """`x[..., index[i], ...] = src[..., i, ...]` along `dim`; one-hot maps of split labels are of this kind.

    Along a split dim the index and the source are whole, or made so where they are smaller than `x`. Into a whole `x`
    along a dim by which they are split, values can only be added.
    """
    dim, src = dim % max(x.dim(), 1), value if src is None else src
    if not isinstance(x, SpatialTensor):
        return _scattered_into_whole(func, x, dim, index, src, *args, **kwargs)
    spec = x.spec
    if not index.numel():  # of whatever dims
        result = func(local_of(x), dim, whole(index), whole(src), *args, **kwargs)
        return x if result is local_of(x) else wrap(result, spec)
    over = [p.axis for p in spec.cuts(dim)]
    others = tuple(_clipped(p, index.shape) for p in spec.placements if p.dim != dim)
    if not isinstance(index, SpatialTensor):
        require_inside(lambda like: like.gather(dim, index), spec, {dim: index}, False)
    if over and _are_many(x, dim, index, src):
        return _scattered_rows(func, x, dim, index, src, *args, **kwargs)
    many = index.numel() > most_besides(spec)
    if many and isinstance(src, Tensor) and not (args or kwargs) and not has_many_rows(spec, dim):
        values, points = src[tuple(map(slice, index.shape))], spread(dim, index)
        if _turns_of(points, spec, values) is not None:
            require_all_inside(index, spec, dim)
            return put_at(func, x, points, values, func.__name__.startswith("scatter_add"))
    rows = _cut(index, x, dim, over, others, index.shape)
    src = _cut(src, x, dim, over, others, index.shape) if isinstance(src, Tensor) else src
    if not over:
        result = func(local_of(x), dim, rows, src, *args, **kwargs)
        return x if result is local_of(x) else wrap(result, spec)
    if isinstance(index, SpatialTensor):
        require_all_inside(rows, spec, dim)
    own = local_of(x)
    _, points, held = at_own(own, spec, [rows if d == dim else None for d in range(x.dim())])
    size, place = own.shape[dim], points[dim]
    assert place is not None and held is not None
    place = place.masked_fill(~held, size)  # what other ranks hold goes to a row that is thrown away, as a 1: no NaN
    src = src[tuple(map(slice, held.shape))].masked_fill(~held, 1) if isinstance(src, Tensor) else src
    shape = (*own.shape[:dim], 1, *own.shape[dim + 1 :])
    result = func(torch.cat([own, own.new_zeros(shape)], dim), dim, place, src, *args, **kwargs).narrow(dim, 0, size)
    if writes(func, kwargs):
        own.copy_(result)
        return x
    return wrap(result.contiguous(), spec)


def _are_many(x: SpatialTensor, dim: int, index: Tensor, src: Any) -> bool:
    """Whether what is written is split and more than a rank's part of `x`, and there are rows for all ranks."""
    large = any(isinstance(t, SpatialTensor) and t.numel() > most_besides(x.spec) for t in (index, src))
    return large and _beside(index, dim) == _beside(x, dim) and has_many_rows(x.spec, dim)


def _beside(t: Tensor, dim: int) -> list[int]:
    return [size for d, size in enumerate(t.shape) if d != dim]


def _scattered_rows(
    func: Any, x: SpatialTensor, dim: int, index: Tensor, src: Any, *args: Any, **kwargs: Any
) -> Tensor:
    """Each rank gets some rows, all of each, writes into them, and sends them home."""
    spec, own = x.spec, local_of(x)
    written = spec if index.shape == x.shape else spec.with_(index.shape, _rows_of(spec, dim, index.shape[dim]))
    numbers = whole_rows(aligned(index, written), written, dim)
    require_all_inside(numbers, spec, dim)
    if isinstance(src, Tensor):
        src = whole_rows(aligned(src[tuple(map(slice, index.shape))], written), written, dim)
    plain = getattr(torch, func.__name__.rstrip("_"))
    result = sent_home(plain(whole_rows(own, spec, dim), 1, numbers, src, *args, **kwargs), spec, dim)
    if writes(func, kwargs):
        own.copy_(result)
        return x
    return wrap(result.contiguous(), spec)


def _rows_of(spec: Spec, dim: int, size: int) -> tuple[Placement, ...]:
    """The placements of an index with `size` rows along `dim`."""
    own = spec.of(dim)
    assert own is not None
    recut = own.recut(proportional_extents(own.extents, size))
    return tuple(recut if p is own else p for p in spec.placements)


def _clipped(p: Placement, shape: Sequence[int]) -> Placement:
    """The placement of an index whose rows are the first of those that `p` cuts."""
    size = shape[p.dim]
    if size == p.outer * p.extents.size * p.inner:
        return p
    if not p.is_plain:
        raise Unsupported("the index covers a part of a dim that is merged from split and other dims")
    return replace(p, extents=Extents(tuple(min(bound, size) for bound in p.extents.bounds)))


def _cut(
    t: Tensor, x: SpatialTensor, dim: int, over: list[str], others: tuple[Placement, ...], shape: Sequence[int]
) -> Tensor:
    """The part of an index of `shape`, or a source, that meets this rank's part of `x`; whole along `dim`."""
    for p in others:
        if t.shape[p.dim] != shape[p.dim]:
            t = t.narrow(p.dim, 0, shape[p.dim])
    if isinstance(t, SpatialTensor) and over:
        t = _without_cuts(t, x, [p.axis for p in t.spec.placements if p.axis in over or p.dim == dim])
    local, spec = aligned(t, x.spec.with_(t.shape, others)), x.spec
    for p in others:
        if shape[p.dim] == 1:  # one row, which only its owner writes; to `aligned` it is one for all
            local = local.narrow(p.dim, 0, len(spec.rows(p)))
    return local


def _without_cuts(t: SpatialTensor, x: SpatialTensor, axes: Sequence[str]) -> Tensor:
    """What is written made whole along mesh axes, where it is no more than a rank's part of what it is written to."""
    if axes and is_large(t.shape, x.spec):
        raise Unsupported("what is written at index tensors is split, and larger than a rank's part of the map")
    return wrap(*gather_axes(local_of(t), t.spec, axes))


def _scattered_into_whole(func: Any, x: Tensor, dim: int, index: Tensor, src: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Split values that are scattered into a whole tensor: the result is cut as they are, or is their sum, whole.

    In place, one-hot labels for one, an index and what has no gradient is made whole.
    """
    given = [t for t in (index, src) if isinstance(t, SpatialTensor)]
    spec, in_place = given[0].spec, writes(func, kwargs)
    if func.__name__.startswith("scatter_reduce") and any(t.spec.is_split(dim) for t in given):
        how = Reduction(*args, **kwargs)
        by = {"amax": extremes_at, "amin": extremes_at, "sum": sums_at}
        if x.is_floating_point():
            by["mean"] = sums_at
        if (reduced := by.get(how.reduce)) is not None:
            result = reduced(x, dim, index, src, how)
            return x.copy_(result) if in_place else result
    if in_place and not func.__name__.startswith("scatter_add") and not any(map(has_gradients, given)):
        index, src = whole(index), whole(src)
        return func(x, dim, index, src, *args, **kwargs)  # type: ignore[no-any-return]
    if any(t.spec.is_split(dim) for t in given):
        if not func.__name__.startswith("scatter_add") or src.shape != index.shape:
            raise Unsupported("it scatters along a split dim into a whole tensor; ranks add up sums, means, extremes")
        *parts, group = own_part(x, dim, index, src)
        return _added(func, x, torch.scatter_add(x.new_zeros(x.shape), dim, *parts), group, kwargs)
    if in_place:
        raise Unsupported("it writes split values into a whole tensor", INTO_WHOLE)
    tensors = [t for t in (x, index, src) if isinstance(t, Tensor)]
    if any(t.shape[p.dim] != spec.shape[p.dim] for t in tensors for p in spec.placements):
        raise Unsupported("the index or the source covers a part of a split dim")
    cut = [aligned(t, spec.with_(t.shape, spec.placements)) if isinstance(t, Tensor) else t for t in (x, index, src)]
    return wrap(func(cut[0], dim, *cut[1:], *args, **kwargs), spec.with_(x.shape, spec.placements))


def _added(func: Any, x: Tensor, mine: Tensor, group: dist.ProcessGroup, kwargs: dict[str, Any]) -> Tensor:
    """A whole `x` and what the ranks of the group add to it, on all of them."""
    total = all_sum(mine, group)
    return x.add_(total) if writes(func, kwargs) else x + total


@rule(
    *(torch.index_add, Tensor.index_add, Tensor.index_add_, torch.index_copy, Tensor.index_copy, Tensor.index_copy_),
    *(torch.index_fill, Tensor.index_fill, Tensor.index_fill_),
    *(torch.index_reduce, Tensor.index_reduce, Tensor.index_reduce_),
)
def _at_rows(func: Any, x: Tensor, dim: int, index: Tensor, source: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Rows of a dim are added, copied, filled or reduced; see `_scatter`."""
    dim %= max(x.dim(), 1)
    if isinstance(source, Tensor) and source.dim() and source.dim() != x.dim():
        raise RuntimeError(f"a source of {source.dim()} dims cannot be written into rows of {x.dim()} dims")
    if not isinstance(x, SpatialTensor):
        return _rows_into_whole(func, x, dim, index, source, *args, **kwargs)
    spec, local = x.spec, local_of(x)
    fits = isinstance(source, Tensor) and source.shape == (*x.shape[:dim], index.numel(), *x.shape[dim + 1 :])
    if func.__name__.startswith(("index_add", "index_copy")) and fits and index.dim():
        points, adds = [index if d == dim else None for d in range(x.dim())], func.__name__.startswith("index_add")
        if _turns_of(points, spec, source) is not None:
            if adds and x.dim() > 1:  # else an IndexError
                require_all_inside(index, spec, dim)
            points[dim] = index.masked_fill(index < 0, x.shape[dim])  # to be refused
            return put_at(func, x, points, source * kwargs["alpha"] if kwargs else source, adds)
    index, others = _whole(index, x), tuple(p for p in spec.placements if p.dim != dim)
    call = _out_of_place(func, dim, index, source, *args, **kwargs)
    if isinstance(source, Tensor) and source.dim():
        if isinstance(source, SpatialTensor):
            source = _without_cuts(source, x, [p.axis for p in source.spec.cuts(dim)])
        source = aligned(source, spec.with_(source.shape, others))
    if len(others) < len(spec.placements):
        index = index.reshape(-1)
        require_inside(call, spec, {dim: index}, func.__name__.startswith("index_fill"))
        _, points, held = at_own(local, spec, [index if d == dim else None for d in range(x.dim())])
        mine = those_of(held)
        index = points[dim][mine]  # type: ignore[index]
        if isinstance(source, Tensor) and source.dim():
            source = source.index_select(dim, mine)
    result = func(local, dim, index, source, *args, **kwargs)
    return x if result is local else wrap(result, spec)


def _out_of_place(func: Any, dim: int, index: Tensor, source: Any, *args: Any, **kwargs: Any) -> Any:
    """The function of a tensor, with a source of zeros."""
    shape = source.shape if isinstance(source, Tensor) and source.dim() else None

    def call(x: Tensor) -> Tensor:
        zeros = source if shape is None else x.new_zeros(()).expand(shape)
        return getattr(torch, func.__name__.rstrip("_"))(x, dim, index, zeros, *args, **kwargs)  # type: ignore[no-any-return]

    return call


def _index_error(like: Tensor) -> None:
    raise IndexError(f"an index is out of bounds for a tensor of shape {tuple(like.shape)}")


def those_of(held: Tensor | None) -> Tensor:
    """The numbers of the positions that this rank holds; of all positions in a simulation, which has no values."""
    assert held is not None
    if not has_values(held):
        return torch.arange(held.numel(), device=held.device)
    return held.flatten().nonzero().squeeze(1)


def _rows_into_whole(func: Any, x: Tensor, dim: int, index: Tensor, source: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Rows from a split source or at a split index added to a whole tensor."""
    given = source if isinstance(source, SpatialTensor) else index
    assert isinstance(given, SpatialTensor)
    at = dim if given is source else 0
    if not func.__name__.startswith("index_add") or any(p.dim != at for p in given.spec.placements):
        raise Unsupported("it writes split rows into a whole tensor; only sums are added over ranks")
    spec, alpha = given.spec, kwargs.get("alpha", 1)
    index, source = (
        aligned(t, spec.with_(t.shape, tuple(p.at(d) for p in spec.placements))) for t, d in ((index, 0), (source, dim))
    )
    return _added(func, x, torch.index_add(x.new_zeros(x.shape), dim, index, source, alpha=alpha), spec.group, kwargs)


@rule(torch.index_put, Tensor.index_put, torch.index_put_, Tensor.index_put_)
def _index_put(func: Any, x: Tensor, indices: Sequence[Tensor], values: Tensor, accumulate: bool = False) -> Tensor:
    """`x[indices] = values`, or added to what is there; refuses masks. See `_scatter`."""
    points = [*(i.to(x.device) for i in indices), *(None for _ in range(x.dim() - len(indices)))]
    return put_at(func, x, points, values, accumulate)


def put_at(func: Any, x: Tensor, points: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """`x[points] = values`, one index tensor or None a dim: into `x` where `func` writes, else into a copy."""
    given = [i for i in points if i is not None]
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        raise Unsupported("it writes at a mask, so what it writes depends on the values", "Use torch.where.")
    if not isinstance(x, SpatialTensor):
        return _put_into_whole(func, x, points, values, accumulate)
    x.spec.require_in_order([d for d, i in enumerate(points) if i is not None])
    spec, own, turns = x.spec, local_of(x), _turns_of(points, x.spec, values)
    if turns is not None:
        if not accumulate and (values.numel() > 1 or values.requires_grad):
            _require_different(own, spec, points, turns)
        own = own if writes(func, {}) else own.clone()
        at, _, target = turns.landed(spec, points)
        values = _as_target(values, target, x, range(0)).expand(target.local_shape)
        values = values.flatten(at, at + len(turns.index.shape) - 1)
        for here, theirs in zip(turns.of_positions(points), turns.each(values, at), strict=True):
            _put_own(own, spec, here, theirs, True, accumulate)
        return x if own is local_of(x) else wrap(own, spec)
    points, at, shape, _, target = landed(spec, [None if i is None else _whole(i, x) for i in points])
    values = _as_target(values, target, x, range(at, at + len(shape)))
    result = _put_own(own, spec, points, values, writes(func, {}), accumulate)
    return x if result is own else wrap(result, spec)


def _turns_of(points: Sequence[Tensor | None], spec: Spec, values: Tensor) -> Turns | None:
    """The turns of positions, or of values that are split along them, which are too many to be whole on each rank."""
    if any(isinstance(t, SpatialTensor) for t in points) or not isinstance(values, SpatialTensor):
        return in_turns(points, spec)
    _, at, shape, _, target = landed(spec, points)
    ahead = len(target.shape) - values.dim() - at
    cuts = tuple(p.at(p.dim + ahead) for p in values.spec.placements if p.dim + ahead in range(len(shape)))
    fits = all(shape[p.dim] == values.shape[p.dim - ahead] for p in cuts)
    return in_turns(points, spec, spec.with_(shape, cuts)) if cuts and fits else None


def _require_different(own: Tensor, spec: Spec, points: Sequence[Tensor | None], turns: Turns) -> None:
    """Raises Unsupported where positions are equal: of several values the last counts, in an order no turn knows."""
    shape = [1 if i is None else size for i, size in zip(points, own.shape, strict=True)]
    counts = torch.zeros(shape, dtype=torch.int32, device=own.device)
    for here in turns.of_positions(points):
        _put_own(counts, spec, here, counts.new_ones(()), True, True)
    equal = all_sum_no_grad((counts > 1).any().int(), spec.spatial.replica)
    if has_values(equal) and equal:
        raise Unsupported("it writes at positions that are split, more than a rank may hold, and equal in part")


def _put_own(
    own: Tensor, spec: Spec, points: Sequence[Tensor | None], values: Tensor, writes: bool, accumulate: bool
) -> Tensor:
    """Write those of `values` at whole `points` that this rank holds: into its part, or into a copy."""
    given = [i for i in points if i is not None]
    require_inside(_index_error, spec, {d: i for d, i in enumerate(points) if i is not None}, True)
    _, places, held = at_own(own, spec, points)
    if held is not None:
        mine, at, dims = those_of(held), landing(points), len(points) - len(given) + given[0].dim()
        values = _selected(values, mine, dims, at, given[0].shape)
        places = [None if i is None else i.flatten()[mine] for i in places]
    if writes:
        torch.ops.aten.index_put_(own, places, values, accumulate)
        return own
    found: Tensor = torch.ops.aten.index_put(own, places, values, accumulate)
    return found


def _whole(t: Tensor, x: SpatialTensor) -> Tensor:
    return _without_cuts(t, x, [p.axis for p in t.spec.placements]) if isinstance(t, SpatialTensor) else t


def _as_target(values: Tensor, target: Spec, x: SpatialTensor, at: range) -> Tensor:
    """This rank's part of values that broadcast to `target`, whole along the dims `at`, those of the positions."""
    while values.dim() > len(target.shape) and values.shape[0] == 1:
        values = values.squeeze(0)
    if isinstance(values, SpatialTensor):
        ahead = len(target.shape) - values.dim()
        values = _without_cuts(values, x, [p.axis for p in values.spec.placements if p.dim + ahead in at])
    return aligned(values, target)


def _selected(values: Tensor, mine: Tensor, dims: int, at: int, shape: Sequence[int]) -> Tensor:
    """Those values that belong to the positions `mine`, numbers in `shape`, whose dims begin at dim `at` of `dims`."""
    values = values.reshape((1,) * (dims - values.dim()) + tuple(values.shape))
    if not shape:
        return values.unsqueeze(at)
    last = at + len(shape) - 1
    if all(size == 1 for size in values.shape[at : last + 1]):  # one value for all
        return values.flatten(at, last)
    return values.expand(*values.shape[:at], *shape, *values.shape[last + 1 :]).flatten(at, last).index_select(at, mine)


def _put_into_whole(func: Any, x: Tensor, points: Sequence[Tensor | None], values: Tensor, accumulate: bool) -> Tensor:
    """Split values, or values at split positions, added to a whole tensor."""
    if not accumulate:
        raise Unsupported("it writes split values into a whole tensor; only sums are added over ranks")
    given, at = [i for i in points if i is not None], landing(points)
    sizes = [size for size, i in zip(x.shape, points, strict=True) if i is None]
    shape = torch.broadcast_shapes(*(i.shape for i in given))
    goal = (*sizes[:at], *shape, *sizes[at:])
    if any(isinstance(i, SpatialTensor) for i in given):
        spec = merged(given)
        cuts = tuple(p.at(p.dim + at) for p in spec.placements)
    else:
        assert isinstance(values, SpatialTensor)
        spec = values.spec
        cuts = tuple(p.at(p.dim + len(goal) - values.dim()) for p in spec.placements)
    if any(not at <= p.dim < at + len(shape) for p in cuts):
        raise Unsupported("values that are split along other dims than those of the positions are added to a whole one")
    positions = spec.with_(shape, tuple(p.at(p.dim - at) for p in cuts))
    mine = [None if i is None else aligned(i, positions) for i in points]
    mine_of = torch.ops.aten.index_put(x.new_zeros(x.shape), mine, aligned(values, spec.with_(goal, cuts)), True)
    return _added(func, x, mine_of, spec.group, {})


@rule(torch.put, Tensor.put, Tensor.put_)
def _put(func: Any, x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False) -> Tensor:
    """Elements by their numbers in the whole tensor; see `_index_put`."""
    flat = torch.index_put(x.reshape(-1), (index.reshape(-1),), source.reshape(-1), accumulate)
    result = flat.view(x.shape)
    return x.copy_(result) if writes(func, {}) else result
