"""Writing at index tensors along a whole dim: every rank writes its own columns, nothing is sent."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.spatial.operands import aligned
from fullframe.spatial.rules.registry import Unsupported, rule, writes
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


@rule(
    *(torch.scatter, Tensor.scatter, Tensor.scatter_, torch.scatter_add, Tensor.scatter_add, Tensor.scatter_add_),
    *(torch.scatter_reduce, Tensor.scatter_reduce, Tensor.scatter_reduce_),
)
def _scatter(
    func: Any, x: Tensor, dim: int, index: Tensor, src: Any = None, *args: Any, value: Any = None, **kwargs: Any
) -> Tensor:
    """`x[..., index[i], ...] = src[..., i, ...]` along `dim`; one-hot maps of split labels are of this kind."""
    src = value if src is None else src
    given = [t for t in (x, index, src) if isinstance(t, SpatialTensor)]
    spec = given[0].spec
    tensors = [t for t in (x, index, src) if isinstance(t, Tensor)]
    _check_whole(func, x, spec, dim, kwargs)
    if any(t.shape[p.dim] != spec.shape[p.dim] for t in tensors for p in spec.placements):
        raise Unsupported("the index or the source covers a part of a split dim")
    local = [_cut(t, spec) if isinstance(t, Tensor) else t for t in (x, index, src)]
    result = func(local[0], dim, *local[1:], *args, **kwargs)
    return x if result is local[0] else wrap(result, spec.with_(x.shape, spec.placements))


@rule(
    *(torch.index_add, Tensor.index_add, Tensor.index_add_, torch.index_copy, Tensor.index_copy, Tensor.index_copy_),
    *(torch.index_fill, Tensor.index_fill, Tensor.index_fill_),
    *(torch.index_reduce, Tensor.index_reduce, Tensor.index_reduce_),
)
def _at_rows(func: Any, x: Tensor, dim: int, index: Tensor, source: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Rows of a whole dim are added, copied or filled."""
    if isinstance(index, SpatialTensor) or not isinstance(x, SpatialTensor):
        raise Unsupported("the index is split, or rows of a whole tensor are written from a split one")
    spec = x.spec
    _check_whole(func, x, spec, dim, kwargs)
    if isinstance(source, Tensor) and source.dim():
        if source.dim() != x.dim():
            raise RuntimeError(f"a source of {source.dim()} dims cannot be written into rows of {x.dim()} dims")
        source = _cut(source, spec)
    local = local_of(x)
    result = func(local, dim, index, source, *args, **kwargs)
    return x if result is local else wrap(result, spec)


def _check_whole(func: Any, x: Tensor, spec: Spec, dim: int, options: dict[str, Any]) -> None:
    if spec.is_split(dim):
        raise Unsupported("it writes along a split dim", "Write along a whole dim, or to x.full().")
    if not isinstance(x, SpatialTensor) and writes(func, options):
        raise Unsupported("it writes split values into a whole tensor", "Use the form that is not in place.")


def _cut(t: Tensor, spec: Spec) -> Tensor:
    """The part of a tensor that has the sizes of `spec` in its split dims, and any in the others."""
    shape: Sequence[int] = t.shape
    return aligned(t, spec.with_(shape, spec.placements))
