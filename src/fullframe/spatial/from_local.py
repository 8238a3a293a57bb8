"""Split tensors of what is spread over the ranks already, each with its own part, or lies on one rank alone."""

import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fullframe.arguments import checked_but, fits
from fullframe.errors import ShapeError
from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement, Placements, local_shape
from fullframe.ranks.collectives import all_gather_no_grad, device_of_facts
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.mesh import Spatial, spatial_of
from fullframe.spatial.gradients import seen
from fullframe.spatial.redistribute import gather_axes, resplit
from fullframe.spatial.rules import catalog as _rules  # noqa: F401  a split tensor is of no use without its rules
from fullframe.spatial.shard import MOST_DIMS, even_spec, fingerprint, image_dims, shard
from fullframe.spatial.spec import Spec, spec_of, strides_of
from fullframe.spatial.tensor import SpatialTensor, left_whole, wrap
from fullframe.wording import described

_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
_FORMATS = [torch.contiguous_format, torch.channels_last, torch.channels_last_3d]


@checked_but("local", "like", "placements")
def from_local(
    local: Tensor, mesh: DeviceMesh, *, like: Tensor | None = None, placements: Mapping[str, int] | None = None
) -> Tensor:
    """The split tensor of which each rank of a replica passes its part `local`; only a few numbers are sent.

    With `like`, a split tensor of as many dims, the split dims are cut as its own are; the others may have other sizes.
    Else `placements` says by mesh axis which dim it cuts ({"height": 2, "width": 3}), by as many rows as the ranks
    hold, in the order of their coordinates; without it the last two dims are H and W, or the last three D, H and W on a
    mesh with depth. Ranks along an axis that cuts nothing hold the same. The result shares the memory of `local`, and
    is a plain tensor where nothing is cut.

    `.grad` of a `local` that is a leaf is its part of one process's gradient. Where `local` was computed, the gradient
    goes into that as from any split tensor (docs/how_it_works/gradients.md): `from_local(x.local, mesh, like=x)` is
    `x`.

    Raises ShapeError on all ranks where one rank's part does not go with the others'.
    """
    spatial = spatial_of(mesh)
    problem = _problem(local, spatial, like, placements)
    dims = {} if problem else _dims(local, spatial, like, placements)
    everyone = _parts(local, spatial, problem, like, dims)
    _require_parts(everyone, spatial, problem, dims)
    sizes = [part.size for part in everyone]
    if isinstance(like, SpatialTensor):
        shape, cuts = _as_like(sizes, spatial, like.spec)
    elif like is not None:
        shape, cuts = sizes[0], ()
    else:
        shape, cuts = _in_order(sizes, spatial, dims)
    # Of a part of a single row or column both formats may have the strides.
    strides = _strides(shape, max(part.layout for part in everyone))
    spec = spec_of(spatial, tuple(shape), cuts, False, strides)
    if any(part.requires_gradient for part in everyone) and not local.requires_grad:
        local = local.detach().requires_grad_()  # for backward's messages, in which all ranks take part
    elif local.is_leaf and local.requires_grad:
        local = local.view_as(local)
        if local.requires_grad:  # not under no_grad
            local.register_hook(lambda gradient: seen(gradient, spec))
    return wrap(left_whole(local), spec)


def _problem(local: object, spatial: Spatial, like: Tensor | None, placements: Mapping[str, int] | None) -> str:
    """What is wrong with this rank's arguments, "" where nothing is."""
    if isinstance(local, SpatialTensor) or not isinstance(local, Tensor):
        return f"a plain tensor is needed for a part, got {type(local).__name__}"
    if isinstance(local, torch.nn.Parameter):
        return "a parameter is equal on all ranks, and no part"
    if like is not None and placements is not None:
        return "pass like or placements, not both"
    if local.dim() > MOST_DIMS:
        return f"a part has at most {MOST_DIMS} dims, got shape {tuple(local.shape)}"
    if like is not None:
        if not isinstance(like, Tensor):
            return f"like is a split tensor, got {described(like)}"
        return "" if like.dim() == local.dim() else f"like has {like.dim()} dims, the part {local.dim()}"
    names = [axis.name for axis in spatial.axes]
    dims = image_dims(spatial) if placements is None else placements
    if not fits(dims, Mapping) or not all(fits(dim, int) for dim in dims.values()):
        return f'placements says by mesh axis which dim it cuts, as in {{"width": 3}}, got {dims!r}'
    unknown = [name for name in dims if name not in names]
    if unknown:
        return f"placements names {unknown}; the mesh axes that cut are {names}"
    if not all(-local.dim() <= dim < local.dim() for dim in dims.values()):
        return f"a part of shape {tuple(local.shape)} does not have the dims {list(dims.values())} that are cut"
    if len({dim % local.dim() for dim in dims.values()}) < len(dims):
        return f"one dim cannot be cut over two axes: {dict(dims)}"
    return ""


