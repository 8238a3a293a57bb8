"""Batch, instance, group and layer norm with the statistics of the whole image.

One function serves the first three: channels are normalised in groups of `m` (batch and instance norm: 1), each rank
contributes its count, means and variances, and backward keeps only the input and the statistics.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fullframe.ranks.collectives import all_gather_no_grad, all_sum, all_sum_no_grad
from fullframe.ranks.exchange import joined
from fullframe.ranks.memory_format import memory_format_of
from fullframe.spatial.operands import say_gathered
from fullframe.spatial.rules.reduction import count
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.second_derivative import gradients_of
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, on_local, wrap


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
    mean = wide.mean(dims) if x.numel() else wide.sum(dims)  # a mask has picked nothing here
    distance = wide - mean.view(-1, *(1,) * (x.dim() - 2))  # a third of torch.var_mean's time, freed before the result
    var = distance.square_().mean(dims) if x.numel() else mean
    del distance
    elements = mean.new_full((1,), x.numel() / x.shape[1])
    everyone = all_gather_no_grad(joined([mean, var, elements], 0), group)  # (ranks, 2 * channels + 1)
    counts = everyone[:, -1:, None]  # (ranks, 1, 1)
    means, variances = everyone[:, :-1].view(len(everyone), 2, -1, m).unbind(1)  # (ranks, groups, m)
    total = counts.sum() * m
    center = (means * counts).sum((0, 2)) / total  # (groups,)
    spread = (counts * (variances + (means - center[:, None]) ** 2)).sum((0, 2)) / total
    return _Statistics(center.repeat_interleave(m), spread.repeat_interleave(m), total)


class _Normalize(torch.autograd.Function):
    """x (N, C, ...) normalized; weight, bias and statistics are of a channel, or if `apart` of a sample's channel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, found: _Statistics, apart: bool, m: int, eps: float,
        group: Any
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, weight, found.mean, found.var, found.elements)
        ctx.apart, ctx.m, ctx.eps, ctx.group = apart, m, eps, group
        flat = _flat(x) if apart else x
        if not x.numel():  # a mask has picked nothing here; the kernel would end the process
            return torch.empty_like(x)
        out = torch.ops.aten.native_batch_norm(flat, weight, bias, found.mean, found.var, False, 0.0, eps)[0]
        if apart:
            out = torch.ops.aten._unsafe_view(out, x.shape)  # no view to autograd, which could not be written to
        return out.contiguous(memory_format=memory_format_of(x))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, mean, var, elements = ctx.saved_tensors
        shape = x.shape
        if torch.is_grad_enabled():  # create_graph
            again = partial(_normalized, elements=elements, apart=ctx.apart, m=ctx.m, eps=ctx.eps, group=ctx.group)
            bias = torch.zeros_like(weight, requires_grad=True)
            return *gradients_of(again, [x, weight, bias], grad, ctx.needs_input_grad[:3]), *(None,) * 5
        if ctx.apart:
            x, grad = _flat(x), _flat(grad)
        of_weight, of_bias = torch.zeros_like(weight), torch.zeros_like(weight)
        if x.numel():
            _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                grad, x, weight, mean, var, None, None, False, ctx.eps, [False, True, True]
            )
        shares = torch.stack([weight * of_bias, weight * of_weight]).view(2, -1, ctx.m).sum(2)
        shares = all_sum_no_grad(shares, ctx.group) if dist.get_world_size(ctx.group) > 1 else shares
        by_mean, by_var = shares.repeat_interleave(ctx.m, 1) / -elements
        inverse = torch.rsqrt(var + ctx.eps)
        slope = inverse * inverse * by_var
        view = (-1, *(1,) * (x.dim() - 2))
        # In float32 or wider until the end: what is subtracted from the gradient may be almost all of it.
        wide = torch.addcmul((inverse * by_mean - mean * slope).view(view), x, slope.view(view))
        of_x = wide.addcmul_(grad, (weight * inverse).view(view)).to(x.dtype)
        return of_x.view(shape), of_weight, of_bias, None, None, None, None, None


def _normalized(
    x: Tensor, weight: Tensor, bias: Tensor, elements: Tensor, apart: bool, m: int, eps: float, group: Any
) -> Tensor:
    """What `_Normalize` makes of x (N, C, ...), of differentiable pieces; it keeps several copies of x for backward."""
    flat = (_flat(x) if apart else x).to(weight.dtype)
    dims = [d for d in range(flat.dim()) if d != 1]

    def of_channels(values: Tensor) -> Tensor:
        return values.view(-1, *(1,) * (flat.dim() - 2))

    def mean(values: Tensor) -> Tensor:
        sums = values.sum(dims).view(-1, m).sum(1)
        return of_channels((all_sum(sums, group) / elements).repeat_interleave(m))

    distance = flat - mean(flat)
    slope = of_channels(weight) * torch.rsqrt(mean(distance.square()) + eps)
    return (distance * slope + of_channels(bias)).to(x.dtype).view(x.shape)


def _flat(x: Tensor) -> Tensor:
    """(N, C, ...) as one sample of N * C channels."""
    return x.reshape(1, -1, *x.shape[2:])


