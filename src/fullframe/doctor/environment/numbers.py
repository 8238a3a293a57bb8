"""What torch's kernels are known to compute wrongly on some processors, tried on this one."""

import math
from collections.abc import Iterator

from fullframe.doctor.environment import kinds
from fullframe.doctor.finding import Finding

_WRONG = 0.1  # relative; bf16 rounds to 0.004, and what reads past a row's end is off by more than the result's size


def narrow_convolution_error() -> float:
    """Of a strided bf16 convolution of a map 3 columns wide, relative to float32; NaN where that is NaN.

    Freed memory is filled with NaN first, for the fault is to read memory that was not written.
    """
    import torch

    filled = [torch.full((2**n,), math.nan) for n in range(4, 17)]
    del filled
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).bfloat16() for shape in ((1, 16, 33, 3), (16, 16, 3, 3)))
    found, expected = (
        torch.nn.functional.conv2d(a, b, stride=2, padding=(1, 0)).float()
        for a, b in ((x, weight), (x.float(), weight.float()))
    )
    return float((found - expected).norm() / expected.norm())


def judged_numbers(error: float, *, gpu_is_there: bool) -> Iterator[Finding]:
    """`error` is what `narrow_convolution_error` gives; where ranks compute on GPUs it is of no consequence."""
    if not gpu_is_there and not error < _WRONG:
        size = "NaN" if math.isnan(error) else f"off by {error:.1g} of its size"
        yield kinds.WRONG_CONVOLUTIONS.found(f"the result of a map 3 columns wide is {size}")
