"""What oneDNN takes for itself: by hand, in bytes of float32 maps."""

import torch
from torch import Tensor

from fullframe.simulation.memory.scratch import cpu_scratch, is_channels_last

aten = torch.ops.aten
MAP = 2 * 8 * 10 * 10 * 4  # bytes of the maps below
BLOCKED = 2 * MAP  # 8 channels fill half of a block of 16
WEIGHT = 8 * 8 * 9 * 4


def maps(dtype: torch.dtype = torch.float32, kernel: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """An input, a weight and an output of the input's shape."""
    x = torch.zeros(2, 8, 10, 10, dtype=dtype)
    return x, torch.zeros(8, 8, kernel, kernel, dtype=dtype), x


def forward(x: Tensor, weight: Tensor, out: Tensor) -> int:
    return cpu_scratch(aten.convolution.default, (x, weight), out)


def backward(x: Tensor, weight: Tensor, of_x: bool = True, of_weight: bool = True) -> int:
    out = (x if of_x else None, weight if of_weight else None, None)
    return cpu_scratch(aten.convolution_backward.default, (x, x, weight), out)


def test_forward() -> None:
    x, weight, out = maps()
    assert forward(x, weight, out) == BLOCKED + WEIGHT
    assert forward(x, weight, torch.zeros(2, 80, 10, 10)) == 10 * MAP  # the larger of the copies and the result
    assert forward(*maps(kernel=1)) == 0
    half = maps(torch.bfloat16, kernel=1)
    assert forward(*half) == MAP + 8 * 8 * 2  # in 16 bit also 1x1 kernels copy
    last = x.to(memory_format=torch.channels_last)
    assert forward(last, weight, out) == 2 * WEIGHT
    assert cpu_scratch(aten.relu.default, (x,), x) == 0


def test_backward_is_the_larger_of_the_two_gradients_needs() -> None:
    x, weight, _ = maps()
    for_x = MAP + WEIGHT + BLOCKED - MAP
    for_weight = BLOCKED + MAP + WEIGHT - WEIGHT
    assert backward(x, weight, of_weight=False) == for_x
    assert backward(x, weight, of_x=False) == for_weight
    assert backward(x, weight) == MAP + for_weight - MAP
    assert backward(*maps(kernel=1)[:2]) == 0
    half, of_half, _ = maps(torch.bfloat16)
    sums = 4 * of_half.numel() + (BLOCKED // 2 + MAP // 2) // 2
    assert backward(half, of_half, of_x=False) == for_weight // 2 + sums


def test_backward_with_channels_last() -> None:
    x, weight, _ = maps()
    last = x.to(memory_format=torch.channels_last)
    assert backward(last, weight) == 3 * WEIGHT
    assert backward(last, weight, of_weight=False) == 0
    deep = torch.zeros(8, 1, 7, 7)
    assert backward(last, deep) == 256 * deep.nbytes  # partial sums
    halves = backward(last.bfloat16(), deep.bfloat16())
    assert halves == 256 * deep.nbytes + 16 * 8 * 10 * 10 * 4


def test_which_maps_have_their_channels_last() -> None:
    x = torch.zeros(2, 8, 10, 10)
    assert is_channels_last(x, x.to(memory_format=torch.channels_last))
    assert not is_channels_last(x, torch.zeros(3))
    assert not is_channels_last(torch.zeros(2, 1, 10, 10).to(memory_format=torch.channels_last))  # both at once
