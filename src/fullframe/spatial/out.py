"""`out=`: a result is written into the tensors that the program gives for it."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from fullframe.spatial.fallback import name_of
from fullframe.spatial.rules.registry import Unsupported
from fullframe.spatial.tensor import SpatialTensor


def into(target: Any, result: Any, func: Any) -> Any:
    """`out=`: the result is written into the tensors of `target` as torch does it."""
    targets = [target] if isinstance(target, Tensor) else list(target)
    results = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)]
    for goal, value in zip(targets, results, strict=True):
        _check_out(goal, value, func)
    for goal, value in zip(targets, results, strict=True):
        with torch.no_grad():
            goal.copy_(value)
    if isinstance(target, Tensor):
        return target
    if type(result) in (tuple, list):  # of `unbind_copy` and its like, which return nothing
        return None
    return getattr(torch.return_types, f"{type(result).__name__}_out", type(result))(targets)


def _check_out(goal: Tensor, value: Tensor, func: Any) -> None:
    name = name_of(func)
    if torch.is_grad_enabled() and (goal.requires_grad or value.requires_grad):
        raise RuntimeError(f"{name}(): functions with out=... arguments don't support automatic differentiation")
    if not torch.can_cast(value.dtype, goal.dtype):
        raise RuntimeError(f"result type {value.dtype} can't be cast to the desired output type {goal.dtype}")
    if goal.dtype != value.dtype:  # some functions convert, some raise
        raise Unsupported(f"out= is of {goal.dtype}, the result of {value.dtype}", "Give out= the result's dtype.")
    if tuple(goal.shape) != tuple(value.shape):
        raise Unsupported(f"out= has shape {tuple(goal.shape)}, the result {tuple(value.shape)}", "Give out= its size.")
    if isinstance(value, SpatialTensor) and not isinstance(goal, SpatialTensor):
        raise Unsupported("out= is whole and the result split", "Leave out= away, or give a split tensor.")
