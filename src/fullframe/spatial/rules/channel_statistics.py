"""Means and variances of channels whose values lie on several ranks, in one message, and what normalizes by them.

Channels are normalized in groups of `m` (batch and instance norm: 1). Backward keeps the input and the statistics.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fullframe.ranks.adjoint import applied, linear, unrecorded
from fullframe.ranks.collectives import all_gather_no_grad, all_sum_no_grad
from fullframe.ranks.constants import constant
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.mesh import axes_in, kept_with_mesh
from fullframe.ranks.recording import recorder
from fullframe.ranks.tags import line
from fullframe.spatial.second_derivative import gradients_of
from fullframe.spatial.spec import Spec

_aten = torch.ops.aten
_norm_backward = _aten.native_batch_norm_backward.default._op  # what the operator calls, having looked at what it is
# Elements of a map up to which torch's CPU kernel for statistics is quicker than the three calls that it stands for;
# of channels_last, which it is made for, it always is.
_SMALL = 8192
_WIDE = frozenset((torch.float32, torch.float64))
# Elements of a map from which backward is quicker without a map of its own for what the sums are subtracted from.
_LARGE = 65536
_ALL, _OF_INPUT, _OF_PARAMETERS = [True, True, True], [True, False, False], [False, True, True]  # of the gradients


_made = tuple.__new__  # of a named tuple, in half the time


class Holders(NamedTuple):
    """The ranks that hold a channel's values together, and how many each of them holds: None where not known to all."""

    group: dist.ProcessGroup
    elements: tuple[int, ...] | None
    copies: int = 1  # ranks that hold the same values as this one
    counts: bool = True  # whether this one's count, as those of one of the copies do

    def counted_of(self, x: Tensor) -> float:
        """How many values of a channel of x (N, channels, ...) this rank adds to all the ranks' ones."""
        return x.numel() / x.shape[1] if self.counts else 0.0

    def line(self) -> str | None:
        """Of the program, for messages between replicas, whose maps need not have one shape; None where all have it."""
        return line(with_op=False) if self.elements is None else None


class Statistics(NamedTuple):
    """Per channel, each group's value repeated for its channels: (channels,)."""

    mean: Tensor
    var: Tensor  # biased
    elements: Tensor | float  # that each was computed from, over all ranks


