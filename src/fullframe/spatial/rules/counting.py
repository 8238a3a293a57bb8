"""Counts and different values of a whole tensor: each rank counts its part, what is sent is as small as the result."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks.collectives import all_gather_no_grad, all_sum, device_of_facts
from fullframe.spatial.operands import aligned, has_values
from fullframe.spatial.redistribute import in_runs, sliced
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, whole, wrap
from fullframe.spatial.whole_rows import everywhere, whole_rows

_BY_VALUE = "the shape of its result depends on the values, which a simulation has not"


def _range(x: SpatialTensor) -> tuple[float, float]:
    """The smallest and largest element of the whole tensor; of a simulation, anything."""
    low, high = torch.aminmax(x.detach())
    return (float(low), float(high)) if has_values(local_of(x)) else (0.0, 1.0)


@rule(torch.histc, Tensor.histc)
def _histc(func: Any, x: SpatialTensor, bins: int = 100, min: Any = 0, max: Any = 0) -> Tensor:
    """Counts (bins,) of all ranks, between `min` and `max` or, where they are equal, over the values there are."""
    if min == max:
        min, max = _range(x)
        if min == max:
            min, max = min - 1, max + 1  # as torch does
    return all_sum(func(local_of(x), bins, min, max), x.spec.group)


@rule(torch.histogram, Tensor.histogram)
def _histogram(func: Any, x: Any, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    """Counts of all ranks, or sums of weights or their density, and the edges; refuses whole values."""
    if not isinstance(x, SpatialTensor):
        raise Unsupported("the values are whole, the edges or weights are split")
    bins = whole(bins)
    if weight is not None:
        if weight.shape != x.shape:
            raise RuntimeError(f"histogram: weights of shape {tuple(weight.shape)} for values of {tuple(x.shape)}")
        weight = aligned(weight, x.spec)
    options = {}
    if not isinstance(bins, Tensor):
        options["range"] = _range(x) if range is None else range
    found = func(local_of(x), bins, weight=weight, **options)
    counts = all_sum(found.hist, x.spec.group)
    if density:
        counts = counts / counts.sum() / found.bin_edges.diff()
    return type(found)([counts, found.bin_edges])


@rule(torch.bincount, Tensor.bincount, checked=False)
def _bincount(func: Any, x: Any, weights: Any = None, minlength: int = 0) -> Tensor:
    """How often each number occurs in (n,), or the sums of its weights; as long as the largest number asks for."""
    given = next(t for t in (x, weights) if isinstance(t, SpatialTensor))
    if weights is not None and weights.shape != x.shape:
        func(torch.zeros(1, dtype=torch.int64), torch.zeros(2), minlength)  # torch refuses it
    spec, group = given.spec, given.spec.group
    x = aligned(x, spec)
    weights = None if weights is None else aligned(weights, spec)
    if has_values(x):
        func(x[:0], None if weights is None else weights[:0], minlength)  # refuses dims, dtypes, lengths as torch does
    elif not minlength:
        raise Unsupported(_BY_VALUE, "Give it a minlength.")
    ends = torch.stack([-x.min().long(), x.max().long()]) if len(x) else x.new_tensor([0, -1], dtype=torch.int64)
    ends = all_gather_no_grad(ends, group).amax(0)
    if has_values(x):
        negative, largest = ends.tolist()
        if negative > 0:
            func(torch.tensor([-1]))  # torch refuses it
        minlength = max(minlength, largest + 1)
    counts: Tensor = func(x, weights, minlength) if has_values(x) else x.new_zeros(minlength)
    return all_sum(counts, group)


@rule(torch.unique, Tensor.unique, checked=False)
def _unique(
    func: Any,
    x: SpatialTensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """The different values, whole; the numbers of the elements' values among them, split as `x`; their counts."""
    spec, local = x.spec, local_of(x).detach()
    if not has_values(local):
        raise Unsupported(_BY_VALUE)
    if dim is not None:
        return _unique_slices(func, x, dim % x.dim(), return_inverse, return_counts)
    mine, inverse, counts = torch.unique(local, return_inverse=True, return_counts=True)
    values, lengths = _all_of(mine, spec.group)
    if values.isnan().any():  # which differ from each other; whose number is which is torch's choice
        values, inverse, counts = torch.unique(x.full().detach(), return_inverse=True, return_counts=True)
        inverse = sliced(inverse, spec)
    else:
        values, place = torch.unique(values, return_inverse=True)
        first = sum(lengths[: spec.coordinate])
        inverse = place[first : first + len(mine)][inverse]
        counts = values.new_zeros(len(values), dtype=torch.int64).index_add_(0, place, _all_of(counts, spec.group)[0])
    values = _without_gradient(torch.unique, values, x)
    found = [values, wrap(inverse, spec) if return_inverse else None, counts if return_counts else None]
    kept = [part for part in found if part is not None]
    return kept[0] if len(kept) == 1 else tuple(kept)


