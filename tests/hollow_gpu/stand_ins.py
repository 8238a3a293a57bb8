"""Kernels that CUDA has and the CPU has not, or not alike, on CPU tensors: cuDNN's, attention, 16-bit softmax."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cuda_like.stand_ins import STAND_INS as OF_NORMS_AND_CELLS
from tests.hollow_gpu.kernels import wide

_aten = torch.ops.aten
_TILE = 32  # to a multiple of which memory-efficient attention rounds its sums' length


def _layout(*tensors: Tensor) -> torch.memory_format:
    doubles = len(tensors) == 2 and tensors[0].dtype == torch.float64  # cuDNN convolves them contiguous
    last = (
        not doubles
        and tensors[0].dim() == 4
        and any(torch._prims_common.suggest_memory_format(t) == torch.channels_last for t in tensors)
    )
    return torch.channels_last if last else torch.contiguous_format


def _convolved(
    x: Tensor, weight: Tensor, padding: Any, stride: Any, dilation: Any, groups: int, transposed_by: Any = None
) -> Tensor:
    more = transposed_by or [0] * (x.dim() - 2)
    made = _aten.convolution(
        wide(x), wide(weight), None, stride, padding, dilation, transposed_by is not None, more, groups
    )
    return made.to(x.dtype).contiguous(memory_format=_layout(x, weight))


def _with_bias(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.view(1, -1, *[1] * (y.dim() - 2))


def _cudnn(x: Tensor, weight: Tensor, padding: Any, stride: Any, dilation: Any, groups: int, *_: Any) -> Tensor:
    return _convolved(x, weight, padding, stride, dilation, groups)


def _cudnn_transposed(
    x: Tensor, weight: Tensor, padding: Any, more: Any, stride: Any, dilation: Any, groups: int, *_: Any
) -> Tensor:
    return _convolved(x, weight, padding, stride, dilation, groups, more)


def _depthwise(x: Tensor, weight: Tensor, size: Any, bias: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    return _with_bias(_convolved(x, weight, padding, stride, dilation, x.shape[1]), bias)


def _slow(x: Tensor, weight: Tensor, size: Any, bias: Any, stride: Any, padding: Any, dilation: Any = None) -> Tensor:
    return _with_bias(_convolved(x, weight, padding, stride, dilation or [1] * (x.dim() - 2), 1), bias)


def _slow_transposed(
    x: Tensor, weight: Tensor, size: Any, bias: Any, stride: Any, padding: Any, more: Any, dilation: Any
) -> Tensor:
    return _with_bias(_convolved(x, weight, padding, stride, dilation, 1, more), bias)


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor | None, ...]:
    assert gradient.dtype == x.dtype == weight.dtype, "cuDNN takes one dtype"
    made = _aten.convolution_backward(wide(gradient), wide(x), wide(weight), *options)
    layout = _layout(x, weight)
    made = [t if t is None else t.to(x.dtype) for t in made]
    return tuple(t if t is None or t.dim() < 2 else t.contiguous(memory_format=layout) for t in made)


def _cudnn_norm(x: Tensor, *options: Any) -> tuple[Tensor, ...]:
    out, mean, spread = _aten.native_batch_norm(wide(x), *options)
    return out.to(x.dtype).contiguous(memory_format=_layout(x)), mean, spread, torch.empty(0, dtype=torch.uint8)


def _cudnn_norm_backward(
    x: Tensor, gradient: Tensor, weight: Any, mean: Any, var: Any, own_mean: Any, own_spread: Any, eps: float, _: Any
) -> tuple[Tensor, ...]:
    options = weight, mean, var, own_mean, own_spread, True, eps, [True, True, True]
    of_x, *others = _aten.native_batch_norm_backward(wide(gradient), wide(x), *options)
    return of_x.to(x.dtype).contiguous(memory_format=_layout(x)), *others


def _weights(q: Tensor, k: Tensor, bias: Any, causal: bool, scale: float | None) -> tuple[Tensor, Tensor, float]:
    """Attention's weights in double precision, the logarithms of their sums, the scale."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q.double() @ k.double().mT * scale + (0 if bias is None else bias.double())
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    sums = scores.logsumexp(-1)
    return (scores - sums.unsqueeze(-1)).exp().nan_to_num(0.0), sums, scale


