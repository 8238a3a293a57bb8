"""Means and variances of channels whose values lie on several ranks, in one message, and what normalizes by them.

Channels are normalized in groups of `m` (batch and instance norm: 1). Backward keeps the input and the statistics.
"""

import math
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks.collectives import all_gather_no_grad, all_sum, all_sum_no_grad
from fullframe.ranks.constants import constant
from fullframe.ranks.exchange import joined
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.mesh import axes_in, kept_with_mesh
from fullframe.spatial.second_derivative import gradients_of
from fullframe.spatial.spec import Spec

_aten = torch.ops.aten


class Holders(NamedTuple):
    """The ranks that hold a channel's values together, and how many each of them holds, where that is known to all."""

    group: dist.ProcessGroup
    elements: tuple[int, ...] | None
    copies: int = 1  # ranks that hold the same values, which count as often


class Statistics(NamedTuple):
    """Per channel, each group's value repeated for its channels: (channels,)."""

    mean: Tensor
    var: Tensor  # biased
    elements: Tensor | float  # that each was computed from, over all ranks


def holders(spec: Spec, channels: int) -> Holders:
    """Who holds the values of one of `channels` channels of a split tensor, none of which is split."""
    return Holders(spec.group, tuple(size // channels for size in sizes_on_ranks(spec)))


@kept_with_mesh(maxsize=4096)
def sizes_on_ranks(spec: Spec) -> tuple[int, ...]:
    """Elements of a tensor of `spec` on each rank of `spec.group`."""
    factors = math.prod(p.extents.size for p in spec.placements)
    rest = math.prod(spec.shape) // factors if factors else 0
    axes = [spec.spatial.axis(name) for name in axes_in(spec.spatial.joint([p.axis for p in spec.placements]))]
    sizes = []
    for numbers in product(*(range(axis.size) for axis in axes)):
        part = {axis.name: number for axis, number in zip(axes, numbers, strict=True)}
        held = [p.extents.sizes[_number(p.axis, part, spec)] for p in spec.placements]
        sizes.append(rest * math.prod(held))
    return tuple(sizes)


def _number(name: str, part: dict[str, int], spec: Spec) -> int:
    """The number along an axis, or several as one, of the rank whose number along each single axis is in `part`."""
    number = 0
    for own in axes_in(name):
        number = number * spec.spatial.axis(own).size + part[own]
    return number


def statistics(x: Tensor, m: int, over: Holders) -> Statistics:
    """Statistics of x (N, channels, ...) over all dims but 1 and the ranks `over`, pooled over `m` channels.

    They are without a gradient, which `normalized` knows.
    """
    found = list(_of_one_rank(x.detach()))
    if over.elements is None:
        found.append(found[0].new_full((1,), x.numel() / x.shape[1]))
    if dist.get_world_size(over.group) == 1 and m == 1:
        return Statistics(found[0], found[1], float(x.numel() / x.shape[1]))
    everyone = all_gather_no_grad(joined(found, 0), over.group)  # (ranks, 2 * channels), and the count
    if over.elements is None:
        counts, everyone = everyone[:, -1:, None] * m, everyone[:, :-1]
        elements: Tensor | float = counts.sum()
        mean, var = _pooled(everyone, counts / elements, m)
    else:
        elements = float(sum(over.elements) * m)
        known = tuple(own * m / elements if elements else 0.0 for own in over.elements)
        alike = len(set(known)) == 1
        mean, var = _pooled(everyone, None if alike else constant(known, everyone.dtype, x.device).view(-1, 1, 1), m)
    if m > 1:
        mean, var = mean.repeat_interleave(m), var.repeat_interleave(m)
    return Statistics(mean, var, elements)


def _pooled(everyone: Tensor, shares: Tensor | None, m: int) -> tuple[Tensor, Tensor]:
    """Mean and variance (groups,) of what all ranks found, (ranks, 2 * channels), by their `shares` (ranks, 1, 1).

    All have the same share where that is None.
    """
    means, variances = everyone.view(len(everyone), 2, -1, m).unbind(1)  # (ranks, groups, m)
    if shares is None:
        mean = means.mean((0, 2))
        distance = means - mean[:, None]
        return mean, torch.addcmul(variances, distance, distance).mean((0, 2))  # torch.var is ten times as slow
    shares = shares / m if m > 1 else shares
    mean = (means * shares).sum((0, 2))
    distance = means - mean[:, None]
    return mean, torch.addcmul(variances, distance, distance).mul_(shares).sum((0, 2))


def _of_one_rank(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel of x (N, channels, ...), in float32 or wider."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if not x.numel():  # a mask has picked nothing here
        return (wide.new_zeros(x.shape[1]),) * 2
    if x.device.type == "cpu" and memory_format_of(x) != torch.contiguous_format:  # which that kernel is made for
        return _aten.batch_norm_update_stats(wide, None, None, 0.0)  # type: ignore[no-any-return]
    dims = [d for d in range(x.dim()) if d != 1]
    mean = wide.mean(dims)
    squares = _aten.mse_loss(wide, _of_channels(mean, x.dim()), 0)  # of distances; a fifth of torch.var_mean's time
    return mean, squares.mean(dims)


def _of_channels(values: Tensor, dims: int) -> Tensor:
    """(channels,) as it broadcasts against (N, channels, ...)."""
    return values.view(-1, *(1,) * (dims - 2))


def normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, found: Statistics, m: int, eps: float,
    group: dist.ProcessGroup
) -> Tensor:  # fmt: skip
    """Of x (N, C, ...) normalized; `found` is of a channel, or of a sample's channel. Differentiable."""
    kind = found.mean.dtype
    copies = len(found.mean) // x.shape[1] if x.shape[1] else 1
    weight, bias = (_repeated(t, kind, copies) for t in (weight, bias))
    weight = torch.ones_like(found.mean) if weight is None else weight
    bias = torch.zeros_like(found.mean) if bias is None else bias
    apart = len(found.mean) != x.shape[1]
    return _Normalize.apply(x, weight, bias, found, apart, m, eps, group)  # type: ignore[no-any-return, no-untyped-call]


def _repeated(values: Tensor | None, kind: torch.dtype, copies: int) -> Tensor | None:
    if values is None:
        return None
    # Contiguous: where channels lie last the CPU's kernel reads them as if they were.
    return values.to(kind).repeat(copies) if copies > 1 else values.to(kind).contiguous()


class _Normalize(torch.autograd.Function):
    """x (N, C, ...) normalized; weight, bias and statistics are of a channel, or if `apart` of a sample's channel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, found: Statistics, apart: bool, m: int, eps: float,
        group: Any
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, found.mean, found.var)
        ctx.elements, ctx.apart, ctx.m, ctx.eps, ctx.group = found.elements, apart, m, eps, group
        flat = by_sample(x) if apart else x
        if not x.numel():  # a mask has picked nothing here; the kernel would end the process
            return torch.empty_like(x)
        out = _aten.native_batch_norm(flat, weight, bias, found.mean, found.var, False, 0.0, eps)[0]
        if apart:
            out = _aten._unsafe_view(out, x.shape)  # no view to autograd, which could not be written to
        if out.stride() != x.stride():
            out = out.contiguous(memory_format=memory_format_of(x))
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            again = partial(
                differentiable_norm, elements=ctx.elements, apart=ctx.apart, m=ctx.m, eps=ctx.eps, group=ctx.group
            )
            bias = torch.zeros_like(weight, requires_grad=True)
            return *gradients_of(again, [x, weight, bias], grad, ctx.needs_input_grad[:3]), *(None,) * 5
        shape, dtype, m = x.shape, x.dtype, ctx.m
        # In float32 or wider until the end: what is subtracted from the gradient may be almost all of it.
        grad, x = (t.contiguous(memory_format=memory_format_of(x)).to(weight.dtype) for t in (grad, x))
        if ctx.apart:
            x, grad = by_sample(x), by_sample(grad)
        fixed = mean, var, *_saved(mean, var, ctx.eps), False, ctx.eps
        if x.numel():
            of_x, of_weight, of_bias = _aten.native_batch_norm_backward(grad, x, weight, *fixed, [True, True, True])
        else:
            of_x, of_weight, of_bias = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(weight)
        sums = joined([of_bias, of_weight], 0).view(2, -1)
        if m > 1:
            sums = (sums * weight).view(2, -1, m).sum(2)
        sums = all_sum_no_grad(sums, ctx.group, into_itself=True) if dist.get_world_size(ctx.group) > 1 else sums
        alpha = -1.0
        if isinstance(ctx.elements, Tensor):
            sums = sums / ctx.elements
        else:
            alpha /= ctx.elements
        if m > 1:
            sums = sums.repeat_interleave(m, 1)
        if x.numel():
            # Both sums times weight / sqrt(var + eps), in one kernel: as the gradient of the normalization.
            by_mean, by_var = _aten.native_batch_norm_backward(
                sums, sums, weight if m == 1 else None, *fixed, [True, False, False]
            )[0]
            of_x.add_(_aten.native_batch_norm(x, by_var, by_mean, mean, var, False, 0.0, ctx.eps)[0], alpha=alpha)
        return of_x.to(dtype).view(shape), of_weight, of_bias, None, None, None, None, None


def _saved(mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor | None, Tensor | None]:
    """What the backward of a normalization by given statistics wants besides: on a GPU these again, as it was saved."""
    return (None, None) if mean.device.type == "cpu" else (mean, torch.rsqrt(var + eps))


def differentiable_norm(
    x: Tensor, weight: Tensor, bias: Tensor, elements: Tensor | float, apart: bool, m: int, eps: float, group: Any
) -> Tensor:
    """Of x (N, C, ...) normalized, made of differentiable pieces, which keep several copies of x for backward."""
    flat = (by_sample(x) if apart else x).to(weight.dtype)
    dims = [d for d in range(flat.dim()) if d != 1]

    def mean(values: Tensor) -> Tensor:
        sums = values.sum(dims).view(-1, m).sum(1)
        return _of_channels((all_sum(sums, group) / elements).repeat_interleave(m), flat.dim())

    distance = flat - mean(flat)
    slope = _of_channels(weight, flat.dim()) * torch.rsqrt(mean(distance.square()) + eps)
    return (distance * slope + _of_channels(bias, flat.dim())).to(x.dtype).view(x.shape)


def by_sample(x: Tensor) -> Tensor:
    """(N, C, ...) as one sample of N * C channels."""
    return x.reshape(1, -1, *x.shape[2:])
