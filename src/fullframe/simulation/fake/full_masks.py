"""Ops whose result has as many rows as a mask has true elements, or as boxes are kept: as if every one were.

So what a simulation says of memory and time is an upper bound, for any mask and any boxes. What a mask counts is taken
for all of it too, where a number may be taken at all.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from fullframe.simulation.fake.numbers import known

FULL_MASKS = (
    "a mask, nms, the lengths of ctc_loss or the rank of lstsq pick by values, which a simulation does not have: all "
    "elements are taken as picked, an upper bound"
)

_aten = torch.ops.aten
_nonzero, _select, _index = _aten.nonzero.default, _aten.masked_select.default, _aten.index.Tensor
_COUNTS = frozenset(
    (torch.sum, Tensor.sum, torch.count_nonzero, Tensor.count_nonzero,
     _aten.sum.default, _aten.sum.dim_IntList, _aten.count_nonzero.default)
)  # fmt: skip
_bincount, _ctc, _lstsq = _aten.bincount.default, _aten._ctc_loss.Tensor, _aten.linalg_lstsq.default


def picks_by_value(func: Any, args: Sequence[Any]) -> bool:
    """Whether the shape of what an op gives depends on which elements of a mask are true; of an op on fake tensors."""
    if func in (_nonzero, _select):
        return any(isinstance(arg, FakeTensor) for arg in args)
    if func in (_ctc, _lstsq):
        return isinstance(args[0], FakeTensor)
    if func is _bincount:
        return isinstance(args[0], FakeTensor) and len(args) > 2 and args[2] > 0
    if func is _index:
        return any(map(_is_mask, args[1]))
    return _is_nms(func) and isinstance(args[0], FakeTensor)


def are_known(func: Any, args: Sequence[Any]) -> bool:
    """Whether the numbers of the masks by which such an op picks are known."""
    if func is _ctc:
        return known(args[3]) is not None
    masks = [index for index in args[1] if _is_mask(index)] if func is _index else [args[-1]]
    return func in (_select, _index) and all(_values(mask) is not None for mask in masks)


def count_as_full(func: Any, args: Sequence[Any], count: Any) -> None:
    """What a mask, split or not, counts is taken for the size of it; called with what any function has given."""
    if func in _COUNTS and args and args[0].dtype is torch.bool and type(count) is FakeTensor and count.numel() == 1:
        with torch._C._DisableTorchDispatch():
            count.taken_for = torch.tensor(math.prod(args[0].shape), dtype=count.dtype)  # type: ignore[attr-defined]


def _is_nms(func: Any) -> bool:  # by its name, as torchvision need not be there
    return str(func) == "torchvision.nms.default"


def _is_mask(index: Any) -> bool:  # fake, or a model's own
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def as_if_all_were_true(func: Any, args: Sequence[Any]) -> Any:
    """The outcome of such an op; called with the fake mode on. Of a mask whose numbers are known it is the true one."""
    x = args[0]
    if func is _nonzero:
        return torch.empty(x.dim(), x.numel(), dtype=torch.int64).t()
    if func is _select:
        shape = torch.broadcast_shapes(x.shape, args[1].shape)
        return torch.empty(_picked(args[1], shape), dtype=x.dtype)
    if func is _ctc:
        return _of_longest(*args[:4])
    if func is _lstsq:
        return _of_full_rank(*args[:2])
    if _is_nms(func):
        return torch.empty(len(x), dtype=torch.int64)
    if func is _bincount:  # of numbers below `minlength`: it is the number of classes
        return torch.empty(args[2], dtype=torch.int64 if args[1] is None else args[1].dtype)
    picks = [_picked(each, each.shape) if _is_mask(each) else _last(each) for each in args[1]]
    together = min((picked for picked in picks if picked != 1), default=1)  # of tensors that are broadcast
    indices: list[Tensor | None] = []
    for index, picked in zip(args[1], picks, strict=True):
        if _is_mask(index):
            picked = picked if _values(index) is not None else min(picked, together)
            indices += torch.empty(index.dim(), picked, dtype=torch.int64).unbind()
        else:
            indices.append(index)
    return _index(x, indices)


def _of_longest(log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor) -> list[Tensor]:
    """What `ctc_loss` gives, and keeps for its derivative, of the longest target: a row of (N, S), or all of one."""
    values, samples = known(target_lengths), log_probs.shape[1]
    longest = targets.shape[-1]
    if values is not None:
        with torch._C._DisableTorchDispatch():
            longest = int(values.max())
    alpha = log_probs.new_empty(samples, log_probs.shape[0], 2 * longest + 1)
    return [log_probs.new_empty(samples), alpha]


def _of_full_rank(a: Tensor, b: Tensor) -> list[Tensor]:
    """Solution, residuals, rank and singular values of matrices (..., M, N) of full rank, as the usual drivers say."""
    (rows, columns), batch = a.shape[-2:], a.shape[:-2]
    is_vector = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    sides = () if is_vector else b.shape[-1:]
    residuals = (*batch, *sides) if rows > columns else (0,)
    return [
        a.new_empty(*batch, columns, *sides),
        a.new_empty(residuals),
        a.new_empty(batch, dtype=torch.int64),
        a.new_empty(0),
    ]


def _last(index: Tensor | None) -> int:
    return 1 if index is None or not index.dim() else index.shape[-1]


def _values(mask: Tensor) -> Tensor | None:
    return known(mask) if isinstance(mask, FakeTensor) else mask


def _picked(mask: Tensor, shape: torch.Size) -> int:
    """How many elements of a tensor of this shape a mask picks: all, where it is not known."""
    values = _values(mask)
    if values is None:
        return shape.numel()
    with torch._C._DisableTorchDispatch():
        return int(values.expand(shape).count_nonzero())
