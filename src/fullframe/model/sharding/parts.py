"""Rows of sharded tensors can be read, and not written to: torch gathers them into a copy, in which writes are lost."""

from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_any_only, tree_leaves, tree_map_only

from fullframe.errors import StrategyError
from fullframe.spatial.views import share_memory


class CopiedPart(Tensor):
    """What this rank has of what would be a view of a parameter in one process, and is a copy of it here.

    Raises StrategyError where it is written to.
    """

    copied: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor) -> "CopiedPart":
        made: CopiedPart = Tensor._make_wrapper_subclass(
            cls, values.shape, values.stride(), values.storage_offset(), dtype=values.dtype, device=values.device
        )
        made.copied = values
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            value = args[number] if number < len(args) else given.get(argument.name)
            if argument.is_write and tree_any_only(cls, lambda part: True, value):
                _refuse()
        args, given = tree_map_only(cls, lambda part: part.copied, (args, given))
        made = func(*args, **given)
        return tree_map_only(Tensor, cls, made) if _is_view(func) else made

    def numpy(self, *, force: bool = False) -> Any:
        return self.copied.numpy(force=force)

    def tolist(self) -> Any:
        return self.copied.tolist()


def refuse_lost_writes() -> None:
    """From now on a write to rows of a sharded tensor raises StrategyError."""
    dispatcher: Any = DTensor._op_dispatcher
    in_torchs_way = dispatcher._dispatch_get_local_results_slow_path  # the one way in which arguments are gathered

    @wraps(in_torchs_way)
    def local_results(op: Any, args: Any, info: Any) -> Any:
        made = in_torchs_way(op, args, info)
        if not _is_view(op):
            return made
        held = [value._local_tensor for value in tree_leaves(args) if isinstance(value, DTensor)]
        return tree_map_only(Tensor, lambda own: _copied(own) if _is_apart(own, held) else own, made)

    dispatcher._dispatch_get_local_results_slow_path = local_results
    DTensor.__setitem__ = _set_rows  # type: ignore[method-assign]


def _is_apart(own: Tensor, held: list[Tensor]) -> bool:
    return not any(share_memory(own, of) for of in held)


def _copied(values: Tensor) -> CopiedPart:
    return values if isinstance(values, CopiedPart) else CopiedPart(values)


def _is_view(func: Any) -> bool:
    """Whether what the operator makes shares memory with what it is given."""
    return any(made.alias_info is not None and not made.alias_info.is_write for made in func._schema.returns)


def _set_rows(whole: Any, where: Any, value: Any) -> None:
    of_each = isinstance(where, DTensor) and where.dtype is torch.bool and where.shape == whole.shape
    if of_each and isinstance(value, (int, float)):
        whole.masked_fill_(where, value)  # each number by itself, as Rprop's step does
        return
    if any(placement.is_shard() for placement in whole.placements):
        _refuse()
    Tensor.__setitem__(whole, where, value)


def _refuse() -> NoReturn:
    raise StrategyError(
        "rows of a sharded tensor are written to, of which each rank has some; write to the whole, "
        "whole = parameter.full_tensor().detach(), and then parameter.data = whole, on all ranks, or do it before "
        "parallelize"
    )
