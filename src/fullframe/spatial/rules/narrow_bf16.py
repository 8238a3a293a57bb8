"""Strided bf16 convolutions of narrow maps, which oneDNN computes wrongly on processors with AMX.

It reads past a row's end: numbers are off, or NaN, and differ from call to call, or the process ends by a segmentation
fault. Seen with torch 2.11 to 2.15 at stride 2 and more, of maps up to 9 columns wide and any height, up to 40 with
dilated kernels. A frame of one process seldom is that narrow; a border of a few columns always is. So these are
computed in float32.
"""

from typing import Any

import torch
from torch import Tensor

from fullframe.spatial.rules.autocast import autocast_inputs

HAS_AMX: bool = torch.cpu._is_amx_tile_supported()
_WIDE = 64  # columns, from which on nothing wrong was seen
_backward_op = torch.ops.aten.convolution_backward.default._op  # what the operator calls


def _goes_astray(x: Tensor, stride: Any) -> bool:
    if not HAS_AMX or x.dtype is not torch.bfloat16 or not x.is_cpu:
        return False
    return x.shape[-1] < _WIDE and max(stride) > 1


def _single(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float()


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, *options: Any) -> Tensor:
    """`torch.convolution`, of inputs as autocast would cast them."""
    if not _goes_astray(x, stride):
        return torch.convolution(x, weight, bias, stride, *options)
    return torch.convolution(x.float(), weight.float(), _single(bias), stride, *options).to(x.dtype)


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Any, *options: Any
) -> tuple[Tensor | None, ...]:
    """What the operator `aten::convolution_backward` gives, called past autograd."""
    if not _goes_astray(x, stride):
        return _backward_op(grad, x, weight, bias_sizes, stride, *options)  # type: ignore[no-any-return]
    found = _backward_op(grad.float(), x.float(), weight.float(), bias_sizes, stride, *options)
    return tuple(None if gradient is None else gradient.to(x.dtype) for gradient in found)


def called(func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, *options: Any) -> Tensor:
    """`func(x, weight, bias, stride, *options)`, a convolution of torch.nn.functional with autograd, under autocast."""
    if not HAS_AMX or not x.is_cpu or x.shape[-1] >= _WIDE or max(stride) == 1:
        return func(x, weight, bias, stride, *options)  # type: ignore[no-any-return]
    x, weight, bias = autocast_inputs(x, weight, bias)
    with torch.autocast(x.device.type, enabled=False):
        if not _goes_astray(x, stride):
            return func(x, weight, bias, stride, *options)  # type: ignore[no-any-return]
        return func(x.float(), weight.float(), _single(bias), stride, *options).to(x.dtype)  # type: ignore[no-any-return]
