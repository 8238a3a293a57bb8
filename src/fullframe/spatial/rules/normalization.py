"""Batch, instance, group and layer norm with the statistics of the whole image."""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

from fullframe.ranks.constants import constant
from fullframe.ranks.memory_format import memory_format_of
from fullframe.ranks.mesh import axes_in
from fullframe.ranks.recording import recorder
from fullframe.spatial.approved import tells
from fullframe.spatial.gradients import enters
from fullframe.spatial.operands import say_gathered
from fullframe.spatial.rules.channel_statistics import (
    Holders,
    Statistics,
    by_sample,
    holders,
    normalized,
    sizes_on_ranks,
)
from fullframe.spatial.rules.norm_kernels import has_kernels, normalized_by_kernels
from fullframe.spatial.rules.reduction import count
from fullframe.spatial.rules.registry import Unsupported, rule
from fullframe.spatial.rules.transposing import moved_from
from fullframe.spatial.spec import Spec
from fullframe.spatial.tensor import SpatialTensor, local_of, on_local, whole, wrap


def _parameters(*tensors: Tensor | None) -> list[Any]:
    """Weights and biases, whole: one number a channel is little."""
    for t in tensors:
        if isinstance(t, SpatialTensor):
            say_gathered("a norm's weight", "it is split", t)
    return [whole(t) for t in tensors]


def _check_buffers(*buffers: Tensor | None) -> None:
    if any(isinstance(t, SpatialTensor) for t in buffers):
        raise Unsupported("the running statistics are split", "Make them whole with .full() beforehand.")


# Running mean and variance, each of which may be None, and momentum.
_Running = tuple[Tensor | None, Tensor | None, float]
_VERSIONS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)  # where writes are counted


def _update(running: _Running, mean: Tensor, var: Tensor, correction: float | Tensor) -> None:
    """By torch's formula, also of infinities: which `lerp_` is not. The variance counts `correction` times.

    As with torch's own kernels autograd is not told: a call before, of a whole map or in evaluation, keeps both.
    """
    running_mean, running_var, momentum = running
    kept: Any = 1 - momentum
    if running_mean is not None and running_var is not None and recorder() is None:
        dtype = running_mean.dtype
        if running_mean.is_cpu and dtype is running_var.dtype and dtype in (torch.float32, torch.float64):
            kept = constant((kept,), dtype, running_mean.device)  # torch multiplies by a number in twice the time
    with torch._C._ExcludeDispatchKeyGuard(_VERSIONS):
        if running_mean is not None:
            running_mean.mul_(kept).add_(mean, alpha=momentum)
        if running_var is not None:
            if isinstance(correction, Tensor):
                var, correction = var * correction, 1.0
            running_var.mul_(kept).add_(var, alpha=momentum * correction)


