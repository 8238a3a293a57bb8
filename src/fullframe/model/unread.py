"""Tensors whose values nobody may read yet: a stand-in, where what one process would have by then is not known."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fullframe.errors import StrategyError

_ABOUT = {  # what tells nothing of the values
    Tensor.as_subclass,
    Tensor.is_inference,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "nbytes", "requires_grad", "_version")),
}


class Unread(Tensor):
    """Raises StrategyError, with its `reason`, where an operation would read it."""

    reason: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise StrategyError(next(leaf.reason for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Unread)))


def unread(tensor: Tensor, reason: str) -> Unread:
    """The tensor, unread."""
    made = tensor.as_subclass(Unread)
    made.reason = reason
    return made


def copy_of(tensor: Tensor) -> Tensor:
    """A copy without a graph, for one who puts it back and does not read it either."""
    return (tensor.as_subclass(Tensor) if isinstance(tensor, Unread) else tensor).detach().clone()