def _dims(local: Tensor, spatial: Spatial, like: Tensor | None, placements: Mapping[str, int] | None) -> dict[str, int]:
    """By mesh axis the dim that it cuts."""
    if like is not None:
        return {p.axis: p.dim for p in like.spec.placements} if isinstance(like, SpatialTensor) else {}
    dims = image_dims(spatial) if placements is None else placements
    dims = {axis.name: dims[axis.name] % local.dim() for axis in spatial.axes if axis.name in dims}
    several = {name: dim for name, dim in dims.items() if spatial.axis(name).size > 1}
    return several or (dict(list(dims.items())[-1:]) if spatial.size == 1 else {})  # one rank alone: all is one part


class _Part(NamedTuple):
    """What a rank tells of its part, in numbers; dtype, arguments and values as checksums."""

    dims: int  # -1: it is no part
    size: list[int]
    layout: int
    dtype: int
    arguments: int
    values: int  # 0 where no other rank is to hold the same
    requires_gradient: int


def _parts(local: Tensor, spatial: Spatial, problem: str, like: Tensor | None, dims: dict[str, int]) -> list[_Part]:
    if problem:
        facts = [-1] + [0] * (MOST_DIMS + 5)
    else:
        asked = (like.spec.facts, like.spec.placements) if isinstance(like, SpatialTensor) else (like is None, dims)
        facts = [local.dim(), *local.shape] + [0] * (MOST_DIMS - local.dim())
        facts += [_FORMATS.index(memory_format_of(local))]
        facts += [zlib.crc32(str(local.dtype).encode()), zlib.crc32(repr(asked).encode())]
        is_shared = len(dims) < sum(axis.size > 1 for axis in spatial.axes)
        facts += [int(fingerprint(local.detach())) if is_shared else 0, int(local.requires_grad)]
    if spatial.size > 1 and not spatial.channel.tagged:
        raise ShapeError("a simulation does not know the other ranks' parts; use ff.shard there")
    mine = torch.tensor(facts, device=device_of_facts(spatial.replica, spatial.mesh.device_type))
    told = all_gather_no_grad(mine, spatial.replica, "parts").tolist()
    return [_Part(dims, numbers[: max(dims, 0)], *numbers[MOST_DIMS:]) for dims, *numbers in told]


def _require_parts(everyone: list[_Part], spatial: Spatial, problem: str, dims: dict[str, int]) -> None:
    """Raises ShapeError, on all ranks alike, where they are no parts of one tensor."""
    wrong = [spatial.replica_ranks[number] for number, part in enumerate(everyone) if part.dims < 0]
    if wrong:
        raise ShapeError(problem or f"ranks {wrong} pass what is no part; see their messages")
    first = everyone[0]
    shapes = ", ".join(
        f"rank {rank}: {tuple(part.size)}" for rank, part in zip(spatial.replica_ranks, everyone, strict=True)
    )
    for part in everyone:
        if part.dims != first.dims or part.dtype != first.dtype:
            raise ShapeError(f"the parts differ in dims or dtype ({shapes})")
        if part.arguments != first.arguments:
            raise ShapeError("the ranks pass different placements, or a different like")
        for dim in set(range(first.dims)) - set(dims.values()):
            if part.size[dim] != first.size[dim]:
                raise ShapeError(f"the parts differ in dim {dim}, which is not cut ({shapes})")
    held: dict[tuple[int, ...], set[int]] = {}
    for coordinates, part in zip(spatial.places, everyone, strict=True):
        held.setdefault(tuple(coordinates[axis] for axis in dims), set()).add(part.values)
    if any(len(values) > 1 for values in held.values()):
        raise ShapeError(f"only {list(dims)} cut the tensor, but ranks along another axis hold other values ({shapes})")


def _as_like(sizes: list[list[int]], spatial: Spatial, like: Spec) -> tuple[Sequence[int], Placements]:
    """(global shape, placements) of parts that are cut as `like` is."""
    for rank, size, coordinates in zip(spatial.replica_ranks, sizes, spatial.places, strict=True):
        wanted = local_shape(like.shape, like.placements, [coordinates[p.axis] for p in like.placements])
        for p in like.placements:
            if size[p.dim] != wanted[p.dim]:
                raise ShapeError(
                    f"rank {rank} holds {size[p.dim]} rows of dim {p.dim}, where like is cut in such a way that it "
                    f"has {wanted[p.dim]} ({p})"
                )
    split = {p.dim for p in like.placements}
    return [like.shape[dim] if dim in split else size for dim, size in enumerate(sizes[0])], like.placements