def _unique_slices(func: Any, x: SpatialTensor, dim: int, return_inverse: bool, return_counts: bool) -> Any:
    """The different slices along a dim, whole; of slices that are split each rank gets some, and all of these."""
    flat: Any = x.detach().movedim(dim, 0).reshape(x.shape[dim], -1)
    spec, group = flat.spec, flat.spec.group
    rows = whole_rows(local_of(flat), spec, 1)
    mine, inverse, counts = _different(rows)
    values, lengths = _all_of(mine, group)
    if values.isnan().any():  # as in `_unique`
        return func(x.full(), return_inverse=return_inverse, return_counts=return_counts, dim=dim)
    values, place, _ = _different(values)
    first = sum(lengths[: spec.coordinate])
    found = [values.unflatten(1, x.movedim(dim, 0).shape[1:]).movedim(0, dim) if x.dim() > 1 else values[:, 0]]
    found[0] = _without_gradient(torch.unique, found[0], x)
    if return_inverse:
        numbers = everywhere(place[first : first + len(mine)][inverse], spec, 1)
        found.append(wrap(numbers, spec.with_(spec.shape[:1], spec.cuts(0))))
    if return_counts:
        every = _all_of(counts, group)[0]
        found.append(every.new_zeros(len(values)).index_add_(0, place, every))
    return found[0] if len(found) == 1 else tuple(found)


def _different(rows: Tensor) -> Any:
    """The different rows of (m, n), the number of each row's among them, and their counts."""
    if len(rows):
        return torch.unique(rows, return_inverse=True, return_counts=True, dim=0)
    return rows, rows.new_zeros(0, dtype=torch.int64), rows.new_zeros(0, dtype=torch.int64)


@rule(torch.unique_consecutive, Tensor.unique_consecutive, checked=False)
def _unique_consecutive(
    func: Any, x: SpatialTensor, return_inverse: bool = False, return_counts: bool = False, dim: int | None = None
) -> Any:
    """The first of each run of equal neighbours in the order of the whole tensor, whole; also as in `torch.unique`."""
    if dim is not None:
        raise Unsupported("it compares whole slices of a tensor")
    if not has_values(local_of(x)):
        raise Unsupported(_BY_VALUE)
    flat: Any = x.detach().flatten()
    local, spec = in_runs(local_of(flat), flat.spec, 0)
    if not spec.placements:
        return func(x.full(), return_inverse, return_counts)
    group, (placement,) = spec.group, spec.placements
    part, start = spec.spatial.axis(placement.axis).coordinate, spec.rows(placement).start
    before = all_gather_no_grad(local[-1:], group)[part - 1]  # each rank has one at least
    starts = torch.cat([local[:1] != before if part else local[:1] == local[:1], local[1:] != local[:-1]])
    starts[0] |= part == 0
    values, lengths = _all_of(local[starts], group)
    found = [_without_gradient(func, values, x)]
    if return_inverse:
        inverse: Any = wrap(starts.cumsum(0) + (sum(lengths[:part]) - 1), spec)
        found.append(inverse.reshape(x.shape))
    if return_counts:
        places = _all_of(starts.nonzero()[:, 0] + start, group)[0]
        found.append(torch.diff(places, append=places.new_tensor([spec.shape[0]])))
    return found[0] if len(found) == 1 else tuple(found)


def _all_of(mine: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, list[int]]:
    """The (n, ...) values of all ranks, of any number each, one after another, and how many each has."""
    lengths = all_gather_no_grad(torch.tensor(len(mine), device=device_of_facts(group, mine.device)), group).tolist()
    padded = mine.new_zeros(max(lengths), *mine.shape[1:])
    padded[: len(mine)] = mine
    everyone = all_gather_no_grad(padded, group)
    return torch.cat([one[:n] for one, n in zip(everyone, lengths, strict=True)]), lengths


def _without_gradient(func: Any, values: Tensor, x: SpatialTensor) -> Tensor:
    """`values` with torch's refusal to differentiate them, where `x` requires a gradient."""
    local = local_of(x)
    if not (local.requires_grad and torch.is_grad_enabled()):
        return values
    return values + func(local.flatten()[:0]).sum()  # type: ignore[no-any-return]
