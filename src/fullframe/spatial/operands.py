"""Several operands of one op brought to one spec, so that the op can run on their local parts."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_iter

from fullframe.errors import MeshError
from fullframe.geometry.placement import Placement, Placements
from fullframe.ranks.mesh import AXES, axes_in
from fullframe.ranks.recording import require_sending
from fullframe.ranks.tags import line, warn
from fullframe.spatial.module_path import module_path
from fullframe.spatial.redistribute import gather_axes, moved, resplit, sliced
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of

_TAKE_SPARSE = frozenset((
    torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm, torch.mv, Tensor.mv,
    F.linear,
))  # fmt: skip


def aligned(value: Tensor, spec: Spec) -> Tensor:
    """The local part of an operand that broadcasts against `spec`, cut where `spec` is cut."""
    if not isinstance(value, SpatialTensor):
        return sliced(value, spec) if value.dim() else value
    local, own = local_of(value), value.spec
    if own is spec:
        return local
    require_one_mesh(own, spec)
    offset = len(spec.shape) - len(own.shape)
    target = {p.axis: p for p in spec.placements}
    for p in own.placements:
        wanted = target.get(p.axis)
        if wanted is not None and alike(p.at(p.dim + offset), wanted):
            local, own = resplit(local, own, p.axis, wanted.extents)
        elif wanted is not None and _can_move(own, p, wanted, wanted.dim - offset):
            local, own = moved(local, own, p, wanted.dim - offset, wanted.extents)
        else:
            say_gathered("an operand", f"{p} meets {wanted or 'a tensor that is whole there'}", value)
            local, own = gather_axes(local, own, [p.axis])
    return sliced(local, spec, tuple(p.at(p.dim + offset) for p in own.placements))


def merged(values: Sequence[Tensor]) -> Spec:
    """The spec of what `values` broadcast to: cut as the largest operands are."""
    shells = sorted((v for v in values if isinstance(v, SpatialTensor)), key=lambda s: -prod(s.spec.shape))
    first = shells[0].spec
    shapes = [v.spec.shape if isinstance(v, SpatialTensor) else tuple(v.shape) for v in values]
    if all(s.spec is first for s in shells) and all(_fits(shape, first.shape) for shape in shapes):
        return first
    for shell in shells:
        require_one_mesh(shell.spec, first)
    shape = tuple(torch.broadcast_shapes(*shapes))
    cuts = [[p.at(p.dim + len(shape) - len(s.spec.shape)) for p in s.spec.placements] for s in shells]
    return first.with_(shape, united(cuts))


def require_one_mesh(own: Spec, other: Spec) -> None:
    """Raises MeshError where the operands of one op are split over different meshes."""
    if own.spatial is not other.spatial:
        first, second = (" x ".join(f"{axis.name} {axis.size}" for axis in spec.spatial.axes) for spec in (own, other))
        raise MeshError(
            f"tensors of two meshes ({first} and {second}) meet in one op; "
            "split both over one mesh, or pass one of them as x.full()"
        )


def united(cuts: Sequence[Sequence[Placement]]) -> Placements:
    """The placements of operands of one shape together: the first operand that is split over an axis decides."""
    placements: list[Placement] = []
    for own in cuts:
        taken = {p.dim for p in placements}  # two operands do not share out the factors of one dim
        axes = {name for p in placements for name in axes_in(p.axis)}
        placements += [p for p in own if axes.isdisjoint(axes_in(p.axis)) and p.dim not in taken]
    return in_order(placements)


def in_order(placements: Iterable[Placement]) -> Placements:
    """The placements in the order of the mesh's axes."""
    return tuple(sorted(placements, key=lambda p: AXES.index(axes_in(p.axis)[0])))


def placements_of(value: Any) -> Placements:
    """Where a split tensor is cut; nowhere where it is whole."""
    return value.spec.placements if isinstance(value, SpatialTensor) else ()


def alike(p: Placement, q: Placement) -> bool:
    """Whether two placements split the same factor of the same dim, at whatever boundaries, its rows in one order."""
    same = (p.dim, p.outer, p.inner, p.extents.size) == (q.dim, q.outer, q.inner, q.extents.size)
    return same and p.order is q.order


def _can_move(spec: Spec, p: Placement, wanted: Placement, dim: int) -> bool:
    """Whether the split `p` of `spec` can be exchanged for one of its `dim`, cut as `wanted`."""
    return (
        p.is_plain
        and wanted.is_plain
        and 0 <= dim != p.dim
        and spec.shape[dim] == wanted.extents.size
        and not spec.is_split(dim)
    )


def _fits(shape: tuple[int, ...], into: tuple[int, ...]) -> bool:
    """Whether `shape` broadcasts to `into` without making it larger."""
    return len(shape) <= len(into) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(into), strict=False))


def shells_in(*trees: Any) -> Iterator[SpatialTensor]:
    """The split tensors in nested arguments."""
    return (leaf for leaf in tree_iter(trees) if isinstance(leaf, SpatialTensor))


_said: set[tuple[str, str]] = set()


def say_gathered(name: str, reason: str, shell: SpatialTensor) -> None:
    """Warn, once a call site and on the job's first rank, that `shell` is made whole."""
    where = module_path()
    if (name, where) in _said or torch._C._current_graph_task_id() != -1:  # in backward: recompute, of what was said
        return
    _said.add((name, where))
    if torch.distributed.get_rank() == 0:
        warn(f"{name} ({where or 'outside a module'}) runs on the gathered {shell!r}: {reason}; at {line()}")


def meets_sparse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a whole operand has no strides, by which rules cut it, and is no sparse matrix that is multiplied by."""
    others = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor) and leaf.layout != torch.strided]
    is_factor = func in _TAKE_SPARSE and all(t.layout == torch.sparse_coo and not t.requires_grad for t in others)
    return bool(others) and not is_factor


def has_gradients(tensor: Tensor) -> bool:
    """Whether torch can have a gradient of it: real and complex numbers, not masks and integers."""
    return tensor.is_floating_point() or tensor.is_complex()


def has_values(tensor: Tensor) -> bool:
    """Whether there are numbers to look at: not so in a simulation, whose ranks take the usual way."""
    require_sending("what it does depends on numbers")
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
