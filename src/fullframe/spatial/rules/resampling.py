"""Interpolation: whole multiples are interpolated where they lie; any other map is a few weighted row gathers.

The weights are torch's own: the function is applied to the rows of an identity matrix.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.geometry.window import proportional_extents
from fullframe.spatial.exchange import sum_over_ranks
from fullframe.spatial.rules.registry import Refused, rule
from fullframe.spatial.rules.windowed import nonempty
from fullframe.spatial.tensor import SpatialTensor, local_of, refetched, wrap

_FLAT = {"linear": "bilinear", "trilinear": "bilinear"}  # one dim at a time, as the last of an image
_REACH = {"nearest": 0, "nearest-exact": 0, "linear": 1, "bilinear": 1, "trilinear": 1, "bicubic": 2}
_FEW_TAPS = 8
_IDENTITY_ROWS = 256


class Taps(NamedTuple):
    """Output row `o` is the sum over `k` of `weights[o, k]` times input row `first[o] + k`."""

    first: Tensor  # (size_out,) int64
    weights: Tensor  # (size_out, taps)

    def reads(self, out: range, size: int) -> range:
        """Input rows needed for output rows `out`."""
        start = int(self.first[out.start : out.stop].min())
        last = int(self.first[out.start : out.stop].max()) + self.weights.shape[1]
        return range(start, min(last, size))


@lru_cache(maxsize=256)
@torch.inference_mode(False)  # what is kept from an evaluation serves in training too
def taps(size: int, size_out: int, mode: str, align_corners: bool | None, scale: float | None, antialias: bool,
         dtype: torch.dtype) -> Taps:  # fmt: skip
    """What `F.interpolate` does along one dim, read off its own result on an identity matrix."""
    options: dict[str, Any] = {"mode": _FLAT.get(mode, mode), "align_corners": align_corners, "antialias": antialias}
    options |= {"size": (1, size_out)} if scale is None else {"scale_factor": (1.0, scale)}
    rows, columns, weights = [], [], []
    for start in range(0, size, _IDENTITY_ROWS):
        height = min(_IDENTITY_ROWS, size - start)
        block = torch.zeros(height, 1, 1, size, dtype=dtype)
        block[torch.arange(height), 0, 0, torch.arange(start, start + height)] = 1
        answer = F.interpolate(block, **options)[:, 0, 0]  # (height, size_out)
        row, column = answer.nonzero(as_tuple=True)
        rows.append(row + start)
        columns.append(column)
        weights.append(answer[row, column])
    source, target, weight = torch.cat(rows), torch.cat(columns), torch.cat(weights)
    first = torch.full((size_out,), size).scatter_reduce(0, target, source, "amin")
    last = torch.zeros(size_out, dtype=torch.int64).scatter_reduce(0, target, source, "amax")
    table = torch.zeros(size_out, int((last - first).max()) + 1, dtype=dtype)
    table[target, source - first[target]] = weight
    return Taps(first, table)


def resampled(x: Tensor, dim: int, taps: Taps) -> Tensor:
    """A split dim of `x` resampled by `taps`; with too few output rows for the ranks, whole on each of them."""
    if not isinstance(x, SpatialTensor) or not x._layout.is_split(dim):
        raise Refused(f"dim {dim} is not split")
    layout, placement = x._layout, x._layout.of(dim)
    assert placement is not None
    extents, axis = placement.extents, layout.spatial.axis(placement.axis)
    size_out = len(taps.first)
    shape = (*layout.shape[:dim], size_out, *layout.shape[dim + 1 :])
    out = nonempty(proportional_extents(extents, size_out))
    if out is None:
        own = extents.ranges[axis.part]
        mine = _dense(taps, range(size_out), own, local_of(x))
        partial = (local_of(x).movedim(dim, -1) @ mine.T).movedim(-1, dim)
        rest = tuple(p for p in layout.placements if p is not placement)
        return wrap(sum_over_ranks(partial, axis.group), layout.with_(shape, rest))
    wanted = tuple(taps.reads(rows, extents.size) for rows in out.ranges)
    local = refetched(local_of(x), layout, placement, layout.placements, wanted)
    placements = tuple(type(p)(p.axis, dim, out) if p is placement else p for p in layout.placements)
    result = _weighted(local, dim, taps, out.ranges[axis.part], wanted[axis.part])
    return wrap(result, layout.with_(shape, placements))


def _weighted(local: Tensor, dim: int, taps: Taps, out: range, held: range) -> Tensor:
    count = taps.weights.shape[1]
    if count > _FEW_TAPS:
        return (local.movedim(dim, -1) @ _dense(taps, out, held, local).T).movedim(-1, dim)
    first = (taps.first[out.start : out.stop] - held.start).to(local.device)
    weights = taps.weights[out.start : out.stop].to(local.device)
    if count == 1 and bool((taps.weights == 1).all()):
        return local.index_select(dim, first)
    view = [1] * local.dim()
    view[dim] = len(out)
    result = None
    for tap in range(count):
        rows = local.index_select(dim, (first + tap).clamp(max=len(held) - 1))
        term = rows * weights[:, tap].to(local.dtype).view(view)
        result = term if result is None else result + term
    assert result is not None
    return result


def _dense(taps: Taps, out: range, held: range, like: Tensor) -> Tensor:
    """The weights of output rows `out` on input rows `held`, as a matrix."""
    count = taps.weights.shape[1]
    matrix = torch.zeros(len(out), len(held), dtype=taps.weights.dtype)
    columns = taps.first[out.start : out.stop, None] + torch.arange(count) - held.start
    weights = taps.weights[out.start : out.stop]
    keep = (columns >= 0) & (columns < len(held)) & (weights != 0)
    matrix[torch.arange(len(out))[:, None].expand_as(columns)[keep], columns[keep]] = weights[keep]
    return matrix.to(device=like.device, dtype=like.dtype)


@rule(F.interpolate, F.upsample, F.upsample_bilinear, F.upsample_nearest)
def _interpolate(
    func: Any,
    input: SpatialTensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tensor:
    if func is F.upsample_bilinear:
        mode, align_corners = "bilinear", True
    count = input.dim() - 2
    dims = range(2, input.dim())
    before = [input.shape[dim] for dim in dims]
    scales: Sequence[float | None] = [None] * count
    if size is not None:
        after = [int(s) for s in ([size] * count if isinstance(size, int) else size)]
    else:
        factors = [scale_factor] * count if isinstance(scale_factor, (int, float)) else list(scale_factor)
        after = [int(n * float(f)) for n, f in zip(before, factors, strict=True)]
        if not recompute_scale_factor:
            scales = [float(f) for f in factors]
    split = {dim: n for n, dim in enumerate(dims) if input._layout.is_split(dim)}
    in_place = {
        dim: after[n] // before[n]
        for dim, n in split.items()
        if _is_multiple(before[n], after[n], scales[n], mode, align_corners, antialias)
    }
    result: Tensor = input
    dtype = torch.float64 if input.dtype == torch.float64 else torch.float32
    for dim, n in split.items():
        if dim not in in_place and (after[n] != before[n] or scales[n] not in (None, 1.0)):
            result = resampled(result, dim, taps(before[n], after[n], mode, align_corners, scales[n], antialias, dtype))
    targets = [before[n] if dim in in_place else result.shape[dim] if dim in split else after[n]
               for n, dim in enumerate(dims)]  # fmt: skip
    options = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
    return _where_it_lies(result, dims, in_place, targets, [None if d in split else scales[n] for n, d in
                                                            enumerate(dims)], options)  # fmt: skip


def _is_multiple(
    size: int, size_out: int, scale: float | None, mode: str, align_corners: bool | None, antialias: bool
) -> bool:
    """Whether each input row becomes the same whole number of output rows, wherever it lies."""
    whole = size_out % size == 0 and (scale is None or scale == size_out // size)
    return whole and size_out > size and mode in _REACH and not align_corners and not antialias


def _where_it_lies(
    x: Tensor, dims: range, factors: dict[int, int], sizes: list[int], scales: list[float | None], options: Any
) -> Tensor:
    """One local call: split dims in `factors` grow by a whole number, other split dims stay, whole dims to `sizes`."""
    if not isinstance(x, SpatialTensor):
        final = [size * factors.get(dim, 1) for dim, size in zip(dims, sizes, strict=True)]
        return F.interpolate(x, size=final, **options)
    local, layout = local_of(x), x._layout
    reach, trims, placements = _REACH.get(options["mode"], 0), [], []
    shape, local_sizes = list(layout.shape), []
    for p in layout.placements:
        factor = factors.get(p.dim)
        if factor is None:
            placements.append(p)
            continue
        extents = p.extents
        wanted = tuple(extents.clipped(range(r.start - reach, r.stop + reach)) for r in extents.ranges)
        local = refetched(local, layout, p, layout.placements, wanted)
        part = layout.spatial.axis(p.axis).part
        own = extents.ranges[part]
        trims.append((p.dim, (own.start - wanted[part].start) * factor, len(own) * factor))
        placements.append(type(p)(p.axis, p.dim, Extents(tuple(b * factor for b in extents.bounds))))
    for dim, size in zip(dims, sizes, strict=True):
        local_sizes.append(local.shape[dim] * factors.get(dim, 1) if layout.is_split(dim) else size)
        shape[dim] = size * factors.get(dim, 1)
    if local_sizes != list(local.shape[2:]) or any(s not in (None, 1.0) for s in scales):
        local = _interpolated(local, local_sizes, scales, options)
    for dim, start, rows in trims:
        local = local.narrow(dim, start, rows)
    return wrap(local, layout.with_(shape, tuple(placements)))


def _interpolated(local: Tensor, sizes: list[int], scales: list[float | None], options: Any) -> Tensor:
    if all(scale is None for scale in scales):
        return F.interpolate(local, size=sizes, **options)
    factors = [s if s is not None else m / n for s, n, m in zip(scales, local.shape[2:], sizes, strict=True)]
    return F.interpolate(local, scale_factor=factors, **options)
