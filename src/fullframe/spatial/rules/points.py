"""Reads of a split map at positions: each rank reads those that it holds, and the few numbers read are put together.

Split positions that are too many to be whole on each rank are sent to all in turns. `x` of four in two parts:

    x: a b | c d   at: 3 0 | 2 1     turn 0: both know 3 0, rank 0 finds a, rank 1 finds d; rank 0 keeps d a
                                     turn 1: both know 2 1, rank 0 finds b, rank 1 finds c; rank 1 keeps c b
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, product
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement
from fullframe.geometry.window import proportional_extents
from fullframe.ranks.collectives import all_owned, all_sum_no_grad
from fullframe.ranks.exchange import fetch, joined
from fullframe.ranks.mesh import axes_in
from fullframe.spatial.operands import aligned, has_values, in_order, merged, placements_of, united
from fullframe.spatial.redistribute import gather_axes, sliced
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.rules.tables import FEW, landing, looked_up
from fullframe.spatial.rules.transposing import along
from fullframe.spatial.selection import may_be_fewer
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, on_local, whole, wrap
from fullframe.spatial.whole_rows import sent_home, whole_rows


def read_at(x: Tensor, points: Sequence[Tensor | None], negative: bool = True) -> Tensor:
    """`x[points]`, one index tensor or None a dim, at least one; none of them a mask. `negative`: from the end, too.

    What is read along split dims is whole on all ranks, but for many rows of one dim, or at many positions that are
    split. Refused where that, or such an index, is more than a rank's part of `x`.
    """
    given = [i for i in points if i is not None]
    if not isinstance(x, SpatialTensor):
        return looked_up(x, points)
    x.spec.require_in_order([dim for dim, index in enumerate(points) if index is not None])
    spec, turns = x.spec, in_turns(points, x.spec)
    by_rows = len(given) == given[0].dim() == 1 and has_many_rows(spec, landing(points))
    if turns is not None and not (by_rows and given[0].numel() <= most_besides(spec)):
        return _read_in_turns(x, points, turns, negative)
    points, at, shape, rest, result = landed(spec, [None if i is None else _whole(i, x) for i in points])
    much = _is_much(result, spec)
    if much and _is_table(given) and all(i is not None for i in points[at : at + len(given)]):
        for dim, index in enumerate(given, start=at):
            x = x[(slice(None),) * dim + (index.reshape(-1),)]
        return x
    many = len(given) == len(shape) == 1 and much and has_many_rows(spec, at)
    if not many and len(given) == len(shape) == 1 and (turns := _turns_of_much(points, result, spec)) is not None:
        return _read_in_turns(x, points, turns, negative)
    if not many:
        _require_few(result, spec)
    where = {dim: index for dim, index in enumerate(points) if index is not None}
    require_inside(partial(_at, points), spec, where, negative)
    if many:
        (index,) = (torch.where(i < 0, i + x.shape[at], i) for i in points if i is not None)
        return along(x, at, lambda local: local.index_select(at, index))
    local, points, held = at_own(local_of(x), spec, points)
    found = local[items_of(points)]
    if held is None:
        return wrap(found, result)
    held = held.view((*held.shape, *(1 for _ in rest[at:])))  # as a tuple: it may be empty
    return wrap(_put_together(found, held, spec, rest), result)


def _read_in_turns(x: SpatialTensor, points: Sequence[Tensor | None], turns: "Turns", negative: bool) -> Tensor:
    """`x[points]`, cut as the positions are."""
    spec, local, (at, rest, result) = x.spec, local_of(x), turns.landed(x.spec, points)
    found = []
    for turn, here in enumerate(turns.of_positions(points)):
        require_inside(partial(_at, here), spec, {d: i for d, i in enumerate(here) if i is not None}, negative)
        part, places, held = at_own(local, spec, here)
        assert held is not None
        read = _put_together(part[items_of(places)], held.view(-1, *(1 for _ in rest[at:])), spec, rest)
        found.append(read if turn == turns.axis.coordinate else read.narrow(at, 0, 0).clone())  # in each rank's graph
    return wrap(joined(found, at).unflatten(at, turns.index.local_shape), result)


def _turns_of_much(points: Sequence[Tensor | None], result: Spec, spec: Spec) -> "Turns | None":
    """The turns of one whole index, shared out evenly, where what is read at it may not be whole on each rank."""
    ((dim, index),) = ((dim, index) for dim, index in enumerate(points) if index is not None)
    if not _is_much(result, spec) or may_be_fewer(result.shape, spec):
        return None
    axis = spec.spatial.axis(spec.spatial.joint([p.axis for p in spec.cuts(dim)]))
    own = Placement(axis.name, 0, Extents.even(len(index), axis.size))
    return in_turns(points, spec, spec.with_(index.shape, (own,)))


def _is_table(given: Sequence[Tensor]) -> bool:
    """Whether index tensors say rows, columns and so on of a table: `x[..., ys[:, None], xs[None, :]]`."""
    return len(given) > 1 and all(i.dim() == len(given) and i.numel() == i.shape[d] for d, i in enumerate(given))


def _at(points: Sequence[Tensor | None], x: Tensor) -> Tensor:
    return x[items_of(points)]


class Turns:
    """The turns of split index tensors, of spec `index`, over all ranks of `axis`."""

    def __init__(self, index: Spec, names: Sequence[str]):
        spatial = index.spatial
        self.index, self.axis = index, spatial.axis(spatial.joint(names))
        axes = axes_in(self.axis.name)
        places = product(*(range(spatial.axis(name).size) for name in axes))
        sizes = (prod(index.shape_at(dict(zip(axes, place, strict=True)))) for place in places)
        self._extents = Extents((0, *accumulate(sizes)))  # of the positions, one rank's after another's

    def each(self, own: Tensor, dim: int) -> Iterator[Tensor]:
        """What each rank has for its positions, which are `dim` of `own`, in turn on all ranks; differentiable."""
        for rows in self._extents.ranges:
            yield fetch(own, dim, self._extents, (rows,) * self.axis.size, self.axis)

    def of_positions(self, points: Sequence[Tensor | None]) -> Iterator[list[Tensor | None]]:
        """Each rank's positions, (own,) for each index tensor."""
        own = [aligned(i, self.index).expand(self.index.local_shape).flatten().long() for i in points if i is not None]
        for turn in self.each(torch.stack(own), 1):
            here = iter(turn.unbind())
            yield [None if i is None else next(here) for i in points]

    def landed(self, spec: Spec, points: Sequence[Tensor | None]) -> tuple[int, list[int], Spec]:
        """Where the dims of the positions begin in what is read from `spec`, dims without an index, and its spec."""
        like = torch.empty(()).expand(self.index.shape)
        _, at, _, rest, found = landed(spec, [None if i is None else like for i in points])
        cuts = in_order([*found.placements, *(p.at(p.dim + at) for p in self.index.placements)])
        return at, rest, found.with_(found.shape, cuts)


