"""Cut a whole tensor into the parts of a mesh."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fullframe.errors import ShapeError
from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import Placement
from fullframe.spatial.exchange import gathered
from fullframe.spatial.gradients import enter
from fullframe.spatial.mesh import spatial_of
from fullframe.spatial.rules import catalog as _rules  # noqa: F401  a split tensor is of no use without its rules
from fullframe.spatial.tensor import Layout, SpatialTensor, layout_of, sliced, wrap

_MOST_DIMS = 8


def shard(full: Tensor, mesh: DeviceMesh, *, check: bool = True) -> SpatialTensor:
    """This rank's part of `full`, whose last two dims are H and W; differentiable.

    Every rank of a replica passes the same tensor; the part is a copy, so that the whole can be
    freed. Dims are cut evenly over the axes of
    `mesh` that have more than one rank. With `check`, the ranks first agree on shape and dtype, one small message;
    False is for callers that know. Raises ShapeError when ranks differ or a dim has fewer rows than ranks.
    """
    if isinstance(full, SpatialTensor):
        raise ShapeError("the tensor is split already; pass the whole one, x.full()")
    if check:
        _agree(full, mesh)
    layout = even_layout(tuple(full.shape), mesh)
    return wrap(sliced(enter(full, layout.spatial), layout).clone(), layout)  # type: ignore[return-value]


def even_layout(shape: tuple[int, ...], mesh: DeviceMesh) -> Layout:
    """The layout of a whole (..., H, W) tensor cut evenly over `mesh`."""
    spatial = spatial_of(mesh)
    if len(shape) < 2:
        raise ShapeError(f"a tensor with dims (..., H, W) is needed, got shape {shape}")
    axes = [(-2, spatial.height), (-1, spatial.width)]
    axes = [pair for pair in axes if pair[1].size > 1] or axes[1:]  # one rank alone: one part of everything
    placements = []
    for dim, axis in axes:
        size = shape[dim]
        if size < axis.size:
            raise ShapeError(
                f"{axis.name} {size} over {axis.size} ranks leaves rank {size} of the axis empty (shape {shape}); "
                f"use {axis.name}={max(size, 1)} or less in the mesh"
            )
        placements.append(Placement(axis.name, len(shape) + dim, Extents.even(size, axis.size)))
    return layout_of(spatial, shape, tuple(placements))


def _agree(full: Tensor, mesh: DeviceMesh) -> None:
    """All ranks of the replica raise when their tensors differ in shape or dtype."""
    spatial = spatial_of(mesh)
    facts = [full.dim(), *list(full.shape)[:_MOST_DIMS], full.element_size(), int(full.is_floating_point())]
    facts += [0] * (_MOST_DIMS + 3 - len(facts))
    everyone = gathered(torch.tensor(facts, device=mesh.device_type), spatial.replica).tolist()
    if any(other != everyone[0] for other in everyone):
        shapes = ", ".join(
            f"rank {rank}: {tuple(other[1 : 1 + other[0]])}"
            for rank, other in zip(spatial.replica_ranks, everyone, strict=True)
        )
        raise ShapeError(
            f"the ranks of a replica must pass the same whole tensor, but shapes or dtypes differ ({shapes}); "
            "give every rank of the replica the same sample, as ff.ShardedLoader does"
        )
