"""New tensors of a given size: a map as wide as the split one that it is asked of is split as that one is.

So are a stereo network's cost volume, a recurrent cell's first state and an accumulator, which a program then fills.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fullframe.spatial.rules.registry import rule
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap


@rule(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty, checked=False)
def _new(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Split where the last dims are those of `x`, from its image plane or its first split dim on; else whole."""
    spec, local = x.spec, local_of(x)
    given = kwargs.get("size", args[0] if args else ())
    number_by_number = not isinstance(given, Sequence)
    size = tuple(args if number_by_number else given)
    alike = _last_dims_alike(spec, size) if _lies_with(local, kwargs) else 0
    if not alike:
        return func(local, *args, **kwargs)  # type: ignore[no-any-return]
    held = *size[:-alike], *local.shape[-alike:]
    fill = () if number_by_number or "size" in kwargs else args[1:]
    made = func(local, held, *fill, **{name: value for name, value in kwargs.items() if name != "size"})
    return wrap(made, spec.with_(size, tuple(p.at(p.dim + len(size) - len(spec.shape)) for p in spec.placements)))


@rule(Tensor.new, checked=False)
def _of_size_or_data(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    """`x.new(2, 3)` and `x.new(size)` as `new_empty`; what is made of other values is whole."""
    if args and (isinstance(args[0], torch.Size) or all(type(n) is int for n in args)) and not kwargs:
        return x.new_empty(*args)
    return func(local_of(x), *args, **kwargs)  # type: ignore[no-any-return]


@rule(Tensor.new_tensor, checked=False)
def _of_data(func: Any, x: SpatialTensor, *args: Any, **kwargs: Any) -> Tensor:
    """What is made of given values is whole."""
    return func(local_of(x), *args, **kwargs)  # type: ignore[no-any-return]


def _lies_with(local: Tensor, options: dict[str, Any]) -> bool:
    """Whether what is made with these options is strided, and on the device of `local`."""
    device = options.get("device")
    elsewhere = device is not None and torch.device(device).type != local.device.type
    return not (elsewhere or options.get("pin_memory") or options.get("layout", torch.strided) is not torch.strided)


def _last_dims_alike(spec: Spec, size: tuple[Any, ...]) -> int:
    """How many of the last dims are those of a tensor of `spec`, with all split ones; 0 where it is no such map.

    A map of as many dims, or (N, C, H, W) asked of frames (N, T, C, H, W); with fewer it may well be a table.
    """
    dims = len(spec.shape)
    alike = dims - min(dims - 2, *(p.dim for p in spec.placements))
    if dims < 3 or len(size) < min(dims, 4) or spec.fleeting or not all(type(n) is int for n in size):
        return 0
    return alike if size[-alike:] == spec.shape[-alike:] else 0
