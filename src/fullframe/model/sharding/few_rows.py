"""The largest and smallest of sharded tensors with fewer rows than ranks, such as a head's of one channel.

Torch asks each rank for those of its part, which is an error on a rank that has none, while the others wait for it.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map_only

_aten: Any = torch.ops.aten
_EXTREMES = (_aten.max.default, _aten.min.default, _aten.amax.default, _aten.amin.default, _aten._foreach_max.default)
_PLACES = (_aten.argmax.default, _aten.argmin.default)
_NORMS = (_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar)  # the infinite ones are extremes


def take_extremes_of_few_rows() -> None:
    """From now on they are one process's."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for op in (*_EXTREMES, *_PLACES, *_NORMS):
        handlers[op] = _of_whole(handlers, handlers.get(op))


def _of_whole(handlers: Any, before: Callable[..., Any] | None) -> Callable[..., Any]:
    def reduce(op: Any, args: Any, kwargs: Any) -> Any:
        if op not in _NORMS or any(isinstance(order, (int, float)) and math.isinf(order) for order in args[1:2]):
            args = tree_map_only(DTensor, _gathered_if_few, args)
        if before is not None:
            return before(op, args, kwargs)
        own = handlers.pop(op)
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = own

    return reduce


def _gathered_if_few(value: Any) -> Any:
    shards = ((p.dim, axis) for axis, p in enumerate(value.placements) if p.is_shard())
    if any(leaves_one_without(value.shape[dim], value.device_mesh.size(axis)) for dim, axis in shards):
        return value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return value


def leaves_one_without(rows: int, ranks: int) -> bool:
    """Whether a rank gets none of `rows`: all get as many, but for the last that get any."""
    return 0 < rows <= -(-rows // ranks) * (ranks - 1)
