"""Whole tables that are read by split indices or values: each rank looks up its own, nothing is sent."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.ranks.collectives import all_sum_no_grad
from fullframe.spatial.operands import aligned, merged
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


def looked_up(table: Tensor, points: Sequence[Tensor | None]) -> Tensor:
    """`table[points]` of a whole table, one index tensor or None a dim, some of them split; cut as they are."""
    given = [i for i in points if i is not None]
    spec = merged(given)
    local = table[tuple(slice(None) if i is None else aligned(i, spec) for i in points)]
    at, rest = landing(points), [size for size, i in zip(table.shape, points, strict=True) if i is None]
    shape = (*rest[:at], *spec.shape, *rest[at:])
    return wrap(local, spec.with_(shape, tuple(p.at(p.dim + at) for p in spec.placements)))


def landing(points: Sequence[Any]) -> int:
    """The dim at which the dims of index tensors begin in the result: where they stand, or 0 where they stand apart."""
    dims = [dim for dim, index in enumerate(points) if index is not None]
    return dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0


@rule(torch.searchsorted)
def _searchsorted(func: Any, ordered: Tensor, values: Any, *, sorter: Tensor | None = None, **options: Any) -> Tensor:
    """Where values belong in rows that are whole, one row or one for each row of values; refuses split rows."""
    last = ordered.dim() - 1
    rows = [t for t in (ordered, sorter) if isinstance(t, SpatialTensor)]
    if any(t.spec.is_split(last) for t in rows):
        raise Unsupported("the ordered rows are split themselves", "Gather them with .full().")
    if isinstance(values, SpatialTensor):
        spec = values.spec
    else:
        spec = rows[0].spec.with_(values.shape, rows[0].spec.placements)
    leading = tuple(p for p in spec.placements if p.dim < last)  # by which several rows are cut, as their values are
    given = None if sorter is None else aligned(sorter, spec.with_(sorter.shape, leading))
    found = func(aligned(ordered, spec.with_(ordered.shape, leading)), aligned(values, spec), sorter=given, **options)
    return wrap(found, spec)


@rule(torch.bucketize)
def _bucketize(func: Any, input: Any, boundaries: Tensor, **options: Any) -> Tensor:
    """The bucket of each element between whole boundaries; refuses split ones."""
    if isinstance(boundaries, SpatialTensor):
        raise Unsupported("the boundaries are split")
    return wrap(func(local_of(input), boundaries, **options), input.spec)


@rule(torch.isin)
def _isin(func: Any, elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Whether each element is in a set, one of which is whole; refuses a split set for split elements."""
    # Where all are promised to be unique torch may sort them together; one by one the answer is the same.
    if not isinstance(test_elements, SpatialTensor):
        return wrap(func(local_of(elements), test_elements, invert=invert), elements.spec)
    if isinstance(elements, SpatialTensor):
        raise Unsupported("the set of elements to look for is split, as the elements are")
    spec = test_elements.spec
    hits = func(elements, local_of(test_elements)).int()
    hits = all_sum_no_grad(hits, spec.group)
    return hits == 0 if invert else hits > 0