def _in_order(sizes: list[list[int]], spatial: Spatial, dims: dict[str, int]) -> tuple[Sequence[int], Placements]:
    """(global shape, placements) of parts of any number of rows, in the order of the ranks' coordinates."""
    shape, cuts = list(sizes[0]), []
    for axis, dim in dims.items():
        rows: dict[int, set[int]] = {}
        for coordinates, size in zip(spatial.places, sizes, strict=True):
            rows.setdefault(coordinates[axis], set()).add(size[dim])
        if any(len(several) > 1 for several in rows.values()):
            shapes = [tuple(size) for size in sizes]
            raise ShapeError(
                f"ranks {list(spatial.replica_ranks)} hold parts of shapes {shapes}, and those of one {axis} "
                f"coordinate must have equal numbers of rows in dim {dim}"
            )
        bounds = [0, *accumulate(next(iter(rows[coordinate])) for coordinate in range(spatial.axis(axis).size))]
        shape[dim] = bounds[-1]
        cuts.append(Placement(axis, dim, Extents(tuple(bounds))))
    return shape, tuple(cuts)


@checked_but("full", "src")
def scatter(full: Tensor | None, mesh: DeviceMesh, *, src: int = 0) -> Tensor:
    """`shard` of a tensor (..., H, W) that one rank of each replica has: each other rank is sent its part alone.

    `src` is that rank's number within its replica; what others pass, None say, is not looked at. Differentiable: on
    `src` the gradient of `full` is the whole one of one process.

    Raises ShapeError on all ranks where `src` passes no plain tensor with dims (..., H, W), on a mesh with depth
    (..., D, H, W), of at most eight dims, or the ranks name different ones.
    """
    spatial = spatial_of(mesh)
    given, src = src, src if fits(src, int) else -1  # else this rank alone would raise
    is_here = spatial.coordinate == src
    least = len(spatial.axes)
    is_whole = isinstance(full, Tensor) and not isinstance(full, SpatialTensor) and least <= full.dim() <= MOST_DIMS
    facts = [src, -1 if is_here else 0] + [0] * (MOST_DIMS + 3)
    if is_here and is_whole:
        assert full is not None
        facts = [src, full.dim(), *full.shape] + [0] * (MOST_DIMS - full.dim())
        facts += [_DTYPES.index(full.dtype), _FORMATS.index(memory_format_of(full)), int(full.requires_grad)]
    if spatial.size > 1 and not spatial.channel.tagged:
        raise ShapeError("a simulation does not know what another rank has; use ff.shard there")
    mine = torch.tensor(facts, device=device_of_facts(spatial.replica, mesh.device_type))
    everyone = all_gather_no_grad(mine, spatial.replica, "scatter").tolist()
    named = sorted({other[0] for other in everyone})
    if len(named) > 1 or not 0 <= src < spatial.size:
        got = named if src >= 0 else f"{given!r}"
        raise ShapeError(f"src is one of the replica's ranks 0 to {spatial.size - 1}, the same on all; got {got}")
    dims, *told = everyone[src][1:]
    if dims < 0:
        got = f"{type(full).__name__} {tuple(getattr(full, 'shape', ()))}" if is_here else "something else"
        asked = "(..., D, H, W)" if least == 3 else "(..., H, W)"
        raise ShapeError(f"rank {src} of the replica must pass a plain tensor with dims {asked}, passed {got}")
    shape, (dtype, layout, needs_gradient) = tuple(told[:dims]), told[MOST_DIMS:]
    if spatial.size == 1:
        assert full is not None
        return shard(full, mesh, check=False)
    local, spec = _on_one(full if is_here else None, spatial, src, shape, _DTYPES[dtype], bool(needs_gradient))
    wanted = even_spec(shape, mesh)
    cut = {p.axis: p.extents for p in wanted.placements}
    for axis, extents in cut.items():
        local, spec = resplit(local, spec, axis, extents)
    local, spec = gather_axes(local, spec, [p.axis for p in spec.placements if p.axis not in cut])
    return wrap(local.contiguous(memory_format=_FORMATS[layout]), wanted.strided(_strides(shape, layout)))


def _strides(shape: Sequence[int], layout: int) -> tuple[int, ...] | None:
    """Of a whole tensor in the memory format of this number."""
    return strides_of(torch.empty(shape, device="meta", memory_format=_FORMATS[layout]))


def _on_one(
    full: Tensor | None, spatial: Spatial, src: int, shape: tuple[int, ...], dtype: torch.dtype, needs_gradient: bool
) -> tuple[Tensor, Spec]:
    """(local, spec) of a tensor all of whose rows are one rank's."""
    owner, cuts, empty = spatial.places[src], [], list(shape)
    for name, dim in image_dims(spatial).items():
        axis, dim = spatial.axis(name), len(shape) + dim
        if axis.size > 1:
            bounds = (0,) * (owner[axis.name] + 1) + (shape[dim],) * (axis.size - owner[axis.name])
            cuts.append(Placement(axis.name, dim, Extents(bounds)))
            empty[dim] = 0 if axis.coordinate != owner[axis.name] else shape[dim]
    spec = spec_of(spatial, shape, tuple(cuts), False, None)
    device = spatial.mesh.device_type
    if full is None:
        return torch.empty(empty, dtype=dtype, device=device, requires_grad=needs_gradient), spec
    if not full.requires_grad:
        return full.to(device), spec
    alias = full.view_as(full)
    alias.register_hook(lambda gradient: seen(gradient, spec))
    return alias.to(device), spec