def in_turns(points: Sequence[Tensor | None], spec: Spec, index: Spec | None = None) -> Turns | None:
    """The turns of index tensors, one or None a dim, for a map; None where they, or all that is there, may be whole.

    `index` is their spec where they are whole, but what is written at them is split.
    """
    given = [i for i in points if i is not None]
    if index is None and not any(isinstance(i, SpatialTensor) for i in given):
        return None
    rest = prod(size for size, i in zip(spec.shape, points, strict=True) if i is None)
    rest //= prod(p.extents.parts for p in spec.placements if points[p.dim] is None)
    if prod(torch.broadcast_shapes(*(i.shape for i in given))) * max(rest, 1) <= most_besides(spec):
        return None
    index, over = index or merged(given), [p.axis for p in spec.placements if points[p.dim] is not None]
    names = [*over, *(p.axis for p in index.placements)]
    besides = {name for p in spec.placements if p.axis not in over for name in axes_in(p.axis)}
    if not over or any(name in besides for joint in names for name in axes_in(joint)):
        return None
    return Turns(index, names)


def spread(dim: int, index: Tensor) -> list[Tensor | None]:
    """One index tensor a dim, at which `gather` along `dim` by `index` reads."""
    shapes = [[-1 if e == d else 1 for e in range(index.dim())] for d in range(index.dim())]
    sizes = enumerate(index.shape)
    return [index if d == dim else torch.arange(n, device=index.device).view(shapes[d]) for d, n in sizes]


