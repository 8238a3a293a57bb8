"""A convolution's gradients asked for by hand: `torch.nn.grad`, for backward functions that users write.

That of the input is a convolution the other way round; those of weight and bias are autograd's.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fullframe.spatial.rules.registry import rule

_DOWN: list[Any] = [F.conv1d, F.conv2d, F.conv3d]
_UP: list[Any] = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d]


@rule("aten::convolution_backward")
def _convolution_backward(
    func: Any, gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Those of input (N, C, ...), weight and bias that `output_mask` asks for, from the result's gradient.

    What is not asked for may be a stand-in of the right shape, as `torch.nn.grad` gives one.
    """
    count = weight.dim() - 2
    of_input = of_weight = of_bias = None
    with torch.autocast(gradient.device.type, enabled=False):  # which does not look at this op either
        if output_mask[0] and transposed:
            of_input = _DOWN[count - 1](gradient, weight, None, stride, padding, dilation, groups)
        elif output_mask[0]:
            reached = [
                (gradient.shape[n + 2] - 1) * stride[n] - 2 * padding[n] + dilation[n] * (weight.shape[n + 2] - 1) + 1
                for n in range(count)
            ]
            extra = [size - rows for size, rows in zip(x.shape[2:], reached, strict=True)]
            of_input = _UP[count - 1](gradient, weight, None, stride, padding, extra, groups, dilation)
        if output_mask[1]:
            again = torch.is_grad_enabled()
            with torch.enable_grad():
                stand_in = weight.new_zeros(weight.shape).requires_grad_()
                if transposed:
                    made = _UP[count - 1](x, stand_in, None, stride, padding, output_padding, groups, dilation)
                else:
                    made = _DOWN[count - 1](x, stand_in, None, stride, padding, dilation, groups)
                (of_weight,) = torch.autograd.grad(made, stand_in, gradient, create_graph=again)
        if output_mask[2]:
            of_bias = gradient.sum([0, *range(2, gradient.dim())])
    return of_input, of_weight, of_bias
