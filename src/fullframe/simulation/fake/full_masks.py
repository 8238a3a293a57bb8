"""Ops whose result has as many rows as a mask has true elements, or as boxes are kept: as if every one were.

So what a simulation says of memory and time is an upper bound, for any mask and any boxes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fullframe.simulation.fake.numbers import known

FULL_MASKS = (
    "a mask or nms picks by values, which a simulation does not have: all elements are taken as picked, an upper bound"
)

_aten = torch.ops.aten
_nonzero, _select, _index = _aten.nonzero.default, _aten.masked_select.default, _aten.index.Tensor
_bincount = _aten.bincount.default


def picks_by_value(func: Any, args: Sequence[Any]) -> bool:
    """Whether the shape of what an op gives depends on which elements of a fake mask are true."""
    if func in (_nonzero, _select):
        return isinstance(args[-1], FakeTensor)
    if func is _bincount:
        return isinstance(args[0], FakeTensor) and len(args) > 2 and args[2] > 0
    if func is _index:
        return any(map(_is_mask, args[1]))
    return _is_nms(func) and isinstance(args[0], FakeTensor)


def are_known(func: Any, args: Sequence[Any]) -> bool:
    """Whether the numbers of the masks by which such an op picks are known."""
    masks = [index for index in args[1] if _is_mask(index)] if func is _index else [args[-1]]
    return func in (_select, _index) and all(known(mask) is not None for mask in masks)


def _is_nms(func: Any) -> bool:  # by its name, as torchvision need not be there
    return str(func) == "torchvision.nms.default"


def _is_mask(index: Any) -> bool:
    return isinstance(index, FakeTensor) and index.dtype in (torch.bool, torch.uint8)


def as_if_all_were_true(func: Any, args: Sequence[Any]) -> Tensor:
    """The outcome of such an op; called with the fake mode on. Of a mask whose numbers are known it is the true one."""
    x = args[0]
    if func is _nonzero:
        return torch.empty(x.dim(), x.numel(), dtype=torch.int64).t()
    if func is _select:
        shape = torch.broadcast_shapes(x.shape, args[1].shape)
        return torch.empty(_picked(args[1], shape), dtype=x.dtype)
    if _is_nms(func):
        return torch.empty(len(x), dtype=torch.int64)
    if func is _bincount:  # of numbers below `minlength`: it is the number of classes
        return torch.empty(args[2], dtype=torch.int64 if args[1] is None else args[1].dtype)
    indices: list[Tensor | None] = []
    for index in args[1]:
        if _is_mask(index):
            indices += torch.empty(index.dim(), _picked(index, index.shape), dtype=torch.int64).unbind()
        else:
            indices.append(index)
    return _index(x, indices)  # type: ignore[no-any-return]


def _picked(mask: Tensor, shape: torch.Size) -> int:
    """How many elements of a tensor of this shape a mask picks: all, where it is not known."""
    values = known(mask)
    if values is None:
        return shape.numel()
    with torch._C._DisableTorchDispatch():
        return int(values.expand(shape).count_nonzero())