class Landed(NamedTuple):
    """Where index tensors, one or None a dim, lead to."""

    points: list[Tensor | None]  # of one shape
    at: int  # the dim of the result at which their dims begin
    shape: torch.Size  # of each
    rest: list[int]  # dims without one
    result: Spec  # whole along their dims


def landed(spec: Spec, points: Sequence[Tensor | None]) -> Landed:
    """What whole index tensors, at least one, take from a map of this spec."""
    indices = iter(torch.broadcast_tensors(*(i for i in points if i is not None)))
    alike = [None if i is None else next(indices) for i in points]
    at, shape = landing(alike), next(i.shape for i in alike if i is not None)
    rest = [dim for dim, index in enumerate(alike) if index is None]
    sizes = [spec.shape[dim] for dim in rest]
    goal = [*rest[:at], *(None for _ in shape), *rest[at:]]
    kept = tuple(p.at(goal.index(p.dim)) for p in spec.placements if p.dim in rest)
    return Landed(alike, at, shape, rest, spec.with_((*sizes[:at], *shape, *sizes[at:]), kept))


def has_many_rows(spec: Spec, dim: int) -> bool:
    """Whether each rank can have rows along `dim`, so that none has to hold a whole tensor."""
    return prod(spec.shape) // max(spec.shape[dim], 1) >= spec.spatial.size


