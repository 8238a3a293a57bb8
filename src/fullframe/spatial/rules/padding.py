"""F.pad, every mode: only the ranks at the edge of the image pad; reflected and circular rows are fetched."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.geometry.window import Slice
from fullframe.ranks.exchange import joined
from fullframe.spatial.rules.indexing import sliced_rows
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.rules.window_plan import plan_windows, region
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


@rule(F.pad)
def _pad(func: Any, x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Constant, reflected, replicated or circular rows around the last dims; negative padding crops."""
    count = x.dim()
    for number in range(len(pad) // 2):
        dim, before, after = count - 1 - number, int(pad[2 * number]), int(pad[2 * number + 1])
        if before == 0 and after == 0:
            continue
        if mode == "constant":
            x = _constant(x, dim, before, after, value or 0.0)
        else:
            x = _copied(x, dim, before, after, mode)
    return x


def _constant(x: Tensor, dim: int, before: int, after: int, value: float) -> Tensor:
    whole_dims = (0, 0) * (x.dim() - dim - 1)
    if not isinstance(x, SpatialTensor):
        return F.pad(x, (*whole_dims, before, after), value=value)
    spec = x.spec
    size = spec.shape[dim] + before + after
    goal = spec.resized(dim, size)
    if not spec.is_split(dim):
        local = F.pad(local_of(x), (*whole_dims, before, after), value=value)
        return wrap(local, goal)
    plan = plan_windows(spec, [dim], [Slice(-before)], [size], goal.shape)
    return wrap(region(local_of(x), plan, value), plan.spec)


def _copied(x: Tensor, dim: int, before: int, after: int, mode: str) -> Tensor:
    """Padding made of the tensor's own rows; negative padding crops.

    As torch does it: reflected and replicated rows are those of the whole tensor, circular ones of the cropped.
    """
    if isinstance(x, SpatialTensor) and mode != "circular" and min(before, after) >= 0:
        padded = _at_the_edges(x, dim, before, after, mode)
        if padded is not None:
            return padded
    size = x.shape[dim]
    middle = sliced_rows(x, dim, max(0, -before), size - max(0, -after))
    source = middle if mode == "circular" else x
    before, after = max(0, before), max(0, after)
    parts = [middle]
    if before:
        parts.insert(0, _edge(source, dim, before, mode, first=True))
    if after:
        parts.append(_edge(source, dim, after, mode, first=False))
    return joined(parts, dim) if len(parts) > 1 else middle


def _at_the_edges(x: SpatialTensor, dim: int, before: int, after: int, mode: str) -> Tensor | None:
    """Padded by the first and the last rank out of their own rows; None where those are too few."""
    spec = x.spec
    placement = spec.of(dim)
    if placement is None:
        return None
    sizes, part = placement.extents.sizes, spec.spatial.axis(placement.axis).coordinate
    if mode == "reflect" and not (sizes[0] > before and sizes[-1] > after):
        return None
    mine = (before if part == 0 else 0, after if part == len(sizes) - 1 else 0)
    spatial = max(x.dim() - 2, x.dim() - dim)  # torch wants the padding of every dim of the image
    pad = [0] * (2 * spatial)
    pad[2 * (x.dim() - 1 - dim) : 2 * (x.dim() - dim)] = mine
    local = F.pad(local_of(x), pad, mode)  # also by nothing: recompute needs the same graph on every rank
    *inner, last = (b + before for b in placement.extents.bounds[1:])
    extents = Extents((0, *inner, last + after))
    return wrap(local, spec.resized(dim, extents.size, extents))


def _edge(x: Tensor, dim: int, rows: int, mode: str, first: bool) -> Tensor:
    size = x.shape[dim]
    starts = {"reflect": (1, size - 1 - rows), "circular": (size - rows, 0), "replicate": (0, size - 1)}
    start = starts[mode][0 if first else 1]
    edge = sliced_rows(x, dim, start, start + (1 if mode == "replicate" else rows))
    if mode == "replicate":
        return edge.expand([*edge.shape[:dim], rows, *edge.shape[dim + 1 :]])
    return edge.flip(dim) if mode == "reflect" else edge
