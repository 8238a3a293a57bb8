"""Batch, instance, group and layer norm with the statistics of the whole image."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fullframe.ranks.memory_format import memory_format_of
from fullframe.spatial.operands import say_gathered
from fullframe.spatial.rules.channel_statistics import (
    Holders,
    by_sample,
    holders,
    normalized,
    sizes_on_ranks,
    statistics,
)
from fullframe.spatial.rules.norm_kernels import has_kernels, normalized_by_kernels
from fullframe.spatial.rules.reduction import count
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.rules.transposing import moved_from
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, on_local, wrap


def _parameters(*tensors: Tensor | None) -> list[Any]:
    """Weights and biases, whole: one number a channel is little."""
    for t in tensors:
        if isinstance(t, SpatialTensor):
            say_gathered("a norm's weight", "it is split", t)
    return [t.full() if isinstance(t, SpatialTensor) else t for t in tensors]


def _check_buffers(*buffers: Tensor | None) -> None:
    if any(isinstance(t, SpatialTensor) for t in buffers):
        raise Unsupported("the running statistics are split", "Make them whole with .full() beforehand.")


def _update(running: Sequence[Tensor | None], values: Sequence[Tensor], momentum: float) -> None:
    """By torch's formula, also of infinities: which `lerp_` is not."""
    kept = [(buffer, value) for buffer, value in zip(running, values, strict=True) if buffer is not None]
    if kept:
        buffers, found = [buffer for buffer, _ in kept], [value for _, value in kept]
        torch._foreach_mul_(buffers, 1 - momentum)
        torch._foreach_add_(buffers, found, alpha=momentum)


class _BatchNorm(NamedTuple):
    """What `F.batch_norm` is called with."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


@rule(F.batch_norm)
def _batch_norm(func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """(N, C, ...) normalized with the whole image's statistics, C made whole; refuses split running statistics."""
    call = _BatchNorm(*args, **kwargs)
    if SpatialTensor in map(type, call[1:5]):
        _check_buffers(call.running_mean, call.running_var)
        weight, bias = _parameters(call.weight, call.bias)
        call = call._replace(weight=weight, bias=bias)
    if not isinstance(call.input, SpatialTensor):
        return func(*call)  # type: ignore[no-any-return]
    if call.input.spec.is_split(1):
        return func(*call._replace(input=moved_from(call.input, 1)))  # type: ignore[no-any-return]
    spec, x = call.input.spec, local_of(call.input)
    if not call.training or 0 in spec.shape:
        return wrap(_laid_as(x, func(x, *call[1:])), spec)
    return wrap(_over_ranks(x, call, holders(spec, x.shape[1])), spec)


def _laid_as(x: Tensor, result: Tensor) -> Tensor:
    """`result`, whose gradient comes in the memory format of `x`.

    Of one sample, whose stride says nothing, torch 2.13's kernel on the CPU takes one of two formats for the other.
    """
    if result.requires_grad and x.device.type == "cpu" and len(x) == 1:
        kept = memory_format_of(x)
        result.register_hook(lambda gradient: gradient.contiguous(memory_format=kept))
    return result


def _over_ranks(x: Tensor, call: _BatchNorm, over: Holders) -> Tensor:
    """Batch norm of the local `x` (N, C, ...) with the statistics of all ranks `over`."""
    if x.numel() == x.shape[1] and dist.get_world_size(over.group) == over.copies:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    if has_kernels(x, over):
        running = call.running_mean, call.running_var
        return normalized_by_kernels(x, call.weight, call.bias, running, over, call.momentum, call.eps)
    found = statistics(x, 1, over)
    if call.running_mean is not None or call.running_var is not None:
        elements = found.elements / over.copies
        unbiased = found.var * (elements / (elements - 1))
        _update((call.running_mean, call.running_var), (found.mean, unbiased), call.momentum)
    return normalized(x, call.weight, call.bias, found, 1, call.eps, over.group)


class OverReplicas(TorchFunctionMode):
    """Inside, batch norm in training takes its statistics from all ranks of the job, split tensors or whole.

    `ranks` are those of a replica, which hold the same of what is whole.
    """

    def __init__(self, ranks: int):
        super().__init__()
        self._ranks = ranks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._batch_norm(_BatchNorm(*args, **kwargs)) if func is F.batch_norm else func(*args, **kwargs)

    def _batch_norm(self, call: _BatchNorm) -> Tensor:
        x, everyone = call.input, dist.group.WORLD
        assert everyone is not None
        if not call.training or (isinstance(x, SpatialTensor) and x.spec.is_split(1)):
            return F.batch_norm(*call)
        if not isinstance(x, SpatialTensor):
            return _over_ranks(x, call, Holders(everyone, None, self._ranks))
        copies = self._ranks // dist.get_world_size(x.spec.group)
        return wrap(_over_ranks(local_of(x), call, Holders(everyone, None, copies)), x.spec)