def _apply(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, found: _Statistics, m: int, eps: float, group: Any
) -> Tensor:
    kind = found.mean.dtype
    apart = len(found.mean) != x.shape[1]
    copies = len(found.mean) // x.shape[1]
    weight = torch.ones_like(found.mean) if weight is None else weight.to(kind).repeat(copies)
    bias = torch.zeros_like(found.mean) if bias is None else bias.to(kind).repeat(copies)
    return _Normalize.apply(x, weight, bias, found, apart, m, eps, group)  # type: ignore[no-any-return, no-untyped-call]


def _parameters(*tensors: Tensor | None) -> list[Any]:
    """Weights and biases, whole: one number a channel is little."""
    for t in tensors:
        if isinstance(t, SpatialTensor):
            say_gathered("a norm's weight", "it is split", t)
    return [t.full() if isinstance(t, SpatialTensor) else t for t in tensors]


def _check_buffers(*buffers: Tensor | None) -> None:
    if any(isinstance(t, SpatialTensor) for t in buffers):
        raise Unsupported("the running statistics are split", "Make them whole with .full() beforehand.")


def _group(spec: Spec) -> dist.ProcessGroup:
    return spec.group


def _update(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.mul_(1 - momentum).add_(value.to(running.dtype) * momentum)  # torch's formula; also of infinities


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
    """(N, C, ...) normalized with the whole image's statistics; refuses split channels and split running statistics."""
    call = _BatchNorm(*args, **kwargs)
    _check_buffers(call.running_mean, call.running_var)
    weight, bias = _parameters(call.weight, call.bias)
    call = call._replace(weight=weight, bias=bias)
    if not isinstance(call.input, SpatialTensor):
        return func(*call)  # type: ignore[no-any-return]
    spec, x = call.input.spec, local_of(call.input)
    spec.require_whole("the channels are split", 1)
    if not call.training or 0 in spec.shape:
        return wrap(func(x, *call[1:]), spec)
    return wrap(_over_ranks(x, call, _group(spec), 1), spec)


def _over_ranks(x: Tensor, call: _BatchNorm, group: dist.ProcessGroup, copies: int) -> Tensor:
    """Batch norm of the local `x` (N, C, ...) with the statistics of all ranks of `group`.

    Each value is held by `copies` of them, which weighs all alike.
    """
    if x.numel() == x.shape[1] and dist.get_world_size(group) == copies:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    found = _statistics(x, 1, group)
    elements = found.elements / copies
    _update(call.running_mean, found.mean, call.momentum)
    _update(call.running_var, found.var * (elements / (elements - 1)), call.momentum)
    return _apply(x, call.weight, call.bias, found, 1, call.eps, group)


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
            return _over_ranks(x, call, everyone, self._ranks)
        holders = dist.get_world_size(_group(x.spec))
        return wrap(_over_ranks(local_of(x), call, everyone, self._ranks // holders), x.spec)


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
    """(N, C, ...) normalized for each sample and channel; refuses split samples, channels or running statistics."""
    _check_buffers(running_mean, running_var)
    weight, bias = _parameters(weight, bias)
    if not isinstance(input, SpatialTensor):
        return func(  # type: ignore[no-any-return]
            input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps
        )
    spec, x = input.spec, local_of(input)
    spec.require_whole("the samples or channels are split", 0, 1)
    if not use_input_stats:
        return wrap(func(x, running_mean, running_var, weight, bias, False, momentum, eps), spec)
    samples = x.shape[0]
    found = _statistics(_flat(x), 1, _group(spec))
    elements = count(spec.shape, range(2, len(spec.shape)))
    _update(running_mean, found.mean.view(samples, -1).mean(0), momentum)
    _update(running_var, found.var.view(samples, -1).mean(0) * (elements / max(elements - 1, 1)), momentum)
    return wrap(_apply(x, weight, bias, found, 1, eps, _group(spec)).contiguous(), spec)  # as torch's


@rule(F.group_norm)
def _group_norm(
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """(N, C, ...) normalized for each sample over groups of channels; refuses split samples or channels."""
    weight, bias = _parameters(weight, bias)
    if not isinstance(input, SpatialTensor):
        return func(input, num_groups, weight, bias, eps)  # type: ignore[no-any-return]
    spec, x = input.spec, local_of(input)
    spec.require_whole("the samples or channels are split", 0, 1)
    if 0 in spec.shape:
        return wrap(func(x, num_groups, weight, bias, eps), spec)
    channels = x.shape[1]
    if channels % num_groups:
        raise ValueError(f"{channels} channels are not divisible by {num_groups} groups")
    m = channels // num_groups
    found = _statistics(_flat(x), m, _group(spec))
    return wrap(_apply(x, weight, bias, found, m, eps, _group(spec)), spec)


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
    result = _scaled(wide - wide.mean(dims, keepdim=True), dims, weight, eps)
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


def _scaled(x: Tensor, dims: tuple[int, ...], weight: Tensor | None, eps: float) -> Tensor:
    """`x` over the root of its mean square over `dims`, times `weight`."""
    result = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return result if weight is None else result * _wide(weight)


def _wide(x: Tensor) -> Tensor:
    """Torch computes the norms of 16-bit numbers in float32, and rounds once."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
