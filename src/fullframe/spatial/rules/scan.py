"""Running sums and differences of neighbours, along a split dim too."""

from typing import Any

import torch
from torch import Tensor

from fullframe.ranks.collectives import all_gather
from fullframe.spatial.rules.reduction import wide
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


@rule(torch.cumsum, Tensor.cumsum)
def _cumsum(func: Any, x: SpatialTensor, dim: int, *, dtype: Any = None) -> Tensor:
    """Each rank sums up its rows, then adds the totals of the ranks before it."""
    spec = x.spec
    placement = spec.of(dim)
    if placement is None:
        return wrap(func(local_of(x), dim, dtype=dtype), spec)
    if dtype is None:
        dtype = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
    axis = spec.spatial.axis(placement.axis)
    local = func(local_of(x).to(wide(dtype)), dim, dtype=wide(dtype))  # so that its backward adds up as widely
    totals = all_gather(local.narrow(dim, local.shape[dim] - 1, 1), axis.group)
    # The first rank adds up none, and so takes part in backward.
    before = totals[: axis.coordinate].sum(0, dtype=local.dtype)
    return wrap((local + before).to(dtype), spec)


@rule(torch.diff, Tensor.diff)
def _diff(func: Any, x: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    """Differences of neighbouring rows, `n` times over; refuses `prepend` and `append`."""
    if prepend is not None or append is not None:
        raise Unsupported("prepend and append are not split", "Concatenate them with torch.cat first.")
    for _ in range(min(n, x.shape[dim])):
        size = x.shape[dim]
        later, earlier = (torch.narrow(x, dim, start, size - 1) for start in (1, 0))
        x = later ^ earlier if x.dtype == torch.bool else later - earlier
    return x