def holders(spec: Spec, channels: int) -> Holders:
    """Who holds the values of one of `channels` channels of a split tensor, none of which is split."""
    each = spec.plans.get((holders, channels))
    if each is None:
        each = spec.plans[holders, channels] = tuple(size // channels for size in sizes_on_ranks(spec))
    return _made(Holders, (spec.group, each, 1))


@kept_with_mesh(maxsize=4096)
def sizes_on_ranks(spec: Spec) -> tuple[int, ...]:
    """Elements of a tensor of `spec` on each rank of `spec.group`."""
    factors = math.prod(p.extents.size for p in spec.placements)
    rest = math.prod(spec.shape) // factors if factors else 0
    axes = [spec.spatial.axis(name) for name in axes_in(spec.spatial.joint([p.axis for p in spec.placements]))]
    sizes = []
    for numbers in product(*(range(axis.size) for axis in axes)):
        part = {axis.name: number for axis, number in zip(axes, numbers, strict=True)}
        held = [p.extents.sizes[spec.spatial.coordinate_at(p.axis, part)] for p in spec.placements]
        sizes.append(rest * math.prod(held))
    return tuple(sizes)


def statistics(x: Tensor, m: int, over: Holders) -> Statistics:
    """Statistics of x (N, channels, ...) over all dims but 1 and the ranks `over`, pooled over `m` channels.

    They are without a gradient; to be called where none is recorded.
    """
    mean, var = _of_one_rank(x)
    held = over.elements
    if held is None:
        return _statistics_and_counts(mean, var, over.counted_of(x), m, over)
    if m == 1 and len(held) == 1:
        return Statistics(mean, var, float(held[0]))
    everyone = all_gather_no_grad(torch.cat((mean, var)), over.group)  # (ranks, 2 * channels)
    elements, shares = _counted(held, m)
    each = None if shares is None else constant(shares, everyone.dtype, x.device).view(-1, 1, 1)
    mean, var = _pooled(everyone, each, m)
    if m > 1:
        mean, var = mean.repeat_interleave(m), var.repeat_interleave(m)
    return _made(Statistics, (mean, var, elements))


def _statistics_and_counts(mean: Tensor, var: Tensor, count: float, m: int, over: Holders) -> Statistics:
    """The same from what this rank found in `count` elements of a channel, where the others' counts must be told."""
    if m == 1 and dist.get_world_size(over.group) == 1:
        return Statistics(mean, var, count)
    found = torch.cat((mean, var, mean.new_full((1,), count)))
    everyone = all_gather_no_grad(found, over.group, at=over.line())
    counts, everyone = everyone[:, -1:, None] * m, everyone[:, :-1]
    elements = counts.sum()
    mean, var = _pooled(everyone, counts / elements, m)
    if m > 1:
        mean, var = mean.repeat_interleave(m), var.repeat_interleave(m)
    return Statistics(mean, var, elements)


@lru_cache(maxsize=4096)
def _counted(each: tuple[int, ...], m: int) -> tuple[float, tuple[float, ...] | None]:
    """How many elements `m` channels have, of which each rank has `each`, and what share that is; None where alike."""
    elements = float(sum(each) * m)
    shares = tuple(own * m / elements if elements else 0.0 for own in each)
    return elements, shares if len(set(shares)) > 1 else None


def _pooled(everyone: Tensor, shares: Tensor | None, m: int) -> tuple[Tensor, Tensor]:
    """Mean and variance (groups,) of what all ranks found, (ranks, 2 * channels), by their `shares` (ranks, 1, 1).

    All have the same share where that is None.
    """
    in_one_call = everyone.is_cpu and recorder() is None  # a compiler fuses the rest, and not this call
    if shares is None and m == 1 and in_one_call:  # of each column, over the ranks
        averages, spreads = torch.batch_norm_update_stats(everyone, None, None, 0.0)
        channels = averages.shape[0] // 2
        return averages[:channels], averages[channels:] + spreads[:channels]
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
    wide = x if x.dtype in _WIDE else x.float()
    size = x.numel()
    if not size:  # a mask has picked nothing here
        return (wide.new_zeros(x.shape[1]),) * 2
    is_small = size <= _SMALL or memory_format_of(x) != torch.contiguous_format
    if x.is_cpu and is_small and recorder() is None:
        return torch.batch_norm_update_stats(wide, None, None, 0.0)
    dims = [d for d in range(x.dim()) if d != 1]
    mean = wide.mean(dims)
    squares = _aten.mse_loss(wide, _of_channels(mean, x.dim()), 0)  # of distances; a fifth of torch.var_mean's time
    return mean, squares.mean(dims)


def _of_channels(values: Tensor, dims: int) -> Tensor:
    """(channels,) as it broadcasts against (N, channels, ...)."""
    return values.view(-1, *(1,) * (dims - 2))


# What a norm is called with beside tensors that have gradients: who holds a channel's values, how many channels make a
# group, whether each sample has statistics of its own, and eps. A plain tuple is made quicker.
_How = tuple[Holders, int, bool, float]


def normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, over: Holders, m: int, eps: float, apart: bool = False,
    update: Callable[[Statistics], None] | None = None,
) -> Tensor:  # fmt: skip
    """Of x (N, C, ...) normalized, over the ranks `over` and `m` channels, of each sample `apart` or of all.

    Differentiable. `update` is called with the statistics, one of a channel, or of a sample's channel.
    """
    kind = x.dtype if x.dtype is torch.float64 else torch.float32
    apart = apart and len(x) != 1
    copies = len(x) if apart else 1
    if weight is None or copies > 1 or weight.dtype is not kind or not weight.is_contiguous():
        weight = _repeated(weight, 1.0, x, kind, copies)
    if bias is None or copies > 1 or bias.dtype is not kind or not bias.is_contiguous():
        bias = _repeated(bias, 0.0, x, kind, copies)
    return _normalize(x, weight, bias, (over, m, apart, eps), update)  # type: ignore[no-any-return]


def _repeated(values: Tensor | None, otherwise: float, x: Tensor, kind: torch.dtype, copies: int) -> Tensor:
    """`values` of each channel of x, in `kind`, for each of some `copies` of them; `otherwise` where there are none."""
    if values is None:
        return torch.full((x.shape[1] * copies,), otherwise, dtype=kind, device=x.device)
    # Contiguous: where channels lie last the CPU's kernel reads them as if they were.
    return values.to(kind).repeat(copies) if copies > 1 else values.to(kind).contiguous()


class _Normalize(torch.autograd.Function):
    """x (N, C, ...) normalized; weight, bias and statistics are of a channel, or if `apart` of a sample's channel."""

    @staticmethod
    @unrecorded
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, how: _How, update: Callable[[Statistics], None] | None
    ) -> Tensor:
        over, m, apart, eps = how
        flat = by_sample(x) if apart else x
        found = statistics(flat, m, over)
        if update is not None:
            update(found)
        mean, var, ctx.elements = found
        ctx.save_for_backward(x, weight, mean, var)
        ctx.how = how  # without `update`, which knows the input, that recompute lets go of
        if not x.numel():  # a mask has picked nothing here; the kernel would end the process
            return torch.empty_like(x)
        out = torch.native_batch_norm(flat, weight, bias, mean, var, False, 0.0, eps)[0]
        if apart:
            out = _aten._unsafe_view(out, x.shape)  # no view to autograd, which could not be written to
        if out.stride() != x.stride():
            out = out.contiguous(memory_format=memory_format_of(x))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, mean, var = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            over, m, apart, eps = ctx.how
            again = partial(differentiable_norm, elements=ctx.elements, apart=apart, m=m, eps=eps, over=over)
            bias = torch.zeros_like(weight, requires_grad=True)
            return *gradients_of(again, [x, weight, bias], grad, ctx.needs_input_grad[:3]), None, None
        return *_gradients(grad, x, weight, mean, var, ctx.elements, ctx.how), None, None