def _as_cuda_has_it(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Heads beside channels."""
    return t.to(dtype).transpose(1, 2).contiguous().transpose(1, 2)


def _seeds() -> tuple[Tensor, Tensor]:
    return torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.int64)


def _efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    keeps: bool,
    dropout: float = 0,
    causal: bool = False,
    *,
    scale: Any = None,
) -> tuple[Tensor, ...]:
    assert not dropout
    weights, sums, _ = _weights(q, k, bias, causal, scale)
    sums = F.pad(sums.float(), (0, -sums.shape[-1] % _TILE)) if keeps else sums.float()[..., :0]
    return _as_cuda_has_it(weights @ v.double(), q.dtype), sums, *_seeds()


def _flash(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0, causal: bool = False, debug: bool = False, *, scale: Any = None
) -> tuple[Any, ...]:
    assert not dropout and q.dtype in (torch.float16, torch.bfloat16)
    weights, sums, _ = _weights(q, k, None, causal, scale)
    out, lengths = _as_cuda_has_it(weights @ v.double(), q.dtype), (q.shape[-2], k.shape[-2])
    return out, sums.float(), None, None, *lengths, *_seeds(), torch.empty(0, dtype=q.dtype)


def _of_attention(g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, causal: bool, scale: Any) -> list[Tensor]:
    """Gradients of queries, keys, values and the bias."""
    weights, _, scale = _weights(q, k, bias, causal, scale)
    by_weights = g.double() @ v.double().mT
    by_scores = weights * (by_weights - (by_weights * weights).sum(-1, keepdim=True))
    found = by_scores @ k.double() * scale, by_scores.mT @ q.double() * scale, weights.mT @ g.double()
    return [*(_as_cuda_has_it(t, q.dtype) for t in found), by_scores.to(q.dtype)]


def _efficient_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Any, sums: Any, seed: Any, offset: Any, dropout: float,
    wanted: Sequence[bool], causal: bool = False, *, scale: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    *found, by_bias = _of_attention(g, q, k, v, bias, causal, scale)
    return *found, by_bias if bias is not None and wanted[3] else None


def _flash_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Any, sums: Any, q_lengths: Any, k_lengths: Any, most_q: int,
    most_k: int, dropout: float, causal: bool, seed: Any, offset: Any, *, scale: Any = None,
) -> tuple[Any, ...]:  # fmt: skip
    return tuple(_of_attention(g, q, k, v, None, causal, scale)[:3])


def _softmax(op: Any) -> Callable[..., Tensor]:
    def run(x: Tensor, dim: int, to_float: bool) -> Tensor:
        return op(wide(x), dim, False).to(torch.float32 if to_float else x.dtype)

    return run


def _softmax_backward(op: Any) -> Callable[..., Tensor]:
    def run(gradient: Tensor, y: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return op(wide(gradient), wide(y), dim, wide(y).dtype).to(dtype)

    return run


def _sampler(x: Tensor, grid: Tensor) -> Tensor:
    return _aten.grid_sampler_2d(x, grid, 0, 0, True)


def _sampler_backward(x: Tensor, grid: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    return _aten.grid_sampler_2d_backward(gradient, x, grid, 0, 0, True, [True, True])


def _rms_norm_backward(
    gradient: Tensor, x: Tensor, shape: Sequence[int], spread: Tensor, weight: Any, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    inner = tuple(range(-len(shape), 0))
    normal, g = x * spread, gradient if weight is None else gradient * weight
    of_x = (g - normal * (g * normal).mean(inner, keepdim=True)) * spread
    return of_x, None if weight is None else (gradient * normal).flatten(0, -len(shape) - 1).sum(0)


STAND_INS: dict[str, Callable[..., Any]] = {
    **OF_NORMS_AND_CELLS,
    "cudnn_convolution": _cudnn, "cudnn_convolution_transpose": _cudnn_transposed, "_conv_depthwise2d": _depthwise,
    "conv_depthwise3d": _depthwise, "_slow_conv2d_forward": _slow, "slow_conv_dilated2d": _slow,
    "slow_conv_dilated3d": _slow, "slow_conv_transpose2d": _slow_transposed, "slow_conv_transpose3d": _slow_transposed,
    "convolution_backward": _convolution_backward,
    "cudnn_batch_norm": _cudnn_norm, "cudnn_batch_norm_backward": _cudnn_norm_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_scaled_dot_product_flash_attention": _flash, "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "cudnn_grid_sampler": _sampler, "cudnn_grid_sampler_backward": _sampler_backward,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_softmax": _softmax(_aten._softmax), "_log_softmax": _softmax(_aten._log_softmax),
    "_softmax_backward_data": _softmax_backward(_aten._softmax_backward_data),
    "_log_softmax_backward_data": _softmax_backward(_aten._log_softmax_backward_data),
}  # fmt: skip
