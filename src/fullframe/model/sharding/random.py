"""What is drawn into sharded tensors, and initial values that need the whole: as one process has them.

All ranks of a replica draw the whole, and keep their parts. Torch would let each draw its part, on the host all alike,
as their random states are the same.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

_INTO = ("normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_", "random_")
_ELSEWHERE = ("rand_like", "randn_like", "randint_like", "bernoulli")
_INITIAL = ("trunc_normal_", "orthogonal_", "sparse_", "eye_", "dirac_")  # others draw, or need nothing


def draw_whole() -> None:
    """From now on random numbers in sharded tensors, and what `nn.init` makes of them, are one process's."""
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    for name in (*_INTO, *_ELSEWHERE):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads():
            handlers[getattr(packet, overload)] = _drawn
    for name in _INITIAL:
        setattr(nn.init, name, _of_the_whole(getattr(nn.init, name)))


def _drawn(op: Any, args: Any, kwargs: Any) -> Any:
    first, *others = args
    others, kwargs = tree_map_only(DTensor, lambda value: value.full_tensor(), (others, kwargs))
    whole = op(first.full_tensor() if op is torch.ops.aten.bernoulli.default else _empty(first), *others, **kwargs)
    made = distribute_tensor(whole, first.device_mesh, first.placements, src_data_rank=None)
    if not op._schema.name.endswith("_"):
        return made
    first._local_tensor.copy_(made._local_tensor)
    return first


def _of_the_whole(initialize: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(initialize)
    def initializing(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return initialize(tensor, *args, **kwargs)
        tensor.data = initialize(_empty(tensor), *args, **kwargs)
        return tensor

    return initializing


def _empty(like: Any) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)
