"""View, flatten, permute: split factors are moved or merged, no message is sent."""

import math
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import coarsened, grain, permuted, reshaped
from fullframe.ranks.mesh import kept_with_mesh
from fullframe.spatial.operands import aligned
from fullframe.spatial.redistribute import gather_axes, in_runs, resplit
from fullframe.spatial.rules.registry import Merged, Unsupported, getter, rule
from fullframe.spatial.rules.window_plan import nonempty
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, viewed, whole, wrap


class _CutInPieces(Exception):
    """A shape cuts a split factor in pieces wherever its boundaries lie."""


def _at_multiples(local: Tensor, spec: Spec, shape: Sequence[int]) -> tuple[Tensor, Spec]:
    """The tensor with boundaries moved to where `shape` cuts a split dim (into windows, say), by one fetch.

    Raises _CutInPieces where no boundaries would do.
    """
    for p in spec.placements:
        rows = grain(p, [size or 1 for size in spec.shape], [size or 1 for size in shape])
        if rows != 1 and p.order is not None:
            raise Merged(spec, p.dim)
        if rows == 0:
            raise _CutInPieces
        if rows > 1:
            natural = Extents(tuple((b + rows // 2) // rows for b in p.extents.bounds))
            coarse = nonempty(natural)
            if coarse is None:
                local, spec = gather_axes(local, spec, [p.axis])
                continue
            local, spec = resplit(local, spec, p.axis, Extents(tuple(b * rows for b in coarse.bounds)))
            moved = tuple(coarsened(q, rows) if q.axis == p.axis else q for q in spec.placements)
            spec = spec.with_(spec.shape, moved)
    return local, spec


def _sizes(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else tuple(args)


def _reshaped(x: SpatialTensor, shape: Sequence[int]) -> Tensor:
    spec = x.spec
    shape = list(shape)
    if -1 in shape:
        shape[shape.index(-1)] = math.prod(spec.shape) // max(math.prod(s for s in shape if s != -1), 1)
    local, result = _reshaped_local(local_of(x), spec, shape)

    def put(view: SpatialTensor) -> None:
        local_of(x).copy_(aligned(_reshaped(view, spec.shape), spec))

    return viewed(x, local, result, lambda base: _reshaped_local(local_of(base), base.spec, shape)[0], put)


def _reshaped_local(local: Tensor, spec: Spec, shape: Sequence[int]) -> tuple[Tensor, Spec]:
    """A shape that no boundaries fit, (H, W) as (W, H), is made of the changed dims as one, cut in runs of rows."""
    if 0 in spec.shape:  # which says nothing of where boundaries go
        local, spec = gather_axes(local, spec, [p.axis for p in spec.placements])
    try:
        return _regrouped(local, spec, shape)
    except _CutInPieces:
        lead, end = _alike(spec.shape, shape), len(spec.shape) - _alike(spec.shape[::-1], shape[::-1])
        flat = (*spec.shape[:lead], math.prod(spec.shape[lead:end]), *spec.shape[end:])
        local, spec = in_runs(*_regrouped(local, spec, flat), lead)
        return _regrouped(local, spec, shape)


def _alike(old: Sequence[int], new: Sequence[int]) -> int:
    """How many dims in front have equal sizes."""
    return next((n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def _regrouped(local: Tensor, spec: Spec, shape: Sequence[int]) -> tuple[Tensor, Spec]:
    """Another shape, each split in the dim that then holds its rows; raises _CutInPieces where no dim does."""
    local, spec = _at_multiples(local, spec, shape)
    # A dim without rows says nothing of where the others go.
    placements = reshaped(spec.placements, [size or 1 for size in spec.shape], [size or 1 for size in shape])
    if placements is None:
        raise _CutInPieces
    result = spec.with_(shape, placements)
    # A part cut from a larger tensor may need a copy where the whole would not.
    return local.reshape(result.local_shape), result


@rule(Tensor.view, Tensor.reshape, torch.reshape)
def _view(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Another shape, or the same memory as another dtype."""
    kind = kwargs.get("dtype", args[0] if args else None)
    if isinstance(kind, torch.dtype):
        return _viewed_as(x, kind)
    return _reshaped(x, _sizes(args) if args else kwargs["shape" if "shape" in kwargs else "size"])


def _viewed_as(x: SpatialTensor, kind: torch.dtype) -> Tensor:
    """The memory read as another dtype: in the last dim an element becomes several, or several become one."""
    spec, local, last = x.spec, local_of(x), x.dim() - 1
    if kind.itemsize == local.dtype.itemsize:
        return wrap(local.view(kind), spec)
    if kind.itemsize < local.dtype.itemsize:
        times = local.dtype.itemsize // kind.itemsize
        placement = spec.of(last)
        extents = None if placement is None else Extents(tuple(b * times for b in placement.extents.bounds))
        return wrap(local.view(kind), spec.resized(last, spec.shape[last] * times, extents))
    group = kind.itemsize // local.dtype.itemsize
    shape = (*spec.shape[:last], spec.shape[last] // group, group)
    local, spec = _reshaped_local(local, spec, shape)
    return wrap(local.contiguous().view(kind).squeeze(-1), spec.with_(shape[:-1], spec.placements))


@rule(Tensor.view_as, Tensor.reshape_as)
def _view_as(func: Any, x: Tensor, other: Tensor) -> Tensor:
    """The shape of another tensor."""
    if not isinstance(x, SpatialTensor):  # whole, as is its view
        return (x.view if func is Tensor.view_as else x.reshape)(tuple(other.shape))
    return _reshaped(x, tuple(other.shape))


@rule(torch.flatten, Tensor.flatten)
def _flatten(func: Any, x: SpatialTensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Dims `start_dim` to `end_dim` as one, which then holds the split factors: (N, C, H, W) to (N, C, H * W)."""
    shape, count = x.spec.shape, len(x.spec.shape)
    start, end = start_dim % count, end_dim % count
    if start == end:  # torch gives no view
        return x
    return _reshaped(x, (*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]))


@rule(torch.ravel, Tensor.ravel)
def _ravel(func: Any, x: SpatialTensor) -> Tensor:
    """All dims as one."""
    return _reshaped(x, (-1,))


@rule(torch.unflatten, Tensor.unflatten)
def _unflatten(func: Any, x: SpatialTensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """One dim as several: (N, C, H * W) to (N, C, H, W)."""
    shape = x.spec.shape
    dim %= len(shape)
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // math.prod(s for s in sizes if s != -1)
    return _reshaped(x, (*shape[:dim], *sizes, *shape[dim + 1 :]))


def _permuted(x: SpatialTensor, order: Sequence[int]) -> Tensor:
    order = tuple(order)
    return wrap(local_of(x).permute(order), _permuted_spec(x.spec, order))


@kept_with_mesh(maxsize=4096)
def _permuted_spec(spec: Spec, order: tuple[int, ...]) -> Spec:
    order = tuple(d % len(spec.shape) for d in order)
    return spec.with_([spec.shape[d] for d in order], permuted(spec.placements, order))


@rule(torch.permute, Tensor.permute)
def _permute(func: Any, x: SpatialTensor, *dims: Any, **kwargs: Any) -> Tensor:
    """Dims in another order, each with its split."""
    return _permuted(x, _sizes(dims) if dims else kwargs["dims"])


@rule(torch.transpose, Tensor.transpose, torch.swapaxes, Tensor.swapaxes, torch.swapdims, Tensor.swapdims)
def _transpose(func: Any, x: SpatialTensor, dim0: int, dim1: int) -> Tensor:
    """Two dims change places, with their splits."""
    order = list(range(x.dim()))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permuted(x, order)


@rule(torch.movedim, Tensor.movedim, torch.moveaxis, Tensor.moveaxis)
def _movedim(func: Any, x: SpatialTensor, source: Any, destination: Any) -> Tensor:
    """Dims moved to other places, with their splits."""
    count = x.dim()
    sources = [d % count for d in ((source,) if isinstance(source, int) else source)]
    targets = [d % count for d in ((destination,) if isinstance(destination, int) else destination)]
    rest = iter([d for d in range(count) if d not in sources])
    placed = dict(zip(targets, sources, strict=True))
    return _permuted(x, [placed[d] if d in placed else next(rest) for d in range(count)])


@rule(getter("T"), getter("mT"), torch.t, Tensor.t)
def _t(func: Any, x: SpatialTensor) -> Tensor:
    """Dims in reverse order; of `mT` the last two alone."""
    order = list(range(x.dim()))
    last_two = func == getter("mT")
    return _permuted(x, [*order[:-2], *order[-2:][::-1]] if last_two else order[::-1])


@rule(torch.squeeze, Tensor.squeeze)
def _squeeze(func: Any, x: SpatialTensor, dim: Any = None) -> Tensor:
    """Dims of size 1 removed."""
    shape = x.spec.shape
    dims = range(len(shape)) if dim is None else [d % len(shape) for d in ((dim,) if isinstance(dim, int) else dim)]
    return _reshaped(x, [size for d, size in enumerate(shape) if d not in dims or size != 1])


@rule(torch.unsqueeze, Tensor.unsqueeze)
def _unsqueeze(func: Any, x: SpatialTensor, dim: int) -> Tensor:
    """A dim of size 1 added."""
    shape = list(x.spec.shape)
    shape.insert(dim % (len(shape) + 1), 1)
    return _reshaped(x, shape)


@rule(Tensor.squeeze_, Tensor.unsqueeze_, Tensor.transpose_, Tensor.swapaxes_, Tensor.swapdims_, Tensor.t_)
def _in_place(func: Any, x: SpatialTensor, *args: Any, **named: Any) -> Tensor:
    """`x` itself, from now on in the shape that the form without _ gives.

    Refuses views that are copies. Views that were copied from `x` before are refused when they are next read.
    """
    local, fix = local_of(x), "Use the form without _."
    if local.requires_grad and local.is_leaf and torch.is_grad_enabled():
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if local.requires_grad and not torch.is_grad_enabled():  # no gradient would reach what it was
        raise Unsupported("it changes the shape of what has a gradient in place, under no_grad", fix)
    if local.retains_grad:
        raise Unsupported("it changes the shape of what retains its gradient in place", fix)
    made = getattr(Tensor, func.__name__[:-1])(x, *args, **named)
    if x._view is not None or not isinstance(made, SpatialTensor) or made._view is not None:
        raise Unsupported("it changes the shape of a view that is a copy in place", fix)
    if made.spec is x.spec:
        return x
    del local
    alone = SimpleNamespace(_local=torch.empty(0))
    alone.view = alone._local[:]
    if x._local.requires_grad and sys.getrefcount(x._local) == sys.getrefcount(alone._local):
        # No one else holds it, a caller say. It stays the base of its views, which `made`, a view itself, would not be.
        if func is Tensor.squeeze_:  # a part may have one row of more
            dims = args[0] if args else named.get("dim", range(x.dim()))
            dims = [d % x.dim() for d in ((dims,) if isinstance(dims, int) else dims)]
            x._local.squeeze_(tuple(d for d in dims if x.spec.shape[d] == 1))
        else:
            func(x._local, *args, **named)
    else:
        x._local = made._local
    with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch(), torch.no_grad():
        func(x, *args, **named)  # sizes and strides alone, as the shell has no memory
    x.spec = made.spec
    return x


@rule(Tensor.expand, torch.broadcast_to, Tensor.broadcast_to, Tensor.expand_as)
def _expand(func: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
    """Dims of size 1 widened, and new ones in front, as a view; split dims keep their sizes."""
    args = args or tuple(named[name] for name in ("size", "other") if name in named)
    if not isinstance(x, SpatialTensor):  # a whole tensor, expanded as a split one is: a view, whole as well
        return x.expand(args[0].shape)
    shape = args[0].shape if isinstance(args[0], Tensor) else _sizes(args)
    old = x.spec.shape
    extra = len(shape) - len(old)
    sizes = [s if s != -1 else old[d - extra] for d, s in enumerate(shape)]
    goal = x.spec.with_(sizes, tuple(p.at(p.dim + extra) for p in x.spec.placements))
    return wrap(local_of(x).expand(goal.local_shape), goal)


@rule(Tensor.repeat, torch.tile, Tensor.tile)
def _repeat(func: Any, x: SpatialTensor, *args: Any, **named: Any) -> Tensor:
    """Copies along any dims; those of a split dim are joined, and rows change hands."""
    spec: Spec = x.spec
    repeats = list(_sizes(args or tuple(named.values())))
    if func is not Tensor.repeat:
        repeats = [1] * (len(spec.shape) - len(repeats)) + repeats
    extra = len(repeats) - len(spec.shape)
    for dim in {p.dim for p in spec.placements}:
        times, repeats[dim + extra] = repeats[dim + extra], 1
        if times != 1:
            copies = torch.cat([x] * times, dim) if times else x.narrow(dim, 0, 0)
            return copies.repeat(repeats)
    shape = [r * s for r, s in zip(repeats, (1,) * extra + spec.shape, strict=True)]
    result = spec.with_(shape, tuple(p.at(p.dim + extra) for p in spec.placements))
    return wrap(local_of(x).repeat(repeats), result)


@rule(torch.pixel_shuffle)
def _pixel_shuffle(func: Any, x: SpatialTensor, upscale_factor: int) -> Tensor:
    """(..., C * r * r, H, W) to (..., C, H * r, W * r): each row becomes r rows where it lies."""
    *lead, channels, height, width = x.spec.shape
    r = upscale_factor
    n = len(lead)
    split = x.reshape(*lead, channels // (r * r), r, r, height, width)
    woven = split.permute(*range(n), n, n + 3, n + 1, n + 4, n + 2)
    return woven.reshape(*lead, channels // (r * r), height * r, width * r)


@rule(torch.pixel_unshuffle)
def _pixel_unshuffle(func: Any, x: SpatialTensor, downscale_factor: int) -> Tensor:
    """(..., C, H, W) to (..., C * r * r, H / r, W / r); boundaries are moved to multiples of r first."""
    *lead, channels, height, width = x.spec.shape
    r = downscale_factor
    n = len(lead)
    split = x.reshape(*lead, channels, height // r, r, width // r, r)
    woven = split.permute(*range(n), n, n + 2, n + 4, n + 1, n + 3)
    return woven.reshape(*lead, channels * r * r, height // r, width // r)


@rule(torch.channel_shuffle, F.native_channel_shuffle)
def _channel_shuffle(func: Any, x: SpatialTensor, groups: int) -> Tensor:
    """(N, C, ...) with its channels dealt out in groups."""
    samples, channels, *rest = x.spec.shape
    return x.reshape(samples, groups, channels // groups, *rest).transpose(1, 2).reshape(samples, channels, *rest)


@rule(torch.repeat_interleave, Tensor.repeat_interleave)
def _repeat_interleave(
    func: Any, x: SpatialTensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Tensor:
    """Each row, or each element of the flattened tensor, `repeats` times in a row, or as often as a tensor says."""
    if dim is None:
        x, dim = x.flatten(), 0  # type: ignore[assignment]
    dim %= x.dim()
    if isinstance(repeats, Tensor):
        repeats = whole(repeats)
        rows = torch.arange(x.shape[dim], device=x.device)
        return x.index_select(dim, rows.repeat_interleave(repeats, output_size=output_size))
    shape = list(x.spec.shape)
    wide = x.unsqueeze(dim + 1).expand(*shape[: dim + 1], repeats, *shape[dim + 1 :])
    return wide.reshape(*shape[:dim], shape[dim] * repeats, *shape[dim + 1 :])


@rule(torch.adjoint, Tensor.adjoint, getter("H"), getter("mH"))
def _adjoint(func: Any, x: SpatialTensor) -> Tensor:
    """The last two dims change places, with complex numbers conjugated."""
    turned = x.transpose(-2, -1)
    return turned.conj() if turned.is_complex() else turned
