"""Batch, instance, group and layer norm with the statistics of the whole image.

One function serves the first three: channels are normalised in groups of `m` (batch and instance norm: 1), each rank
contributes its count, means and variances, and backward keeps only the input and the statistics.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from fullframe.spatial.exchange import gathered, summed
from fullframe.spatial.rules.reduction import count
from fullframe.spatial.rules.registry import Refused, rule
from fullframe.spatial.tensor import Layout, SpatialTensor, local_of, wrap


class _Statistics(NamedTuple):
    """Per channel, each group's value repeated for its channels: (channels,)."""

    mean: Tensor
    var: Tensor  # biased
    elements: Tensor | float  # that each was computed from, over all ranks


@torch.no_grad()
def _statistics(x: Tensor, m: int, group: dist.ProcessGroup) -> _Statistics:
    """Statistics of x (N, channels, ...) over all dims but 1, over the ranks of `group`, pooled over `m` channels."""
    dims = [d for d in range(x.dim()) if d != 1]
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    mean = wide.mean(dims)
    distance = wide - mean.view(-1, *(1,) * (x.dim() - 2))  # a third of torch.var_mean's time, freed before the result
    var = distance.square_().mean(dims)
    del distance
    elements = mean.new_full((1,), x.numel() / x.shape[1])
    everyone = gathered(torch.cat([mean, var, elements]), group)  # (ranks, 2 * channels + 1)
    counts = everyone[:, -1:, None]  # (ranks, 1, 1)
    means, variances = everyone[:, :-1].view(len(everyone), 2, -1, m).unbind(1)  # (ranks, groups, m)
    total = counts.sum() * m
    center = (means * counts).sum((0, 2)) / total  # (groups,)
    spread = (counts * (variances + (means - center[:, None]) ** 2)).sum((0, 2)) / total
    return _Statistics(center.repeat_interleave(m), spread.repeat_interleave(m), total)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, found: _Statistics, m: int, eps: float, group: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight, found.mean, found.var, found.elements)
        ctx.m, ctx.eps, ctx.group = m, eps, group
        return _normalized(x, weight, bias, found.mean, found.var, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, mean, var, elements = ctx.saved_tensors
        of_x, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            grad, x, weight, mean, var, None, None, False, ctx.eps, [True, True, True]
        )  # as if the statistics were constants
        shares = torch.stack([weight * of_bias, weight * of_weight]).view(2, -1, ctx.m).sum(2)
        shares = summed(shares, ctx.group) if dist.get_world_size(ctx.group) > 1 else shares
        by_mean, by_var = shares.repeat_interleave(ctx.m, 1) / -elements
        inverse = torch.rsqrt(var + ctx.eps)
        of_x += _normalized(x, inverse * by_var, inverse * by_mean, mean, var, ctx.eps)
        return of_x, of_weight, of_bias, None, None, None, None


