"""A split dim made whole by sharing out the others: each rank gets some rows of the dim, all of each, and sends back.

Two ranks, four rows of a dim of size 6, of which each holds three columns; `whole_rows`, `sent_home`, `everywhere`:

    0 0 0 | 1 1 1         0 0 0 1 1 1   rank 0         found 0   both ranks
    0 0 0 | 1 1 1    ->   0 0 0 1 1 1             ->   found 1
    0 0 0 | 1 1 1         0 0 0 1 1 1   rank 1         found 2
    0 0 0 | 1 1 1         0 0 0 1 1 1                  found 3

A rank sends and holds as much as its part, never the whole tensor, but for a tensor of fewer rows than ranks. All ranks
of the axes over which the dim is split call these together.
"""

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import local_factors
from fullframe.ranks.adjoint import linear
from fullframe.ranks.collectives import all_sum_no_grad
from fullframe.ranks.exchange import fetch
from fullframe.ranks.mesh import Axis
from fullframe.ranks.transposition import transposed
from fullframe.spatial.redistribute import sliced
from fullframe.spatial.spec import Spec


class _Turn(NamedTuple):
    """One exchange: rows cut at `rows` are handed out over `axis` against the columns, cut at `columns`."""

    axis: Axis
    rows: Extents
    columns: Extents
    factors: tuple[int, int, int]  # of the dim before the exchange: outer, columns held, inner


def whole_rows(local: Tensor, spec: Spec, dim: int) -> Tensor:
    """(m, n) whole rows along `dim` of size n, this rank's share of them; differentiable."""
    rows = local.movedim(dim, -1).flatten(0, -2) if local.dim() > 1 else local[None]
    for turn in _turns(spec, dim):
        parts = rows.unflatten(1, turn.factors)
        rows = transposed(parts, 2, turn.columns, 0, turn.rows, turn.axis).flatten(1)
    return rows


def sent_home(rows: Tensor, spec: Spec, dim: int) -> Tensor:
    """`rows` (m, n) as the local tensor of `spec`, whose `dim` they are whole along; differentiable."""
    for turn in reversed(list(_turns(spec, dim))):
        outer, _, inner = turn.factors
        parts = rows.unflatten(1, (outer, turn.columns.size, inner))
        rows = transposed(parts, 0, turn.rows, 2, turn.columns, turn.axis).flatten(1)
    shape = [size for d, size in enumerate(spec.local_shape) if d != dim % len(spec.shape)]
    return rows.unflatten(0, shape).movedim(-1, dim) if shape else rows[0]


def everywhere(found: Tensor, spec: Spec, dim: int) -> Tensor:
    """(*rest, ...) what each rank found of its whole rows, (m, ...), on all ranks; differentiable.

    `rest` is the local shape of `spec` without `dim`.
    """
    for turn in reversed(list(_turns(spec, dim))):
        found = fetch(found, 0, turn.rows, (range(turn.rows.size),) * turn.rows.parts, turn.axis)
    shape = [size for d, size in enumerate(spec.local_shape) if d != dim % len(spec.shape)]
    return found.unflatten(0, shape) if shape else found[0]


def picked(local: Tensor, spec: Spec, dim: int, numbers: Tensor, values: Tensor) -> Tensor:
    """`values`, which stand at the global `numbers` along `dim`, with a gradient that goes to whoever holds them.

    `local` is the tensor of `spec`; `numbers` and `values` are equal on all ranks along `dim` and lie as it does.
    """
    if not (local.requires_grad and torch.is_grad_enabled()):
        return values
    held = held_numbers(spec, dim, local.device)
    if not len(held):  # this rank has no part in them, but in the messages of backward
        held, local = held.new_full((1,), -1), local.sum(dim, keepdim=True)
    place = torch.searchsorted(held.contiguous(), numbers.contiguous()).clamp_max(len(held) - 1)  # or torch warns
    mine = local.gather(dim, place).where(held[place] == numbers, 0)
    group = spec.spatial.group([p.axis for p in spec.cuts(dim)])
    add = partial(all_sum_no_grad, group=group)
    return linear(mine, lambda _: values.clone(), add, add)


def held_numbers(spec: Spec, dim: int, device: torch.device) -> Tensor:
    """The numbers along `dim` that this rank holds, in its order, which rises."""
    every = torch.arange(spec.shape[dim], device=device)
    return sliced(every, spec.with_(every.shape, tuple(p.at(0) for p in spec.cuts(dim))))


def numbered(indices: Tensor, spec: Spec, dim: int) -> Tensor:
    """The global numbers of what stands at `indices` of this rank's part of `dim`."""
    here = spec.cuts(dim)
    if len(here) == 1 and here[0].is_plain:
        return indices + spec.rows(here[0]).start
    return held_numbers(spec, dim, indices.device).take(indices)


def sizes_held(spec: Spec, dim: int) -> list[int]:
    """How many elements of a row along `dim` each rank holds, of those over which it is split.

    Raises Merged where a mask has picked them.
    """
    spec.require_in_order((dim % len(spec.shape),))
    here = {p.axis: p.extents for p in spec.cuts(dim)}
    sizes = [spec.shape[dim] // prod(extents.size for extents in here.values())]
    for axis in spec.spatial.axes:
        if axis.name in here:
            sizes = [size * held for size in sizes for held in here[axis.name].sizes]
    return sizes


def _turns(spec: Spec, dim: int) -> Iterator[_Turn]:
    """The exchanges that make `dim` whole, one a mesh axis over which it is split.

    Raises Merged where a mask has picked its rows.
    """
    dim %= len(spec.shape)
    spec.require_in_order((dim,))
    left = spec.cuts(dim)
    count = 1
    for d, size in enumerate(spec.local_shape):
        count *= 1 if d == dim else size
    for p in left:
        axis, rows = spec.spatial.axis(p.axis), Extents.even(count, p.extents.parts)
        yield _Turn(axis, rows, p.extents, local_factors(p, left, spec.coordinates))
        left, count = left[1:], rows.sizes[axis.coordinate]
