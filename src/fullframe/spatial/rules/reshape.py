"""View, flatten, permute: split factors are moved or merged, no message is sent."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import coarsened, grain, local_shape, permuted, reshaped
from fullframe.spatial.rules.registry import Refused, getter, rule
from fullframe.spatial.rules.window_plan import nonempty
from fullframe.spatial.tensor import Layout, SpatialTensor, aligned, gather_axes, local_of, resplit, viewed, wrap


def _at_multiples(local: Tensor, layout: Layout, shape: Sequence[int]) -> tuple[Tensor, Layout]:
    """The tensor with boundaries moved to where `shape` cuts a split dim (into windows, say), by one fetch."""
    for p in layout.placements:
        rows = grain(p, layout.shape, shape)
        if rows == 0:
            raise Refused(f"the shape {tuple(shape)} would cut a split dim in pieces")
        if rows > 1:
            natural = Extents(tuple((b + rows // 2) // rows for b in p.extents.bounds))
            coarse = nonempty(natural)
            if coarse is None:
                local, layout = gather_axes(local, layout, [p.axis])
                continue
            local, layout = resplit(local, layout, p.axis, Extents(tuple(b * rows for b in coarse.bounds)))
            moved = tuple(coarsened(q, rows) if q.axis == p.axis else q for q in layout.placements)
            layout = layout.with_(layout.shape, moved)
    return local, layout


def _sizes(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else tuple(args)


def _reshaped(func: Any, x: SpatialTensor, shape: Sequence[int]) -> Tensor:
    layout = x._layout
    shape = list(shape)
    if -1 in shape:
        shape[shape.index(-1)] = math.prod(layout.shape) // max(math.prod(s for s in shape if s != -1), 1)
    local, result = _reshaped_local(local_of(x), layout, shape)

    def put(view: SpatialTensor) -> None:
        local_of(x).copy_(aligned(_reshaped(Tensor.reshape, view, layout.shape), layout))

    return viewed(x, local, result, lambda base: _reshaped_local(local_of(base), base._layout, shape)[0], put)


def _reshaped_local(local: Tensor, layout: Layout, shape: Sequence[int]) -> tuple[Tensor, Layout]:
    local, layout = _at_multiples(local, layout, shape)
    placements = reshaped(layout.placements, layout.shape, shape)
    if placements is None:
        raise Refused(f"the shape {tuple(shape)} would cut a split dim in pieces")
    result = layout.with_(shape, placements)
    coordinates = [layout.spatial.axis(p.axis).part for p in placements]
    # A part cut from a larger tensor may need a copy where the whole would not.
    return local.reshape(local_shape(shape, placements, coordinates)), result


@rule(Tensor.view, Tensor.reshape, torch.reshape)
def _view(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    if "dtype" in kwargs or (args and isinstance(args[0], torch.dtype)):
        raise Refused("a view of another dtype is not split")
    return _reshaped(func, x, _sizes(args) if args else kwargs["shape" if "shape" in kwargs else "size"])


@rule(Tensor.view_as, Tensor.reshape_as)
def _view_as(func: Any, x: Tensor, other: Tensor) -> Tensor:
    if not isinstance(x, SpatialTensor):  # whole, as is its view
        return (x.view if func is Tensor.view_as else x.reshape)(tuple(other.shape))
    return _reshaped(Tensor.view if func is Tensor.view_as else Tensor.reshape, x, tuple(other.shape))


@rule(torch.flatten, Tensor.flatten)
def _flatten(func: Any, x: SpatialTensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    shape, count = x._layout.shape, len(x._layout.shape)
    start, end = start_dim % count, end_dim % count
    return _reshaped(func, x, (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


@rule(torch.ravel, Tensor.ravel)
def _ravel(func: Any, x: SpatialTensor) -> Tensor:
    return _reshaped(func, x, (-1,))


@rule(torch.unflatten, Tensor.unflatten)
def _unflatten(func: Any, x: SpatialTensor, dim: int, sizes: Sequence[int]) -> Tensor:
    shape = x._layout.shape
    dim %= len(shape)
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // math.prod(s for s in sizes if s != -1)
    return _reshaped(func, x, (*shape[:dim], *sizes, *shape[dim + 1 :]))


def _permuted(x: SpatialTensor, order: Sequence[int]) -> Tensor:
    layout = x._layout
    order = [d % len(layout.shape) for d in order]
    result = layout.with_([layout.shape[d] for d in order], permuted(layout.placements, order))
    return wrap(local_of(x).permute(order), result)


@rule(torch.permute, Tensor.permute)
def _permute(func: Any, x: SpatialTensor, *dims: Any, **kwargs: Any) -> Tensor:
    return _permuted(x, _sizes(dims) if dims else kwargs["dims"])


@rule(torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes, torch.swapdims, Tensor.swapdims)
def _transpose(func: Any, x: SpatialTensor, dim0: int, dim1: int) -> Tensor:
    order = list(range(x.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(x, order)


@rule(torch.movedim, Tensor.movedim, torch.moveaxis, Tensor.moveaxis)
def _movedim(func: Any, x: SpatialTensor, source: Any, destination: Any) -> Tensor:
    count = x.dim()
    sources = [d % count for d in ((source,) if isinstance(source, int) else source)]
    targets = [d % count for d in ((destination,) if isinstance(destination, int) else destination)]
    rest = iter([d for d in range(count) if d not in sources])
    placed = dict(zip(targets, sources, strict=True))
    return _permuted(x, [placed[d] if d in placed else next(rest) for d in range(count)])


@rule(getter("T"), getter("mT"), torch.t, Tensor.t)
def _t(func: Any, x: SpatialTensor) -> Tensor:
    order = list(range(x.dim()))
    last_two = func == getter("mT")
    return _permuted(x, [*order[:-2], *order[-2:][::-1]] if last_two else order[::-1])


@rule(torch.squeeze, Tensor.squeeze)
def _squeeze(func: Any, x: SpatialTensor, dim: Any = None) -> Tensor:
    shape = x._layout.shape
    dims = range(len(shape)) if dim is None else [d % len(shape) for d in ((dim,) if isinstance(dim, int) else dim)]
    return _reshaped(func, x, [size for d, size in enumerate(shape) if d not in dims or size != 1])


@rule(torch.unsqueeze, Tensor.unsqueeze)
def _unsqueeze(func: Any, x: SpatialTensor, dim: int) -> Tensor:
    shape = list(x._layout.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return _reshaped(func, x, shape)


@rule(Tensor.expand, torch.broadcast_to, Tensor.broadcast_to, Tensor.expand_as)
def _expand(func: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
    args = args or tuple(named[name] for name in ("size", "other") if name in named)
    if not isinstance(x, SpatialTensor):  # a whole tensor, expanded as a split one is: a view, whole as well
        return x.expand(args[0].shape)
    shape = args[0].shape if isinstance(args[0], Tensor) else _sizes(args)
    old = x._layout.shape
    extra = len(shape) - len(old)
    sizes = [s if s != -1 else old[d - extra] for d, s in enumerate(shape)]
    placements = tuple(p.at(p.dim + extra) for p in x._layout.placements)
    coordinates = [x._layout.spatial.axis(p.axis).part for p in placements]
    return wrap(local_of(x).expand(local_shape(sizes, placements, coordinates)), x._layout.with_(sizes, placements))


@rule(Tensor.repeat, torch.tile, Tensor.tile)
def _repeat(func: Any, x: SpatialTensor, *args: Any, **named: Any) -> Tensor:
    layout: Layout = x._layout
    repeats = list(_sizes(args or tuple(named.values())))
    if func is not Tensor.repeat:
        repeats = [1] * (len(layout.shape) - len(repeats)) + repeats
    extra = len(repeats) - len(layout.shape)
    if any(repeats[p.dim + extra] != 1 for p in layout.placements):
        raise Refused(f"it repeats a split dim (repeats {tuple(repeats)})", "Concatenate the copies with torch.cat.")
    shape = [r * s for r, s in zip(repeats, (1,) * extra + layout.shape, strict=True)]
    result = layout.with_(shape, tuple(p.at(p.dim + extra) for p in layout.placements))
    return wrap(local_of(x).repeat(repeats), result)


@rule(torch.pixel_shuffle)
def _pixel_shuffle(func: Any, x: SpatialTensor, upscale_factor: int) -> Tensor:
    *lead, channels, height, width = x._layout.shape
    r = upscale_factor
    if channels % (r * r):
        raise RuntimeError(f"pixel_shuffle by {r} needs a multiple of {r * r} channels, got {channels}")
    n = len(lead)
    split = x.reshape(*lead, channels // (r * r), r, r, height, width)
    woven = split.permute(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return woven.reshape(*lead, channels // (r * r), height * r, width * r)


@rule(torch.pixel_unshuffle)
def _pixel_unshuffle(func: Any, x: SpatialTensor, downscale_factor: int) -> Tensor:
    *lead, channels, height, width = x._layout.shape
    r = downscale_factor
    if height % r or width % r:
        raise RuntimeError(f"pixel_unshuffle by {r} needs sizes divisible by {r}, got {height} x {width}")
    n = len(lead)
    split = x.reshape(*lead, channels, height // r, r, width // r, r)
    woven = split.permute(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return woven.reshape(*lead, channels * r * r, height // r, width // r)


@rule(torch.channel_shuffle, F.native_channel_shuffle)
def _channel_shuffle(func: Any, x: SpatialTensor, groups: int) -> Tensor:
    samples, channels, *rest = x._layout.shape
    return x.reshape(samples, groups, channels // groups, *rest).transpose(1, 2).reshape(samples, channels, *rest)


@rule(torch.repeat_interleave, Tensor.repeat_interleave)
def _repeat_interleave(
    func: Any, x: SpatialTensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    if not isinstance(repeats, int) or dim is None:
        raise Refused("it repeats by a tensor, or over the flattened tensor", "Give a number and a dim.")
    dim %= x.dim()
    shape = list(x._layout.shape)
    wide = x.unsqueeze(dim + 1).expand(*shape[: dim + 1], repeats, *shape[dim + 1 :])
    return wide.reshape(*shape[:dim], shape[dim] * repeats, *shape[dim + 1 :])


@rule(torch.adjoint, Tensor.adjoint, getter("H"), getter("mH"))
def _adjoint(func: Any, x: SpatialTensor) -> Tensor:
    turned = x.transpose(-2, -1)
    return turned.conj() if turned.is_complex() else turned
