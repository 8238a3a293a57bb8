"""Whole tables that are read by split indices or values: each rank looks up its own, nothing is sent."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.ranks.collectives import all_sum_no_grad
from fullframe.spatial.operands import aligned, has_values, merged
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap

FEW = 2**16  # numbers that any rank may hold besides its part of a map


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


def _whole_where_few(rows: SpatialTensor, values: Any, reason: str) -> Tensor:
    """Rows made whole, where they are no more than a rank's part of the larger operand."""
    large = max((t for t in (rows, values) if isinstance(t, SpatialTensor)), key=Tensor.numel)
    if rows.numel() > max(large.numel() // large.spec.spatial.size, FEW):
        raise Unsupported(f"{reason}, and as large as what is looked up", "Gather them with .full().")
    return rows.full()


@rule(torch.searchsorted)
def _searchsorted(func: Any, ordered: Tensor, values: Any, *, sorter: Tensor | None = None, **options: Any) -> Tensor:
    """Where values belong in ordered rows, one row or one for each row of values; split rows are made whole."""
    last = ordered.dim() - 1
    if sorter is not None:
        ordered, sorter = ordered.gather(-1, sorter), None
    if isinstance(ordered, SpatialTensor) and ordered.spec.is_split(last):
        ordered = _whole_where_few(ordered, values, "the ordered rows are split")
    if not any(isinstance(t, SpatialTensor) for t in (ordered, values)):
        return func(ordered, values, **options)  # type: ignore[no-any-return]
    rows = [t for t in (ordered,) if isinstance(t, SpatialTensor)]
    if isinstance(values, SpatialTensor):
        spec = values.spec
    else:
        spec = rows[0].spec.with_(values.shape, rows[0].spec.placements)
    leading = tuple(p for p in spec.placements if p.dim < last)  # by which several rows are cut, as their values are
    found = func(aligned(ordered, spec.with_(ordered.shape, leading)), aligned(values, spec), **options)
    return wrap(found, spec)


@rule(torch.bucketize)
def _bucketize(func: Any, input: Any, boundaries: Tensor, **options: Any) -> Tensor:
    """The bucket of each element between boundaries, which are made whole."""
    if isinstance(boundaries, SpatialTensor):
        boundaries = _whole_where_few(boundaries, input, "the boundaries are split")
    if not isinstance(input, SpatialTensor):
        return func(input, boundaries, **options)  # type: ignore[no-any-return]
    return wrap(func(local_of(input), boundaries, **options), input.spec)


@rule(torch.isin)
def _isin(func: Any, elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
    """Whether each element is in a set; of a split set for split elements each rank sends what differs."""
    # Where all are promised to be unique torch may sort them together; one by one the answer is the same.
    if not isinstance(test_elements, SpatialTensor):
        return wrap(func(local_of(elements), test_elements, invert=invert), elements.spec)
    if isinstance(elements, SpatialTensor):
        few: Any = test_elements.detach()
        few = few.unique() if has_values(local_of(few)) else few.full()
        return wrap(func(local_of(elements), few, invert=invert), elements.spec)
    spec = test_elements.spec
    hits = func(elements, local_of(test_elements)).int()
    hits = all_sum_no_grad(hits, spec.group)
    return hits == 0 if invert else hits > 0
