"""Numbers of a small split tensor as Python's lists or numpy's arrays; its sizes; as text, `in`, `reversed`."""

from typing import Any

import torch
from torch import Tensor

from fullframe.spatial.operands import has_values
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.rules.tables import FEW
from fullframe.spatial.tensor import SpatialTensor, local_of


@rule(Tensor.tolist, Tensor.numpy, Tensor.__array__)
def _values(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Any:
    """The whole of at most 65,536 numbers on every rank; an array is read-only, as it shares no memory with `x`.

    Refused for larger tensors, and in a simulation, which has no values.
    """
    if x.numel() > FEW:
        raise Unsupported(f"it makes a Python value of {x.numel():,} split numbers", "Take x.full() if that is meant.")
    if not has_values(local_of(x)):
        raise Unsupported("it asks for values, which a simulation does not have")
    result = func(x.full(), *args, **kwargs)
    if not isinstance(result, list):
        result.flags.writeable = False
    return result


@rule(torch._shape_as_tensor)
def _shape(func: Any, x: SpatialTensor) -> Tensor:
    """(dims,) the whole tensor's sizes as int64 on the CPU, as detectors hand them to deformable attention."""
    return torch.tensor(x.spec.shape)


@rule(Tensor.__format__, checked=False)
def _format(func: Any, x: SpatialTensor, wanted: str) -> str:
    """What `str(x)` says, as torch does it with any tensor that has dims; TypeError for other formats than ""."""
    return object.__format__(x, wanted)


@rule(Tensor.__contains__)
def _contains(func: Any, x: Tensor, element: Any) -> bool:
    """Whether some element of the whole tensor equals `element`."""
    return bool((x == element).any())


@rule(Tensor.__reversed__)
def _reversed(func: Any, x: SpatialTensor) -> Tensor:
    """`x` with its first dim the other way round."""
    return x.flip(0)