_normalize = applied(_Normalize)


@unrecorded
def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, var: Tensor, elements: Tensor | float, how: _How
) -> tuple[Tensor, Tensor, Tensor]:
    """Of (input, weight, bias), from that of the result."""
    over, m, apart, eps = how
    shape, dtype = x.shape, x.dtype
    if not (x.is_contiguous() and grad.is_contiguous()):
        grad, x = (t.contiguous(memory_format=memory_format_of(x)) for t in (grad, x))
    if dtype is not weight.dtype or grad.dtype is not dtype:
        # In float32 or wider until the end: what is subtracted from the gradient may be almost all of it.
        grad, x = grad.to(weight.dtype), x.to(weight.dtype)
    if apart:
        x, grad = by_sample(x), by_sample(grad)
    saved = (None, None) if mean.is_cpu else (mean, torch.rsqrt(var + eps))  # which a GPU's kernel wants once more
    fixed = mean, var, *saved, False, eps
    size = x.numel()
    if size:
        wanted = _ALL if size <= _LARGE else _OF_PARAMETERS
        of_x, of_weight, of_bias = _norm_backward(grad, x, weight, *fixed, wanted)
    else:
        of_x, of_weight, of_bias = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(weight)
    sums = torch.cat((of_bias, of_weight)).view(2, -1)
    if m > 1:
        sums = (sums * weight).view(2, -1, m).sum(2)
    sums = gradient_of_sums(sums, over)
    alpha = -1.0
    if isinstance(elements, Tensor):
        sums = sums / elements
    else:
        alpha /= elements
    if m > 1:
        sums = sums.repeat_interleave(m, 1)
    if size:
        # Both sums times weight / sqrt(var + eps), in one kernel: as the gradient of the normalization.
        both = _norm_backward(sums, sums, weight if m == 1 else None, *fixed, _OF_INPUT)[0]
        if size > _LARGE:
            both.mul_(alpha)
        by_mean, by_var = both.unbind()
        moved = torch.native_batch_norm(x, by_var, by_mean, mean, var, False, 0.0, eps)[0]
        if size > _LARGE:
            of_x = moved.addcmul_(grad, _of_channels(weight * torch.rsqrt(var + eps), x.dim()))
        else:
            of_x.add_(moved, alpha=alpha)
    of_x = of_x if dtype is of_x.dtype else of_x.to(dtype)
    return of_x.view(shape) if apart else of_x, of_weight, of_bias


def differentiable_norm(
    x: Tensor, weight: Tensor, bias: Tensor, elements: Tensor | float, apart: bool, m: int, eps: float, over: Holders
) -> Tensor:
    """Of x (N, C, ...) normalized, made of differentiable pieces, which keep several copies of x for backward."""
    flat = (by_sample(x) if apart else x).to(weight.dtype)
    dims = [d for d in range(flat.dim()) if d != 1]

    def add(sums: Tensor) -> Tensor:
        return all_sum_no_grad(sums / over.copies, over.group, at=over.line())

    def back(gradient: Tensor) -> Tensor:
        return gradient_of_sums(gradient.clone(memory_format=torch.contiguous_format), over)

    def mean(values: Tensor) -> Tensor:
        sums = linear(values.sum(dims).view(-1, m).sum(1), add, back)
        return _of_channels((sums / elements).repeat_interleave(m), flat.dim())

    distance = flat - mean(flat)
    slope = _of_channels(weight, flat.dim()) * torch.rsqrt(mean(distance.square()) + eps)
    return (distance * slope + _of_channels(bias, flat.dim())).to(x.dtype).view(x.shape)


def gradient_of_sums(gradient: Tensor, over: Holders) -> Tensor:
    """Of what this rank has added to sums over the ranks `over`, of which those with the same values count once.

    `gradient` is contiguous, and nobody else's.
    """
    total = all_sum_no_grad(gradient, over.group, into_itself=True, at=over.line())
    return total / over.copies if over.copies > 1 else total


def by_sample(x: Tensor) -> Tensor:
    """(N, C, ...) as one sample of N * C channels."""
    return x.reshape(1, -1, *x.shape[2:])
