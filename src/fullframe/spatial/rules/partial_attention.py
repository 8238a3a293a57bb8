"""Attention of which each rank holds a part of the keys: the ranks' softmaxes become one, and the scores are not kept.

Also for what torch's fused kernels do not do with little memory: dropout, and masks that have a gradient.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks.collectives import all_gather_no_grad, all_sum, all_sum_no_grad
from fullframe.spatial.rules.reduction import wide
from fullframe.spatial.second_derivative import gradients_of


class How(NamedTuple):
    """What beside the tensors says how to attend."""

    scale: float
    group: dist.ProcessGroup | None  # the ranks that hold parts of the keys; None where this one holds all
    dropout: float = 0.0
    seed: int = 0  # of what this rank drops


def partial_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: How) -> Tensor:
    """(..., L, E), (..., S, E), (..., S, F), mask (..., L, S): (..., L, F), over the keys of all ranks of the group.

    What goes over the ranks is of the size of queries and result. Rows without a key that may be seen are zero.
    """
    with torch.autocast(query.device.type, enabled=False):
        return _PartialAttention.apply(query, key, value, mask, how)  # type: ignore[no-any-return, no-untyped-call]


class _PartialAttention(torch.autograd.Function):
    """Keeps queries, keys, values, result and the logarithm of each row's sum of powers; scores are made again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: How) -> Tensor:
        scores = _scores(query, key, mask, how.scale)
        top = torch.cat([scores, scores.new_full((*scores.shape[:-1], 1), -torch.inf)], -1).amax(-1, True)
        if how.group is not None:
            top = all_gather_no_grad(top, how.group).amax(0)
        top = top.masked_fill(top == -torch.inf, 0)
        total = _over_ranks(scores.sub_(top).exp_().sum(-1, True), how)
        total = total.masked_fill(total == 0, 1)
        weights = scores.div_(total)
        kept = _kept(weights, how)
        result = (weights if kept is None else weights * kept) @ value.to(weights.dtype)
        result = _over_ranks(result, how).to(value.dtype)
        ctx.save_for_backward(query, key, value, mask, result, top + total.log())
        ctx.how = how
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        how: How = ctx.how
        query, key, value, mask, result, logarithm = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            given = [query, key, value, *([mask] if ctx.needs_input_grad[3] else [])]
            again = partial(_attended, fixed=mask, logarithm=logarithm, how=how)
            found = gradients_of(again, given, gradient, ctx.needs_input_grad[: len(given)])
            return *found, *(None,) * (5 - len(given))
        weights = _scores(query, key, mask, how.scale).sub_(logarithm).exp_()
        kind = weights.dtype
        gradient = _over_ranks(gradient.to(kind), how)
        kept = _kept(weights, how)
        slope = gradient @ value.to(kind).transpose(-2, -1)  # of the weights, then of the scores
        of_value = (weights if kept is None else weights * kept).transpose(-2, -1) @ gradient
        slope = slope if kept is None else slope.mul_(kept)
        slope = slope.sub_((gradient * result.to(kind)).sum(-1, True)).mul_(weights)
        of_query = (slope @ key.to(kind)).mul_(how.scale)
        of_key = (slope.transpose(-2, -1) @ query.to(kind)).mul_(how.scale)
        of_mask = _as(slope, mask) if ctx.needs_input_grad[3] else None
        return _as(of_query, query), _as(of_key, key), _as(of_value, value), of_mask, None


def _attended(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, fixed: Tensor | None, logarithm: Tensor,
    how: How,
) -> Tensor:  # fmt: skip
    """The same made of differentiable functions: more memory, and derivatives of any order; a mask may be `fixed`."""
    weights = (_scores(query, key, fixed if mask is None else mask, how.scale) - logarithm).exp()
    total = _summed(weights.sum(-1, True), how)  # 1, or 0 of a row without keys
    weights = weights / total.masked_fill(total == 0, 1)
    kept = _kept(weights, how)
    return _summed((weights if kept is None else weights * kept) @ value.to(weights.dtype), how).to(value.dtype)


def _summed(value: Tensor, how: How) -> Tensor:
    return value if how.group is None else all_sum(value, how.group)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    kind = wide(query.dtype)
    scores = (query.to(kind) * scale) @ key.to(kind).transpose(-2, -1)
    if mask is None:
        return scores
    if mask.dtype == torch.bool:  # added as torch does it: what is not finite is not hidden by a mask
        mask = torch.zeros(mask.shape, dtype=kind, device=mask.device).masked_fill_(mask.logical_not(), -torch.inf)
    return scores + mask.to(kind)


def _over_ranks(value: Tensor, how: How) -> Tensor:
    return value if how.group is None else all_sum_no_grad(value, how.group)


def _kept(weights: Tensor, how: How) -> Tensor | None:
    """What each weight is multiplied by: 0 where it is dropped; None without dropout."""
    if not how.dropout:
        return None
    generator = torch.Generator(weights.device).manual_seed(how.seed)
    kept = torch.empty_like(weights).bernoulli_(1 - how.dropout, generator=generator)
    return kept.div_(1 - how.dropout) if how.dropout < 1 else kept


def _as(gradient: Tensor, operand: Tensor) -> Tensor:
    """The gradient of an operand that was broadcast."""
    return gradient.sum_to_size(operand.shape).to(operand.dtype)
