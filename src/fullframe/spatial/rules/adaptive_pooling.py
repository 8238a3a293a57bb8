"""Adaptive pooling: windows over all of an image, of which a rank may see a part; no map is made whole for them."""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.extents import overlap
from fullframe.geometry.placement import Placement
from fullframe.geometry.window import AdaptiveWindow
from fullframe.ranks.collectives import all_gather, all_gather_no_grad
from fullframe.ranks.exchange import joined
from fullframe.ranks.mesh import Axis
from fullframe.spatial.redistribute import gather_axes, refetched
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.rules.resampling import in_format, resampled
from fullframe.spatial.rules.taps import taps_of, weights_dtype
from fullframe.spatial.rules.window_plan import nonempty
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap

_ADAPTIVE: dict[Any, int] = {F.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3}
_ADAPTIVE |= {torch.adaptive_avg_pool1d: 1}
_ADAPTIVE_MAX: dict[Any, int] = {F.adaptive_max_pool1d: 1, F.adaptive_max_pool2d: 2, F.adaptive_max_pool3d: 3}
_ADAPTIVE_MAX_INDEXED: dict[Any, int] = {F.adaptive_max_pool1d_with_indices: 1, torch.adaptive_max_pool1d: 1}
_ADAPTIVE_MAX_INDEXED |= {F.adaptive_max_pool2d_with_indices: 2, F.adaptive_max_pool3d_with_indices: 3}


@rule(*_ADAPTIVE)
def _adaptive_average_pool(func: Any, input: SpatialTensor, output_size: Any) -> Tensor:
    """(..., H, W) to the given size: a mean for size 1, else weighted sums of rows wherever they lie."""
    count = _ADAPTIVE[func]
    first = input.dim() - count
    sizes = _targets(input, output_size, count)
    single = [first + n for n, size in enumerate(sizes) if size == 1]
    input.spec.require_plain([dim for dim in range(first, input.dim()) if dim not in single])
    if 0 in input.shape:
        return func(input.full(), sizes)  # type: ignore[no-any-return]
    kind = weights_dtype(input)
    result = input.mean(single, keepdim=True) if single else input
    for dim, size in zip(range(first, input.dim()), sizes, strict=True):
        if size != 1 and isinstance(result, SpatialTensor) and result.spec.is_split(dim) and size != input.shape[dim]:
            result = resampled(result, dim, taps_of(result.shape[dim], size, "area", None, None, False, kind))
    if not isinstance(result, SpatialTensor):
        return in_format(func(result, sizes), input, input.dtype)
    spec, local = result.spec, local_of(result)
    targets = [local.shape[first + n] if spec.is_split(first + n) else size for n, size in enumerate(sizes)]
    if targets != list(local.shape[-count:]):
        local = func(local, targets)
    return in_format(wrap(local, spec.with_((*spec.shape[:-count], *sizes), spec.placements)), input, input.dtype)


@rule(*_ADAPTIVE_MAX, *_ADAPTIVE_MAX_INDEXED)
def _adaptive_max_pool(func: Any, input: SpatialTensor, output_size: Any, return_indices: bool = False) -> Any:
    """(..., H, W) to the given size, dim by dim; indices are those of the whole image."""
    count = _ADAPTIVE_MAX.get(func) or _ADAPTIVE_MAX_INDEXED[func]
    return_indices = return_indices or func in _ADAPTIVE_MAX_INDEXED
    first = input.dim() - count
    input.spec.require_plain(range(first, input.dim()))
    sizes = _targets(input, output_size, count)
    found = _Largest(input, None)
    for n in reversed(range(count)):  # the last dim first, so that among equals torch's choice is taken
        area = math.prod(input.shape[first + n + 1 :]) if return_indices else 0
        found = _adaptive_max_rows(found, first + n, sizes[n], area)
    result = in_format(found.values, input, input.dtype)
    return result if found.numbers is None else (result, in_format(found.numbers, input, torch.int64))


class _Largest(NamedTuple):
    """A map pooled along some dims, and the number in the volume of each of its elements, where they are wanted."""

    values: Tensor
    numbers: Tensor | None

    def each(self, op: Callable[[Tensor], Tensor]) -> "_Largest":
        """`op` of both."""
        return _Largest(op(self.values), None if self.numbers is None else op(self.numbers))


