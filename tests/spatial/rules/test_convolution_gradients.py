"""The gradients of convolutions, asked for by hand, against one process."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import grad

from tests.spatial.cases import Case, as_in_one_process


def by_hand(x: Tensor, gradient: Tensor, weight: Tensor, **options: Any) -> list[Tensor]:
    """As `torch.nn.grad` does it: what is not asked for is a stand-in."""
    return [
        grad.conv2d_input(x.shape, weight, gradient, **options),
        grad.conv2d_weight(x, weight.shape, gradient, **options),
    ]


def transposed(x: Tensor, weight: Tensor) -> list[Tensor]:
    made = F.conv_transpose2d(x, weight, None, [2, 2], [1, 1], [1, 0])
    options: Any = (None, [2, 2], [1, 1], [1, 1], True, [1, 0], 1, [True, True, False])
    return list(torch.ops.aten.convolution_backward(made.sin(), x, weight, *options)[:2])


CASES: dict[str, Case] = {
    "depthwise": Case(lambda x, g, w: by_hand(x, g, w, padding=1, groups=4), ((2, 4), (2, 4)), ((4, 1, 3, 3),)),
    "strided": Case(
        lambda x, g, w: by_hand(x, g[:, :3, ::2, ::2], w, stride=2, padding=2, dilation=2),
        ((2, 4), (2, 4)), ((3, 4, 3, 3),),
    ),
    "an overload, with bias": Case(
        lambda x, g, w: torch.ops.aten.convolution_backward.default(
            g, x, w, [4], [1, 1], [1, 2], [1, 1], False, [0, 0], 2, [True, True, True]
        ),
        ((2, 4), (2, 4)), ((4, 2, 3, 5),),
    ),
    "transposed": Case(transposed, ((2, 4),), ((4, 4, 3, 3),)),
}  # fmt: skip

test_as_in_one_process = as_in_one_process(__name__, CASES)
