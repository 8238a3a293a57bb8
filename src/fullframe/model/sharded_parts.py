"""Rows of sharded tensors can be read, and not written to: torch gathers them into a copy, in which writes are lost."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_iter, tree_map_only

from fullframe.errors import StrategyError
from fullframe.spatial.rules.registry import writes
from fullframe.spatial.views import share_memory

_VIEWS = ("__getitem__", "narrow", "select", "chunk", "split", "tensor_split", "hsplit", "vsplit", "diagonal")


class CopiedPart(DTensor):
    """What in one process would be a view of a parameter. Raises StrategyError where it is written to."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        first = next(iter((*args, *given.values())), None)  # nn.init passes it by its name
        written = [given.get("out"), first if writes(func, given) else None]
        if any(isinstance(leaf, cls) for leaf in tree_iter(written)):
            _refuse()
        with torch._C.DisableTorchFunctionSubclass():
            return _marked(func(*args, **given), first)


def refuse_lost_writes() -> None:
    """From now on a write to rows of a sharded tensor raises StrategyError."""
    for name in _VIEWS:
        setattr(DTensor, name, _marking(getattr(Tensor, name)))
    DTensor.__setitem__ = _set_rows  # type: ignore[method-assign]


def _marking(view: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(view)
    def marking(whole: Any, *args: Any, **kwargs: Any) -> Any:
        return _marked(view(whole, *args, **kwargs), whole)

    return marking


def _marked(made: Any, of: Any) -> Any:
    return tree_map_only(DTensor, lambda part: _mark(part, of), made)


def _mark(part: Any, of: Any) -> Any:
    shares = isinstance(of, DTensor) and share_memory(part._local_tensor, of._local_tensor)
    if type(part) is DTensor and (shares if isinstance(of, CopiedPart) else part._is_view() and not shares):
        part.__class__ = CopiedPart
    return part


def _set_rows(whole: Any, where: Any, value: Any) -> None:
    if any(placement.is_shard() for placement in whole.placements):
        _refuse()
    Tensor.__setitem__(whole, where, value)


def _refuse() -> NoReturn:
    raise StrategyError(
        "rows of a sharded tensor are written to, of which each rank has some; write to the whole, "
        "whole = parameter.full_tensor().detach(), and then parameter.data = whole, on all ranks, or do it before "
        "parallelize"
    )