def _adaptive_max_rows(x: _Largest, dim: int, size: int, area: int) -> _Largest:
    """`x` pooled along one more dim, a row of which is `area` elements of the volume, 0 where nothing is counted."""
    window = AdaptiveWindow(x.values.shape[dim], size)
    reads = [window.reads(range(row, row + 1)) for row in range(size)]
    if not isinstance(x.values, SpatialTensor):
        return _max_windows(x, dim, reads, 0, area)
    spec = x.values.spec
    mine = x.each(lambda t: local_of(t))  # type: ignore[arg-type]
    placement = spec.of(dim)
    if placement is None:
        found, goal = _max_windows(mine, dim, reads, 0, area), spec.resized(dim, size)
        return found.each(lambda t: wrap(t, goal))
    axis, extents = spec.spatial.axis(placement.axis), nonempty(window.output_extents(placement.extents, size))
    if extents is not None:
        wanted = tuple(window.reads(rows) for rows in extents.ranges)
        mine = mine.each(lambda t: refetched(t, spec, placement, wanted))
        rows, goal = extents.ranges[axis.coordinate], spec.resized(dim, size, extents)
        found = _max_windows(mine, dim, reads[rows.start : rows.stop], wanted[axis.coordinate].start, area)
    elif placement.extents.has_empty:
        whole = mine.each(lambda t: wrap(*gather_axes(t, spec, [axis.name])))
        return _adaptive_max_rows(whole, dim, size, area)
    else:
        found = _of_all_ranks(mine, placement, axis, reads, area)
        goal = spec.whole_along([axis.name]).resized(dim, size)
    return found.each(lambda t: wrap(t, goal))


def _of_all_ranks(mine: _Largest, placement: Placement, axis: Axis, reads: Sequence[range], area: int) -> _Largest:
    """Pooled along a dim with windows `reads` that several ranks see: each rank's largest, and of these the largest."""
    dim, parts = placement.dim, placement.extents.ranges
    own, seen = parts[axis.coordinate], [[overlap(rows, part) for part in parts] for rows in reads]
    found = _max_windows(mine, dim, [here[axis.coordinate] or own[:1] for here in seen], own.start, area)
    values = all_gather(found.values, axis.group)  # (ranks, ...)
    numbers = None if found.numbers is None else all_gather_no_grad(found.numbers, axis.group)
    held = [(rank, row) for row, here in enumerate(seen) for rank, rows in enumerate(here) if rows]
    stops = list(accumulate(sum(map(bool, here)) for here in seen))
    candidates = _Largest(values, numbers).each(
        lambda t: joined([t[rank].narrow(dim, row, 1) for rank, row in held], dim)
    )
    return _max_windows(candidates, dim, list(map(range, [0, *stops], stops)), 0, 0)


def _max_windows(x: _Largest, dim: int, reads: Sequence[range], offset: int, area: int) -> _Largest:
    """The largest of each window along one dim; `x` starts at input row `offset`."""
    best, numbers = [], []
    count = torch.arange(max(map(len, reads)), dtype=torch.int32, device=x.values.device)
    count = count.view(-1, *(1,) * (x.values.dim() - dim - 1))
    for rows in reads:
        seen = x.values.narrow(dim, rows.start - offset, len(rows))
        largest, index = seen.max(dim, keepdim=True)
        # Of several NaN torch's pool takes the last, its max the first.
        last = (seen.isnan() * count[: len(rows)]).amax(dim, keepdim=True)
        index = torch.where(largest.isnan(), last, index)
        largest = seen.gather(dim, index)
        best.append(largest)
        if area or x.numbers is not None:
            inner = 0 if x.numbers is None else x.numbers.narrow(dim, rows.start - offset, len(rows)).gather(dim, index)
            numbers.append(inner + (index + rows.start) * area)
    return _Largest(joined(best, dim), joined(numbers, dim) if numbers else None)


def _targets(x: SpatialTensor, output_size: Any, count: int) -> list[int]:
    given: Sequence[int | None] = [output_size] * count if isinstance(output_size, int) else list(output_size)
    given = list(given) * (count // len(given))
    return [x.shape[x.dim() - count + n] if size is None else int(size) for n, size in enumerate(given)]
