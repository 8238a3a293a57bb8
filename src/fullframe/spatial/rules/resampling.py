"""Interpolation: even multiples are interpolated where they lie; any other map is a few weighted row gathers.

Which rows torch reads, and with what weights, is read off torch's own results. Rows of weight zero that it reads count:
an infinity there gives NaN.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement
from fullframe.geometry.window import proportional_extents
from fullframe.ranks.collectives import all_sum
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.mesh import kept_with_mesh
from fullframe.spatial.halo import Cut
from fullframe.spatial.operands import say_gathered
from fullframe.spatial.redistribute import refetched, sliced
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.rules.taps import Taps, repeats, taps_of, weighted, weights_dtype
from fullframe.spatial.rules.upsampling import Upsampling, upsampled
from fullframe.spatial.rules.window_plan import nonempty
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, local_or_whole, on_local, wrap

_NEAREST = ("nearest", "nearest-exact")
_REACH = {"bicubic": 2, "nearest": 0, "nearest-exact": 0}  # input rows beyond its own that an output row may read; or 1


class _Request(NamedTuple):
    """What `F.interpolate` is asked for, one entry a spatial dim."""

    before: list[int]
    after: list[int]
    scales: list[float | None]  # torch uses the scale it was given, and the quotient of the sizes otherwise
    options: dict[str, Any]  # mode, align_corners, antialias


def resampled(x: Tensor, dim: int, taps: Taps) -> Tensor:
    """A dim of `x` resampled by `taps`; with too few output rows for the ranks, whole on each of them.

    16-bit numbers come back as float32, as torch adds them up, for the caller to round once.
    """
    if not isinstance(x, SpatialTensor):
        return weighted(x, dim, taps, range(taps.size_out), 0)
    spec, local, placement = x.spec, local_of(x), x.spec.of(dim)
    size_out = taps.size_out
    if placement is None:
        return wrap(weighted(local, dim, taps, range(size_out), 0), spec.resized(dim, size_out))
    extents, axis = placement.extents, spec.spatial.axis(placement.axis)
    out = nonempty(proportional_extents(extents, size_out))
    if out is None:
        partial = taps.share(local, dim, extents.ranges[axis.coordinate])
        return wrap(all_sum(partial, axis.group), spec.whole_along([axis.name]).resized(dim, size_out))
    wanted = tuple(taps.reads(rows) for rows in out.ranges)
    local = refetched(local, spec, placement, wanted)
    result = weighted(local, dim, taps, out.ranges[axis.coordinate], wanted[axis.coordinate].start)
    return wrap(result, spec.resized(dim, size_out, out))


def in_format(x: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`, its local part in the memory format of the local part of `like`."""
    kept = memory_format_of(local_or_whole(like))
    return on_local(x, lambda t: t.to(dtype).contiguous(memory_format=kept))


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
    """(N, C, ...) resized as torch does it, any mode; what torch's kernel alone can do is gathered, with a warning."""
    if func is F.upsample_bilinear:
        mode, align_corners = "bilinear", True
    input.spec.require_plain(range(2, input.dim()))
    options: dict[str, Any] = {"mode": mode, "align_corners": align_corners, "antialias": antialias}
    request = _request(input, size, scale_factor, recompute_scale_factor, options)
    if mode == "area":
        pools: list[Any] = [F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d]
        return pools[input.dim() - 3](input, request.after)  # type: ignore[no-any-return]
    if 0 in input.shape or _is_torchs_alone(input, request):
        return _gathered(input, request)
    factors = _in_place(input, request)
    return _where_it_lies(input, request, factors) if factors is not None else _by_taps(input, request)


def _request(x: Tensor, size: Any, scale_factor: Any, recompute: bool | None, options: dict[str, Any]) -> _Request:
    before = list(x.shape[2:])
    if size is not None:
        after = [int(s) for s in ([size] * len(before) if isinstance(size, int) else size)]
        return _Request(before, after, [None] * len(before), options)
    factors = [scale_factor] * len(before) if isinstance(scale_factor, (int, float)) else list(scale_factor)
    after = [int(n * float(f)) for n, f in zip(before, factors, strict=True)]
    return _Request(before, after, [None if recompute else float(f) for f in factors], options)


def _is_torchs_alone(x: Tensor, request: _Request) -> bool:
    """Whether torch's kernel does something of its own: 8-bit arithmetic; wrong numbers (antialias at width 1)."""
    if x.dtype == torch.uint8:
        return request.options["mode"] not in _NEAREST
    return bool(request.options["antialias"]) and 1 in (request.before[-1], request.after[-1])


def _torchs(x: Tensor, request: _Request) -> Tensor:
    """Torch's own interpolation of a whole or local tensor."""
    if all(scale is None for scale in request.scales):
        return F.interpolate(x, size=request.after, **request.options)
    shape = zip(request.scales, request.before, request.after, strict=True)
    return F.interpolate(x, scale_factor=[s if s is not None else m / n for s, n, m in shape], **request.options)


