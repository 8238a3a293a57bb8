"""Functions that mix elements along one dim and are local where that dim is whole: a table of functions and dims."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


class _Dim(NamedTuple):
    """Where a call says which dim must be whole: as `dim`, or by its place behind the tensor."""

    place: int | None = 0  # None: the call does not say
    default: int = -1


_DIMS = {
    _Dim(): (F.glu,),
    _Dim(place=None, default=1): (F.local_response_norm,),
}
_DIM_OF = {function: where for where, functions in _DIMS.items() for function in functions}


@rule(*_DIM_OF)
def _along(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Any:
    """The function of each rank's part, whose result has the global size along the dim; refuses a split dim."""
    where = _DIM_OF[func]
    dim = kwargs.get("dim", where.default)
    if where.place is not None and len(args) > where.place:
        dim = args[where.place]
    x.spec.require_whole(f"it works along dim {dim}, which is split", dim)
    found = func(local_of(x), *args, **kwargs)
    if isinstance(found, Tensor):
        return wrap(found, x.spec.resized(dim, found.shape[dim]))
    return type(found)([wrap(part, x.spec.resized(dim, part.shape[dim])) for part in found])


@rule(F.prelu, torch.prelu, Tensor.prelu)
def _prelu(func: Any, x: Tensor, weight: Tensor) -> Tensor:
    """The weight is one number or one a channel; refuses a split weight, and split channels with one number each."""
    if isinstance(weight, SpatialTensor) or not isinstance(x, SpatialTensor):
        raise Unsupported("the weight is split")
    if weight.numel() > 1:
        x.spec.require_whole("it works along dim 1, which is split", 1)
    return wrap(func(local_of(x), weight), x.spec)