@rule(F.instance_norm)
def _instance_norm(
    func: Any,
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """(N, C, ...) normalized for each sample and channel; refuses split samples and running statistics."""
    _check_buffers(running_mean, running_var)
    weight, bias = _parameters(weight, bias)
    if not isinstance(input, SpatialTensor):
        return func(  # type: ignore[no-any-return]
            input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
    if input.spec.is_split(1):
        input = moved_from(input, 1, (0,))
        return func(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)  # type: ignore[no-any-return]
    spec, x = input.spec, local_of(input)
    spec.require_whole("the samples are split", 0)
    if not use_input_stats:
        return wrap(_laid_as(x, func(x, running_mean, running_var, weight, bias, False, momentum, eps)), spec)
    samples = x.shape[0]
    over = holders(spec, samples * x.shape[1])
    if running_mean is None and running_var is None and has_kernels(x, over):
        scale, shift = (t if t is None else t.repeat(samples) for t in (weight, bias))
        made = normalized_by_kernels(by_sample(x), scale, shift, (None, None), over, momentum, eps)
        return wrap(torch.ops.aten._unsafe_view(made, x.shape).contiguous(), spec)
    found = statistics(by_sample(x), 1, over)
    elements = count(spec.shape, range(2, len(spec.shape)))
    if running_mean is not None or running_var is not None:
        mean, var = (t.view(samples, -1).mean(0) for t in (found.mean, found.var))
        _update((running_mean, running_var), (mean, var * (elements / max(elements - 1, 1))), momentum)
    return wrap(normalized(x, weight, bias, found, 1, eps, spec.group).contiguous(), spec)  # as torch's


@rule(F.group_norm)
def _group_norm(
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """(N, C, ...) normalized for each sample over groups of channels, made whole; refuses split samples."""
    weight, bias = _parameters(weight, bias)
    if not isinstance(input, SpatialTensor):
        return func(input, num_groups, weight, bias, eps)  # type: ignore[no-any-return]
    if input.spec.is_split(1):
        return func(moved_from(input, 1, (0,)), num_groups, weight, bias, eps)  # type: ignore[no-any-return]
    spec, x = input.spec, local_of(input)
    spec.require_whole("the samples are split", 0)
    if 0 in spec.shape:
        return wrap(func(x, num_groups, weight, bias, eps), spec)
    channels = x.shape[1]
    if channels % num_groups:
        raise ValueError(f"{channels} channels are not divisible by {num_groups} groups")
    m = channels // num_groups
    found = statistics(by_sample(x), m, holders(spec, x.shape[0] * channels))
    return wrap(normalized(x, weight, bias, found, m, eps, spec.group), spec)


@rule(F.layer_norm)
def _layer_norm(
    func: Any,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Normalized over the last dims, split or whole: with means over the ranks where one is split."""
    dims = _split_dims(input, normalized_shape)
    if not isinstance(input, SpatialTensor) or not dims:
        weight, bias = _parameters(weight, bias)
        return on_local(input, lambda x: func(x, normalized_shape, weight, bias, eps))
    wide = _wide(input)
    over = _holders_of_rows(input.spec, dims)
    if over is None:
        result = _scaled(wide - wide.mean(dims, keepdim=True), dims, weight, eps)
    else:
        result = on_local(wide, partial(_normalized_rows, dims=len(dims), over=over, eps=eps))
        result = result if weight is None else result * _wide(weight)
    result = (result if bias is None else result + _wide(bias)).to(input.dtype)
    return on_local(result, Tensor.contiguous)  # as torch's is


@rule(F.rms_norm)
def _rms_norm(
    func: Any, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Divided by the root mean square over the last dims, split or whole."""
    dims = _split_dims(input, normalized_shape)
    if not isinstance(input, SpatialTensor) or not dims:
        (weight,) = _parameters(weight)
        return on_local(input, lambda x: func(x, normalized_shape, weight, eps))
    wide = _wide(input)
    eps = torch.finfo(wide.dtype).eps if eps is None else eps  # that of the numbers torch computes with
    return _scaled(wide, dims, weight, eps).to(input.dtype)


def _split_dims(input: Tensor, normalized_shape: Any) -> tuple[int, ...]:
    """The dims to normalize over, if one of them is split; none otherwise."""
    if not isinstance(input, SpatialTensor):
        return ()
    dims = tuple(range(input.dim() - len(normalized_shape), input.dim()))
    return dims if any(input.spec.is_split(d) for d in dims) else ()


def _holders_of_rows(spec: Spec, dims: tuple[int, ...]) -> Holders | None:
    """Who holds parts of the rows along the last dims; None where to gather what each finds is no little thing."""
    axes = [p.axis for p in spec.placements if p.dim in dims]
    group = spec.spatial.group(axes)
    if 0 in spec.shape or math.prod(spec.shape[dims[0] :]) < 8 * dist.get_world_size(group) ** 2:
        return None
    rows = spec.with_(spec.shape[dims[0] :], tuple(p.at(p.dim - dims[0]) for p in spec.placements if p.dim in dims))
    return Holders(group, sizes_on_ranks(rows))


def _normalized_rows(local: Tensor, dims: int, over: Holders, eps: float) -> Tensor:
    """Of `local` normalized over its last dims: its rows are the channels of one sample."""
    rows = local.flatten(-dims).reshape(1, -1, math.prod(local.shape[-dims:]))
    return normalized(rows, None, None, statistics(rows, 1, over), 1, eps, over.group).view(local.shape)


def _scaled(x: Tensor, dims: tuple[int, ...], weight: Tensor | None, eps: float) -> Tensor:
    """`x` over the root of its mean square over `dims`, times `weight`."""
    result = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return result if weight is None else result * _wide(weight)


def _wide(x: Tensor) -> Tensor:
    """Torch computes the norms of 16-bit numbers in float32, and rounds once."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
