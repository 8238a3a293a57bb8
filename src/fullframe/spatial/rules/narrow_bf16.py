"""bf16 convolutions of narrow maps, which oneDNN computes wrongly on processors with AVX-512.

It reads past a map's end: numbers are off, or NaN, and differ from call to call, or the process ends by a segmentation
fault or a heap that is corrupted. Seen with torch 2.11 to 2.15: with AMX at stride 2 and more, of maps up to 9 columns
wide and any height, up to 40 with dilated kernels; without it, in weights' gradients alone, of one column at stride 2
and more, and of volumes with fewer slices, rows or columns than the kernel at any stride. A frame of one process seldom
is that narrow; a border of a few columns, or a rank's part of few slices, often is. So these are computed in float32.
"""

from typing import Any

import torch
from torch import Tensor

from fullframe.spatial.rules.autocast import autocast_inputs

HAS_AVX512: bool = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
_WIDE = 64  # columns, from which on nothing wrong was seen of strided ones
_backward_op = torch.ops.aten.convolution_backward.default._op  # what the operator calls


def _is_narrow(x: Tensor, weight: Tensor, stride: Any, dilation: Any) -> bool:
    if max(stride) > 1 and x.shape[-1] < _WIDE:
        return True
    # Of a transposed convolution the map is the result: it has as many rows as the kernel where `x` has so many.
    least = (2 * d * (k - 1) + 1 for k, d in zip(weight.shape[2:], dilation, strict=True))
    return weight.dim() == 5 and any(n < rows for n, rows in zip(x.shape[2:], least, strict=True))


def _goes_astray(x: Tensor, weight: Tensor, stride: Any, dilation: Any) -> bool:
    return HAS_AVX512 and x.dtype is torch.bfloat16 and x.is_cpu and _is_narrow(x, weight, stride, dilation)


def _single(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, *options: Any
) -> Tensor:
    """`torch.convolution`, of inputs as autocast would cast them."""
    options = stride, padding, dilation, *options
    if not _goes_astray(x, weight, stride, dilation):
        return torch.convolution(x, weight, bias, *options)
    return torch.convolution(x.float(), weight.float(), _single(bias), *options).to(x.dtype)


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, padding: Any, dilation: Any, *options: Any
) -> tuple[Tensor | None, ...]:
    """What the operator `aten::convolution_backward` gives, called past autograd."""
    options = bias_sizes, stride, padding, dilation, *options
    if not _goes_astray(x, weight, stride, dilation):
        return _backward_op(grad, x, weight, *options)  # type: ignore[no-any-return]
    found = _backward_op(grad.float(), x.float(), weight.float(), *options)
    return tuple(None if gradient is None else gradient.to(x.dtype) for gradient in found)


def called(
    func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: Any, dilation: Any, **options: Any
) -> Tensor:
    """`func(x, weight, bias, ...)`, a convolution of torch.nn.functional with autograd, under autocast."""
    options |= {"stride": stride, "dilation": dilation}
    is_half = x.dtype is torch.bfloat16 or torch._C._is_any_autocast_enabled()
    if not (HAS_AVX512 and is_half and x.is_cpu and _is_narrow(x, weight, stride, dilation)):
        return func(x, weight, bias, **options)  # type: ignore[no-any-return]
    x, weight, bias = autocast_inputs(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        if x.dtype is not torch.bfloat16:
            return func(x, weight, bias, **options)  # type: ignore[no-any-return]
        return func(x.float(), weight.float(), _single(bias), **options).to(x.dtype)  # type: ignore[no-any-return]