def _normalized(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, one kernel."""
    return torch.ops.aten.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]  # type: ignore[no-any-return]


def _apply(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, found: _Statistics, m: int, eps: float, group: Any
) -> Tensor:
    kind = found.mean.dtype
    weight = torch.ones_like(found.mean) if weight is None else weight.to(kind)
    bias = torch.zeros_like(found.mean) if bias is None else bias.to(kind)
    return _Normalize.apply(x, weight, bias, found, m, eps, group)  # type: ignore[no-any-return, no-untyped-call]


def _group(layout: Layout) -> dist.ProcessGroup:
    return layout.spatial.group([p.axis for p in layout.placements])


def _update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.lerp_(value.to(running.dtype), momentum)


@rule(F.batch_norm)
def _batch_norm(
    func: Any,
    input: SpatialTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    layout, x = input._layout, local_of(input)
    if layout.is_split(1):
        raise Refused("the channels are split")
    if not training:
        return wrap(func(x, running_mean, running_var, weight, bias, False, momentum, eps), layout)
    local = _over_ranks(x, running_mean, running_var, weight, bias, momentum, eps, _group(layout), 1)
    return wrap(local, layout)


def _over_ranks(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    group: dist.ProcessGroup,
    copies: int,
) -> Tensor:
    """Batch norm of the local `x` (N, C, ...) with the statistics of all ranks of `group`.

    Each value is held by `copies` of them, which weighs all alike.
    """
    if x.numel() == x.shape[1] and dist.get_world_size(group) == copies:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    found = _statistics(x, 1, group)
    elements = found.elements / copies
    _update(running_mean, found.mean, momentum)
    _update(running_var, found.var * (elements / (elements - 1)), momentum)
    return _apply(x, weight, bias, found, 1, eps, group)


class OverReplicas(TorchFunctionMode):
    """Inside, batch norm in training takes its statistics from all ranks of the job, split tensors or whole.

    `ranks` are those of a replica, which hold the same of what is whole.
    """

    def __init__(self, ranks: int):
        super().__init__()
        self._ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        return func(*args, **kwargs)

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training or (isinstance(input, SpatialTensor) and input._layout.is_split(1)):
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        everyone: Any = dist.group.WORLD
        options = running_mean, running_var, weight, bias, momentum, eps, everyone
        if not isinstance(input, SpatialTensor):
            return _over_ranks(input, *options, self._ranks)
        holders = dist.get_world_size(_group(input._layout))
        return wrap(_over_ranks(local_of(input), *options, self._ranks // holders), input._layout)


@rule(F.instance_norm)
def _instance_norm(
    func: Any,
    input: SpatialTensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    layout, x = input._layout, local_of(input)
    if layout.is_split(0) or layout.is_split(1):
        raise Refused("the samples or channels are split")
    if not use_input_stats:
        return wrap(func(x, running_mean, running_var, weight, bias, False, momentum, eps), layout)
    samples = x.shape[0]
    flat = x.reshape(1, -1, *x.shape[2:])
    found = _statistics(flat, 1, _group(layout))
    elements = count(layout.shape, range(2, len(layout.shape)))
    _update(running_mean, found.mean.view(samples, -1).mean(0), momentum)
    _update(running_var, found.var.view(samples, -1).mean(0) * (elements / max(elements - 1, 1)), momentum)
    weight, bias = (None if t is None else t.repeat(samples) for t in (weight, bias))
    return wrap(_apply(flat, weight, bias, found, 1, eps, _group(layout)).view_as(x), layout)


@rule(F.group_norm)
def _group_norm(
    func: Any,
    input: SpatialTensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    layout, x = input._layout, local_of(input)
    if layout.is_split(0) or layout.is_split(1):
        raise Refused("the samples or channels are split")
    samples, channels = x.shape[:2]
    if channels % num_groups:
        raise ValueError(f"{channels} channels are not divisible by {num_groups} groups")
    flat = x.reshape(1, -1, *x.shape[2:])
    m = channels // num_groups
    found = _statistics(flat, m, _group(layout))
    weight, bias = (None if t is None else t.repeat(samples) for t in (weight, bias))
    return wrap(_apply(flat, weight, bias, found, m, eps, _group(layout)).view_as(x), layout)


@rule(F.layer_norm)
def _layer_norm(
    func: Any,
    input: SpatialTensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    layout = input._layout
    dims = tuple(range(len(layout.shape) - len(normalized_shape), len(layout.shape)))
    if not any(layout.is_split(d) for d in dims):
        return wrap(func(local_of(input), normalized_shape, weight, bias, eps), layout)
    centered = input - input.mean(dims, keepdim=True)
    result = centered * torch.rsqrt(centered.square().mean(dims, keepdim=True) + eps)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


@rule(F.rms_norm)
def _rms_norm(
    func: Any, input: SpatialTensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    layout = input._layout
    dims = tuple(range(len(layout.shape) - len(normalized_shape), len(layout.shape)))
    if not any(layout.is_split(d) for d in dims):
        return wrap(func(local_of(input), normalized_shape, weight, eps), layout)
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    result = input * torch.rsqrt(input.square().mean(dims, keepdim=True) + eps)
    return result if weight is None else result * weight
