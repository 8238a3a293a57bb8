"""Softmax and its logarithm: along a whole dim each rank computes its own, along a split one the ranks sum up."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fullframe.ranks.collectives import all_gather_no_grad, all_sum, all_sum_no_grad
from fullframe.spatial.rules.reduction import wide
from fullframe.spatial.rules.registry import rule
from fullframe.spatial.tensor import SpatialTensor, local_of, wrap

_SOFTMAX = F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax
_LOG_SOFTMAX = F.log_softmax, torch.log_softmax, Tensor.log_softmax, torch.special.log_softmax


class _Softmax(torch.autograd.Function):
    """Softmax, or its logarithm, along a dim that is spread over the ranks of `group`; keeps its result alone."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, dim: int, group: dist.ProcessGroup, log: bool) -> Tensor:
        top = torch.amax(all_gather_no_grad(torch.amax(local, dim, True), group), 0)
        shifted = local.to(wide(local.dtype)) - top
        powers = shifted.exp()
        total = all_sum_no_grad(powers.sum(dim, True), group)
        result = (shifted.sub_(total.log_()) if log else powers.div_(total)).to(local.dtype)
        ctx.save_for_backward(result)
        ctx.where = dim, group, log
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (result,), (dim, group, log) = ctx.saved_tensors, ctx.where
        kind = wide(result.dtype)
        given, result = gradient.to(kind), result.to(kind)
        total = all_sum((given if log else given * result).sum(dim, True), group)
        slope = given - result.exp() * total if log else result * (given - total)
        return slope.to(gradient.dtype), None, None, None


@rule(*_SOFTMAX, *_LOG_SOFTMAX)
def _softmax(func: Any, x: SpatialTensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
    """Along any dim; along a split one the ranks agree on the largest value and the sum of powers."""
    if isinstance(_stacklevel, torch.dtype):  # torch.softmax has it in third place, F.softmax in fourth
        dtype = _stacklevel
    if dim is None:
        dim = 0 if x.dim() in (0, 1, 3) else 1  # as torch does, which advises to name it
    spec, local = x.spec, local_of(x)
    if not spec.is_split(dim):
        return wrap(func(local, dim, dtype=dtype), spec)
    spec.require_filled()
    axes = [p.axis for p in spec.cuts(dim)]
    local = local if dtype is None else local.to(dtype)
    return wrap(_Softmax.apply(local, dim, spec.spatial.group(axes), func in _LOG_SOFTMAX), spec)  # type: ignore[no-untyped-call]


@rule(F.softmin)
def _softmin(func: Any, x: SpatialTensor, dim: int | None = None, _stacklevel: int = 3, dtype: Any = None) -> Tensor:
    """The softmax of the negative."""
    return F.softmax(-x, dim, dtype=dtype)