@tells(F.batch_norm)
def _told(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """A call as torch's batch norms with weights and running statistics make it."""
    if len(args) != 3 or len(kwargs) != 5:
        return None
    _, mean, var = args
    weight, bias = kwargs.get("weight"), kwargs.get("bias")
    if not (type(weight) is type(bias) is Parameter and type(mean) is type(var) is Tensor):
        return None
    trains = weight.requires_grad, bias.requires_grad
    if (trains[0] and enters(weight)) or (trains[1] and enters(bias)) or mean.requires_grad or var.requires_grad:
        return None
    shapes = weight.shape, bias.shape, mean.shape, var.shape
    dtypes = weight.dtype, bias.dtype, mean.dtype, var.dtype
    return shapes, dtypes, trains, kwargs.get("training"), kwargs.get("momentum"), kwargs.get("eps")


@rule(F.batch_norm)
def _batch_norm(
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """(N, C, ...) normalized with the whole image's statistics, C made whole; refuses split running statistics."""
    if SpatialTensor in (type(running_mean), type(running_var), type(weight), type(bias)):
        _check_buffers(running_mean, running_var)
        weight, bias = _parameters(weight, bias)
    if type(input) is not SpatialTensor:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)  # type: ignore[no-any-return]
    spec = input.spec
    if spec.is_split(1):
        moved = moved_from(input, 1)
        return func(moved, running_mean, running_var, weight, bias, training, momentum, eps)  # type: ignore[no-any-return]
    x = local_of(input)
    if not training or 0 in spec.shape:
        made = func(x, running_mean, running_var, weight, bias, training, momentum, eps)
        return wrap(made if len(x) != 1 else _laid_as(made, memory_format_of(x)), spec)
    over, running = holders(spec, x.shape[1]), (running_mean, running_var, momentum)
    return wrap(_over_ranks(x, weight, bias, running, over, eps), spec)


def _laid_as(result: Tensor, kept: torch.memory_format) -> Tensor:
    """`result` of a norm of one sample, whose gradient comes in the memory format of its input.

    Of one sample, whose stride says nothing, torch 2.13's kernel on the CPU takes one of two formats for the other.
    """
    if result.requires_grad and result.device.type == "cpu":
        result.register_hook(lambda gradient: gradient.contiguous(memory_format=kept))
    return result


def _over_ranks(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: _Running, over: Holders, eps: float
) -> Tensor:
    """Batch norm of the local `x` (N, C, ...) with the statistics of all ranks `over`."""
    if x.numel() == x.shape[1] and dist.get_world_size(over.group) == over.copies:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    running_mean, running_var, momentum = running
    if has_kernels(x.device):
        return normalized_by_kernels(x, weight, bias, (running_mean, running_var), over, momentum, eps)
    update = None
    if running_mean is not None or running_var is not None:
        update = partial(_update_of_batch, running)
    return normalized(x, weight, bias, over, 1, eps, update=update)


def _update_of_batch(running: _Running, found: Statistics) -> None:
    mean, var, elements = found
    _update(running, mean, var, elements / (elements - 1))


class OverReplicas(TorchFunctionMode):
    """Inside, batch norm in training takes its statistics from all ranks of the job, split tensors or whole.

    `ranks` are those of a replica on all stages, which hold the same of what is whole. `asked`: batch norm was called.
    """

    def __init__(self, ranks: int):
        super().__init__()
        self._ranks, self.asked = ranks, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (self._batch_norm if func is F.batch_norm else func)(*args, **(kwargs or {}))

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
        self.asked = True
        everyone = dist.group.WORLD
        assert everyone is not None
        if not training or (isinstance(input, SpatialTensor) and input.spec.is_split(1)):
            return F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
        running = running_mean, running_var, momentum
        if not isinstance(input, SpatialTensor):
            over = Holders(everyone, None, self._ranks, counts=dist.get_rank() % self._ranks == 0)
            return _over_ranks(input, weight, bias, running, over, eps)
        spatial, axes = input.spec.spatial, {part for p in input.spec.placements for part in axes_in(p.axis)}
        counts = dist.get_rank() % self._ranks < spatial.size  # on the first of the stages
        counts = counts and not any(axis.coordinate for axis in spatial.axes if axis.name not in axes)
        over = Holders(everyone, None, self._ranks // dist.get_world_size(input.spec.group), counts)
        return wrap(_over_ranks(local_of(input), weight, bias, running, over, eps), input.spec)


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
    """(N, C, ...) normalized for each sample and channel.

    Refuses split running statistics, and to update them where samples are split.
    """
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
    if not use_input_stats:
        made = func(x, running_mean, running_var, weight, bias, False, momentum, eps)
        return wrap(_laid_as(made, torch.contiguous_format), spec)  # torch makes one sample of all
    has_running = running_mean is not None or running_var is not None
    if has_running:
        spec.require_whole("the samples are split", 0)
    own, samples = _of_own_samples(spec, x), x.shape[0]
    if not own.placements or not samples:
        return wrap(func(x, None, None, weight, bias, True, momentum, eps), spec)
    over = holders(own, samples * x.shape[1])
    if not has_running and has_kernels(x.device):
        scale, shift = (t if t is None else t.repeat(samples) for t in (weight, bias))
        made = normalized_by_kernels(by_sample(x), scale, shift, (None, None), over, momentum, eps)
        return wrap(torch.ops.aten._unsafe_view(made, x.shape).contiguous(), spec)
    elements = count(spec.shape, range(2, len(spec.shape)))
    running = running_mean, running_var, momentum

    found: list[Statistics] = []
    made = normalized(x, weight, bias, over, 1, eps, apart=True, update=found.append if has_running else None)
    for each in found:  # afterwards, as torch does: a recompute that stops at what is last kept does not come here
        mean, var = (t.view(samples, -1).mean(0) for t in (each.mean, each.var))
        _update(running, mean, var, elements / max(elements - 1, 1))
    return wrap(made.contiguous(), spec)  # as torch's


@rule(F.group_norm)
def _group_norm(
    func: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """(N, C, ...) normalized for each sample over groups of channels, made whole."""
    weight, bias = _parameters(weight, bias)
    if not isinstance(input, SpatialTensor):
        return func(input, num_groups, weight, bias, eps)  # type: ignore[no-any-return]
    if input.spec.is_split(1):
        return func(moved_from(input, 1, (0,)), num_groups, weight, bias, eps)  # type: ignore[no-any-return]
    spec, x = input.spec, local_of(input)
    channels = x.shape[1]
    own = _of_own_samples(spec, x)
    if not own.placements or 0 in own.shape:  # not by `func`, which refuses a single value, as one rank's part may be
        return wrap(torch.group_norm(x, num_groups, weight, bias, eps, torch.backends.cudnn.enabled), spec)
    m = channels // num_groups
    over = holders(own, x.shape[0] * channels)
    return wrap(normalized(x, weight, bias, over, m, eps, apart=True), spec)


def _of_own_samples(spec: Spec, x: Tensor) -> Spec:
    """Of this rank's samples alone: what is still split has to be shared to normalize each of them."""
    return spec.with_((len(x), *spec.shape[1:]), tuple(p for p in spec.placements if p.dim != 0))


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
    return normalized(rows, None, None, over, 1, eps).view(local.shape)


def _scaled(x: Tensor, dims: tuple[int, ...], weight: Tensor | None, eps: float) -> Tensor:
    """`x` over the root of its mean square over `dims`, times `weight`."""
    result = x * torch.rsqrt(x.square().mean(dims, keepdim=True) + eps)
    return result if weight is None else result * _wide(weight)


def _wide(x: Tensor) -> Tensor:
    """Torch computes the norms of 16-bit numbers in float32, and rounds once."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