def _gathered(x: SpatialTensor, request: _Request) -> Tensor:
    """Made whole for a moment, and cut again where there are rows for all ranks."""
    say_gathered("interpolate", "torch's own kernel for this is not made of rows that could be computed apart", x)
    spec = x.spec
    for dim, size in enumerate(request.after, start=2):
        placement = spec.of(dim)
        out = None if placement is None else nonempty(proportional_extents(placement.extents, size))
        if placement is not None and out is None:
            spec = spec.whole_along([placement.axis])
        spec = spec.resized(dim, size, out)
    return in_format(wrap(sliced(_torchs(x.full(), request), spec), spec), x, x.dtype)


def _by_taps(x: SpatialTensor, request: _Request) -> Tensor:
    """Dim by dim, whole dims too: torch's kernel would touch the other dims, where infinity times zero is NaN."""
    options = request.options
    kind = weights_dtype(x)
    result: Tensor = x
    growth = [m / n for n, m in zip(request.before, request.after, strict=True)]
    for n in sorted(range(x.dim() - 2), key=lambda n: (growth[n], -n)):  # gathers are slowest along the last dim
        taps = taps_of(request.before[n], request.after[n], options["mode"], options["align_corners"],
                       request.scales[n], options["antialias"], kind, x.dim() - 2)  # fmt: skip
        if not taps.copies_all:
            result = resampled(result, n + 2, taps)
    return in_format(result, x, x.dtype)


def _in_place(x: SpatialTensor, request: _Request) -> dict[int, int] | None:
    """For each split dim, how many output rows each input row becomes; None where that is no whole number.

    Odd multiples have output rows in the middle of an input row, where rounding decides whether a neighbour is read.
    """
    factors = {}
    mode, corners = request.options["mode"], request.options["align_corners"]
    for dim, (n, m, scale) in enumerate(zip(request.before, request.after, request.scales, strict=True), start=2):
        if not x.spec.is_split(dim):
            continue
        factor = m // n
        if m % n or scale not in (None, factor) or request.options["antialias"]:
            return None
        if mode in _NEAREST:
            kind = weights_dtype(x)
            if not repeats(n, m, mode, scale, kind, x.dim() - 2):
                return None
        elif factor > 1 and (factor % 2 or corners):
            return None
        factors[dim] = factor
    return factors


def _where_it_lies(x: SpatialTensor, request: _Request, factors: dict[int, int]) -> Tensor:
    """One local call: each split dim grows by its whole number."""
    local, spec, mode = local_of(x), x.spec, request.options["mode"]
    steps, result = _growing(spec, tuple(request.after), _REACH.get(mode, 1), tuple(factors.items()))
    if len(steps) == 1 and steps[0].factor > 1:
        others = tuple(None if n + 2 in factors else scale for n, scale in enumerate(request.scales))
        how = Upsampling(mode, steps[0].cut, steps[0].factor, tuple(request.after), others)
        if how.is_quicker(local):
            return in_format(wrap(upsampled(local, how), result), x, x.dtype)
    for step in steps:
        local = refetched(local, spec, step.placement, step.cut.wanted)
    split = [n for n in range(x.dim() - 2) if n + 2 in factors]
    here = list(local.shape[2:])
    after = [here[n] * factors[n + 2] if n in split else request.after[n] for n in range(len(here))]
    scales = [None if n in split else request.scales[n] for n in range(len(here))]
    local = _torchs(local, _Request(here, after, scales, request.options))
    for step in steps:
        dim, start, rows = step.trim
        local = local if rows == local.shape[dim] else local.narrow(dim, start, rows)
    return in_format(wrap(local, result), x, x.dtype)


class _Growth(NamedTuple):
    """A split dim that grows by a whole number `factor`; (dim, start, rows) are kept of what the `cut`'s rows give."""

    placement: Placement
    cut: Cut
    factor: int
    trim: tuple[int, int, int]


@kept_with_mesh(maxsize=1024)
def _growing(
    spec: Spec, after: tuple[int, ...], reach: int, by: tuple[tuple[int, int], ...]
) -> tuple[tuple[_Growth, ...], Spec]:
    """How each split dim grows, `by` (dim, factor), and the spec of the result, of sizes `after`."""
    steps, placements, factors = [], [], dict(by)
    for p in spec.placements:
        factor = factors.get(p.dim)
        if factor is None:
            placements.append(p)
            continue
        extents = p.extents
        here = reach if factor > 1 or reach == 2 else 0
        wanted = tuple(extents.clipped(range(r.start - here, r.stop + here)) for r in extents.ranges)
        cut = Cut(p.dim, extents, wanted, spec.spatial.axis(p.axis))
        trim = p.dim, (cut.own.start - cut.rows.start) * factor, len(cut.own) * factor
        steps.append(_Growth(p, cut, factor, trim))
        placements.append(p.recut(Extents(tuple(b * factor for b in extents.bounds))))
    return tuple(steps), spec.with_((*spec.shape[:2], *after), tuple(placements))
