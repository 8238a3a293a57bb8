"""Cut a whole tensor into the parts of a mesh."""

import zlib

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fullframe.arguments import checked
from fullframe.errors import ShapeError
from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement
from fullframe.ranks.collectives import all_gather_no_grad, device_of_facts
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.mesh import Spatial, spatial_of
from fullframe.ranks.raw_bytes import INTEGERS
from fullframe.spatial.gradients import enter
from fullframe.spatial.operands import has_values
from fullframe.spatial.redistribute import sliced
from fullframe.spatial.rules import catalog as _rules  # noqa: F401  a split tensor is of no use without its rules
from fullframe.spatial.spec import Spec, spec_of, strides_of
from fullframe.spatial.tensor import SpatialTensor, without_class, wrap

MOST_DIMS = 8
_LOOKED_AT = 12  # rows, or a little more, of each dim


@checked
def shard(full: Tensor, mesh: DeviceMesh, *, check: bool = True) -> SpatialTensor:
    """This rank's part of `full`, whose last two dims are H and W, and the one before D on a mesh with depth.

    Differentiable.
    Every rank of a replica passes the same tensor; the part is a copy, so that the whole can be freed. Dims are cut
    evenly over the axes of `mesh` that have more than one rank; a dim with fewer rows than ranks stays whole, and where
    nothing is cut the result is a plain tensor. With `check`, the ranks first agree on shape, dtype and a sample of the
    values, bit by bit, one small message; False is for callers that know. Raises ShapeError when ranks differ.
    """
    if isinstance(full, SpatialTensor):
        raise ShapeError("the tensor is split already; pass the whole one, x.full()")
    full = without_class(full)
    if check and not _agree(full, mesh):
        full = full.contiguous()
    spec = even_spec(tuple(full.shape), mesh)
    part = sliced(enter(full, spec.spatial), spec).clone(memory_format=memory_format_of(full))
    return wrap(part, spec.strided(_strides(full)))  # type: ignore[return-value]


@checked
def full(value: Tensor) -> Tensor:
    """The whole tensor that `value` is a part of, of its shape, plain, on every rank of the replica: its `full()`.

    Differentiable. What is not split is given back as it is, so that a program runs on any mesh, and on one process.
    All ranks of a replica must call it where it is split.
    """
    return value.full() if isinstance(value, SpatialTensor) else value


def _strides(full: Tensor) -> tuple[int, ...] | None:
    """Of `full`, by which torch decides what is a view of it; of a copy where elements share memory."""
    return strides_of(full if 0 not in full.stride() else torch.empty_like(full, device="meta"))


def even_spec(shape: tuple[int, ...], mesh: DeviceMesh) -> Spec:
    """The spec of a whole (..., H, W) or (..., D, H, W) tensor cut evenly over `mesh`.

    A dim of fewer rows than ranks stays whole, and so does a tensor (H, W) along depth.
    """
    spatial = spatial_of(mesh)
    if len(shape) < 2:
        raise ShapeError(f"a tensor with dims (..., H, W) is needed, got shape {shape}")
    axes = [(len(shape) + dim, spatial.axis(name)) for name, dim in image_dims(spatial).items()]
    axes = [pair for pair in axes if pair[1].size > 1] or axes[-1:]  # one rank alone: one part of everything
    placements = []
    for dim, axis in axes:
        if dim >= 0 and shape[dim] >= axis.size:
            placements.append(Placement(axis.name, dim, Extents.even(shape[dim], axis.size)))
    return spec_of(spatial, shape, tuple(placements), False, None)


def image_dims(spatial: Spatial) -> dict[str, int]:
    """By mesh axis the dim that it cuts, counted from the end: height -2 and width -1, and depth -3."""
    return {axis.name: number - len(spatial.axes) for number, axis in enumerate(spatial.axes)}


def _agree(full: Tensor, mesh: DeviceMesh) -> bool:
    """Whether the tensors of the replica's ranks have the same strides.

    All raise when they differ in shape, dtype or in the values looked at.
    """
    spatial = spatial_of(mesh)
    facts = [full.dim(), *list(full.shape)[:MOST_DIMS]]
    facts += [0] * (MOST_DIMS + 1 - len(facts)) + [zlib.crc32(str(full.dtype).encode())]
    strides = zlib.crc32(str(_strides(full)).encode())
    mine = torch.tensor([strides, *facts], device=device_of_facts(spatial.replica, mesh.device_type))
    if spatial.size > 1:
        mine = torch.cat([mine, fingerprint(full.detach()).to(mine.device)])
    told = all_gather_no_grad(mine, spatial.replica, "shard")
    if not has_values(told):
        return True
    everyone = told.tolist()
    layouts = {other.pop(0) for other in everyone}
    if all(other == everyone[0] for other in everyone):
        return len(layouts) == 1
    if any(other[:-1] != everyone[0][:-1] for other in everyone):
        shapes = ", ".join(
            f"rank {rank}: {tuple(other[1 : 1 + other[0]])}"
            for rank, other in zip(spatial.replica_ranks, everyone, strict=True)
        )
        what = f"shapes or dtypes differ ({shapes})"
    else:
        what = f"their values differ on ranks {list(spatial.replica_ranks)} (shape {tuple(full.shape)})"
    raise ShapeError(
        f"the ranks of a replica must pass the same whole tensor, but {what}; give every rank of the replica the same "
        "sample with the same augmentation, as ff.ShardedLoader does: a DistributedSampler must count replicas, "
        "num_replicas=mesh.size(0), rank=mesh.get_local_rank('data'); draw noise after the same torch.manual_seed"
    )


def fingerprint(full: Tensor) -> Tensor:
    """A checksum (1,) of the bits of rows and columns all over `full`: NaN is equal to itself."""
    full = full.resolve_conj().resolve_neg()
    if full.is_complex():
        full = torch.view_as_real(full)
    if full.is_quantized or full.is_sparse or full.element_size() not in INTEGERS or not full.numel():
        return torch.zeros(1, dtype=torch.int64, device=full.device)
    for dim, size in enumerate(full.shape):  # an odd step does not keep to one colour of a pattern
        full = full[(slice(None),) * dim + (slice(None, None, size // _LOOKED_AT | 1),)]
    bits = full.contiguous().view(INTEGERS[full.element_size()]).flatten().to(torch.int64)
    return (bits * torch.arange(1, 2 * len(bits), 2, device=bits.device)).sum(0, keepdim=True)