def items_of(points: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """What to put in brackets for index tensors, one or None a dim."""
    return tuple(slice(None) if i is None else i for i in points)


def at_own(
    local: Tensor, spec: Spec, points: Sequence[Tensor | None]
) -> tuple[Tensor, list[Tensor | None], Tensor | None]:
    """This rank's tensor, where positions lie in it, and which of them it holds (None: all of them, on all ranks).

    The indices are whole, of one shape, inside the tensor, counted from its end where they are negative. Those of
    other ranks become any that are inside; a rank that holds nothing gets a row of zeros.
    """
    found, held = list(points), None
    for dim, index in enumerate(points):
        if index is None:
            continue
        size, placements = spec.shape[dim], sorted(spec.cuts(dim), key=lambda p: p.outer)
        index = torch.where(index < 0, index + size, index)
        for p in placements:  # from the outermost on, so that `inner` is a whole factor still
            rows = spec.rows(p)
            row = index // p.inner % p.extents.size
            here = (row >= rows.start) & (row < rows.stop)
            held = here if held is None else held & here
            row = (row - rows.start).clamp(0, max(len(rows) - 1, 0))
            outer = index // (p.inner * p.extents.size)
            index = (outer * max(len(rows), 1) + row) * p.inner + index % p.inner
        if placements and not local.shape[dim]:
            local = torch.cat([local, local.new_zeros((*local.shape[:dim], 1, *local.shape[dim + 1 :]))], dim)
            index = torch.zeros_like(index)
        found[dim] = index
    return local, found, held


def _put_together(found: Tensor, held: Tensor, spec: Spec, rest: Sequence[int]) -> Tensor:
    """What the ranks read where each of them `held` the rows, from all ranks along the dims that are not `rest`."""
    axes = [p.axis for p in spec.placements if p.dim not in rest]
    return all_owned(found.masked_fill(~held, 0), spec.spatial.group(axes))


def _whole(index: Tensor, x: SpatialTensor) -> Tensor:
    """A split index made whole, where it is no more than a rank's part of `x`."""
    if not isinstance(index, SpatialTensor):
        return index
    if is_large(index.shape, x.spec):
        raise Unsupported("the index is split, and larger than a rank's part of what it reads from")
    return index.full()


def most_besides(spec: Spec) -> int:
    """How many numbers a rank may hold besides its part of a map: as many again, or few."""
    return max(prod(spec.shape) // spec.parts, FEW)


def is_large(shape: Sequence[int], spec: Spec) -> bool:
    """Whether what is whole on each rank is certainly more than it may hold besides its part of a map."""
    return prod(shape) > most_besides(spec) and not may_be_fewer(shape, spec)


def _is_much(result: Spec, spec: Spec) -> bool:
    """Whether a rank would hold more of the result than it holds of the map `spec`."""
    held = prod(result.shape) // result.parts
    return len(result.placements) < len(spec.placements) and held > most_besides(spec)


def _require_few(result: Spec, spec: Spec) -> None:
    """Raises Unsupported where a rank would hold more of the result than it holds of the map `spec`."""
    if _is_much(result, spec) and not may_be_fewer(result.shape, spec):
        raise Unsupported(
            f"what it reads along a split dim, {tuple(result.shape)}, would be whole on every rank, and is larger than "
            "a rank's part of the map"
        )


def require_inside(call: Any, spec: Spec, indices: dict[int, Tensor], negative: bool) -> None:
    """Raises torch's own error where a whole index (by its dim) is outside the tensor: on all ranks alike.

    `call` runs the function on a tensor of the whole shape that takes no memory. `negative`: it counts from the end.
    """
    for dim, index in indices.items():
        size = spec.shape[dim]
        if not _is_inside(index, size, negative):
            call(torch.zeros((), dtype=torch.float64).expand(spec.shape))
            raise IndexError(f"an index is out of bounds for dimension {dim} with size {size}")


def _is_inside(index: Tensor, size: int, negative: bool) -> bool:
    if not has_values(index) or not index.numel():
        return True
    inside = ((index >= (-size if negative else 0)) & (index < size)).all()
    if index.device.type != "cpu":  # as torch does it there: the kernel fails, later
        torch._assert_async(inside)
        return True
    return bool(inside)


@rule(torch.index_select, Tensor.index_select)
def _index_select(func: Any, x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Rows of a dim by their numbers; see `read_at`."""
    dim %= x.dim()
    points = [index.reshape(-1) if d == dim else None for d in range(x.dim())]
    if isinstance(x, SpatialTensor) and in_turns(points, x.spec) is None:
        index = _whole(index, x)
        require_inside(lambda like: func(like, dim, index), x.spec, {dim: index}, False)
        points[dim] = index.reshape(-1)
    return read_at(x, points, False)


@rule(torch.take, Tensor.take)
def _take(func: Any, x: Tensor, index: Tensor) -> Tensor:
    """Elements by their numbers in the whole tensor; see `read_at`."""
    if not isinstance(x, SpatialTensor):
        return on_local(index, lambda i: func(x, i))
    flat = x.reshape(-1)
    if isinstance(flat, SpatialTensor) and in_turns([index], flat.spec) is not None:
        return read_at(flat, [index])
    index, numbers = _whole(index, x), x.spec.with_((x.numel(),), ())
    require_inside(lambda like: func(like, index), numbers, {0: index}, True)
    found = read_at(flat, [torch.atleast_1d(index)])  # an index without dims would be read by the host
    return found if index.dim() else found.squeeze(0)


@rule(torch.take_along_dim, Tensor.take_along_dim)
def _take_along_dim(func: Any, x: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    """`gather` of tensors that broadcast against each other along the other dims; of flat ones without a dim."""
    if dim is None:
        return torch.gather(x.reshape(-1), 0, indices.reshape(-1))
    dim %= x.dim()
    indices = indices % x.shape[dim]  # so torch takes them, how ever far below zero they are
    sizes = torch.broadcast_shapes(*((*t.shape[:dim], 1, *t.shape[dim + 1 :]) for t in (x, indices)))
    x, indices = (t.expand(*sizes[:dim], t.shape[dim], *sizes[dim + 1 :]) for t in (x, indices))
    return torch.gather(x, dim, indices)


@rule(torch.gather, Tensor.gather)
def _gather(func: Any, x: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    """`x[..., index, ...]` along a dim, the index cut as `x` is along the others; see `read_at`.

    Along a split dim an index that is split over the same ranks is made whole, and its result is cut again.
    """
    dim %= max(x.dim(), 1)
    if isinstance(x, SpatialTensor) and x.spec.is_split(dim):
        x.spec.require_in_order()
        if isinstance(index, SpatialTensor):
            index.spec.require_in_order()
    if not index.numel() and isinstance(x, SpatialTensor):  # of whatever dims
        return wrap(func(local_of(x), dim, whole(index)), x.spec.with_(index.shape, ()))
    for d in range(x.dim()):
        if d != dim and index.shape[d] < x.shape[d]:
            x = x.narrow(d, 0, index.shape[d])
    if not isinstance(x, SpatialTensor):
        return _gathered(x, dim, index) if isinstance(index, SpatialTensor) else x.gather(dim, index)
    if index.numel() > most_besides(x.spec) and not has_many_rows(x.spec, dim):
        points = spread(dim, index)
        if in_turns(points, x.spec) is not None:
            require_all_inside(index, x.spec, dim)
            return read_at(x, points, False)
    spec, cuts = x.spec, placements_of(index)
    if not cuts:
        require_inside(lambda like: like.gather(dim, index), spec, {dim: index}, False)
    others, over = [p for p in spec.placements if p.dim != dim], {p.axis for p in spec.cuts(dim)}
    read = spec.with_(index.shape, united([others, [q for q in cuts if q.axis not in over]]))
    result = spec.with_(index.shape, united([read.placements, cuts]))
    if over and _is_much(read, spec) and has_many_rows(read, dim):
        return _gathered_rows(x, dim, index, others)
    if x.dim() == 1 and not cuts and _is_much(read, spec):
        return read_at(x, [index], False)
    _require_few(read, spec)
    if isinstance(index, SpatialTensor):
        index = wrap(*gather_axes(local_of(index), index.spec, list(over)))
    rows = aligned(index, read)
    if cuts and over:
        require_all_inside(rows, spec, dim)
    columns = spec.with_(x.shape, tuple(p for p in read.placements if p.dim != dim))
    local = sliced(local_of(x), columns, tuple(others))
    local, places, held = at_own(local, spec, [rows if d == dim else None for d in range(x.dim())])
    found = local.gather(dim, places[dim])  # type: ignore[arg-type]
    if held is None:
        return wrap(found, read)
    found = _put_together(found, held, spec, [d for d in range(x.dim()) if d != dim])
    return wrap(sliced(found, result, read.placements), result)


def _gathered_rows(x: SpatialTensor, dim: int, index: Tensor, others: list[Placement]) -> Tensor:
    """`gather` at many positions: each rank gets some rows, all of each, and what it finds in them goes home."""
    spec, own = x.spec, x.spec.cuts(dim)
    if index.shape[dim] != x.shape[dim]:
        (placement,) = [spec.of(dim)]
        assert placement is not None
        own = (placement.recut(proportional_extents(placement.extents, index.shape[dim])),)
    result = spec.with_(index.shape, united([[*others, *own]]))
    numbers = whole_rows(aligned(index, result), result, dim)
    require_all_inside(numbers, spec, dim)
    return wrap(sent_home(whole_rows(local_of(x), spec, dim).gather(1, numbers), result, dim), result)


def _gathered(table: Tensor, dim: int, index: SpatialTensor) -> Tensor:
    """`gather` of a whole table, which nobody sends: along other dims than `dim` each rank reads its own rows."""
    spec = index.spec
    others = spec.with_(table.shape, tuple(p for p in spec.placements if p.dim != dim))
    return wrap(sliced(table, others).gather(dim, local_of(index)), spec)


def require_all_inside(rows: Tensor, spec: Spec, dim: int) -> None:
    """Raises torch's error on all ranks where any rank's part of an index is outside the tensor."""
    rows = local_of(rows) if isinstance(rows, SpatialTensor) else rows
    is_outside = not _is_inside(rows, spec.shape[dim], False)
    outside = torch.full((), is_outside, dtype=torch.int32, device=rows.device)
    outside = all_sum_no_grad(outside, spec.spatial.replica)
    if has_values(outside) and outside.device.type == "cpu" and outside:
        raise RuntimeError(f"index is out of bounds for dimension {dim} with size {spec.shape[dim]}")
