"""Transposed convolution: every stride, padding, output padding, dilation; infinities, memory formats."""

import math
from functools import partial
from typing import Any

import torch.nn.functional as F
from hypothesis import assume, given, settings
from torch import Tensor

from fullframe.geometry.window import TransposedWindow
from tests.spatial.cases import Case, Op, as_in_one_process
from tests.spatial.corners import F32, F64, Corners, corners_as_in_torch, last, merged, noise, of_complex
from tests.spatial.rules.test_convolution import at_two_pixels
from tests.spatial.windows import geometries, require_exact, windowed, windows


def transposed(kernel: int, stride: int, padding: int, extra: int = 0, dilation: int = 1, groups: int = 1) -> Case:
    return Case(
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride, padding, extra, groups, dilation),
        whole=((4, 6 // groups, kernel, kernel), (6,)),
    )


def by_its_own(x: Tensor, weight: Tensor) -> Tensor:
    """The bias is of the image at two places."""
    return F.conv_transpose2d(x, weight, at_two_pixels(x)[:, 0], 2)


CASES: dict[str, Case] = {
    "conv_transpose 2/2/0": transposed(2, 2, 0),
    "conv_transpose 4/2/1": transposed(4, 2, 1),
    "conv_transpose 3/2/1": transposed(3, 2, 1),
    "conv_transpose 3/2/1+1": transposed(3, 2, 1, 1),
    "conv_transpose 3/1/1 groups": transposed(3, 1, 1, groups=2),
    "conv_transpose 2/4/0+3": transposed(2, 4, 0, 3),
    "conv_transpose 3/2/2 dilation 3": transposed(3, 2, 2, 1, 3),
    "conv_transpose by what a mask picks": Case(by_its_own, whole=((4, 2, 2, 2),)),
    "conv_transpose 3d": Case(lambda x, w: F.conv_transpose3d(x, w, None, 2, 1), ((1, 3, 4),), ((3, 2, 4, 4, 4),)),
}  # fmt: skip
CORNERS = Corners()


def convolving() -> None:
    t = noise(3, 4, 3, 3)
    for name, (op, weight) in {
        "transposed": (partial(F.conv_transpose2d, padding=1, stride=2, output_padding=1), t),
        "transposed apart": (partial(F.conv_transpose2d, stride=2), t[..., :2, :2]),
    }.items():
        for dtype in (F32, F64):
            x = last(noise(2, 3, 23, 22, dtype=dtype))
            CORNERS.add(f"{name} channels last {dtype}", op, [x], [weight.to(dtype)])
        CORNERS.add(f"{name} empty", op, [noise(0, 3, 23, 22)], [weight])
        CORNERS.add(f"{name} few", op, [noise(1, 3, 3, 4)], [weight])
        CORNERS.add(f"{name} merged", merged(op), [noise(1, 2, 3, 6, 8)], [weight])
    volume, w = last(noise(2, 3, 9, 23, 22, dtype=F32)), noise(3, 4, 2, 2, 2, dtype=F32)
    CORNERS.add("transposed 3d channels last", partial(F.conv_transpose3d, stride=2), [volume], [w])
    for padding, extra, stride, dilation in ((0, 1, 2, 1), (1, 1, 2, 1), (2, 0, 1, 2), (1, 2, 3, 1), (0, 4, 5, 1)):
        options = {"padding": padding, "output_padding": extra, "stride": stride, "dilation": dilation}
        CORNERS.add(f"{options} unbatched", partial(F.conv_transpose2d, **options), [noise(3, 7, 8)], [t])
        CORNERS.add(f"{options} complex", of_complex(partial(F.conv_transpose2d, **options)), [noise(1, 3, 7, 8)], [t])
        for value in (math.inf, math.nan):
            CORNERS.add(f"{options} times {value}", times(partial(F.conv_transpose2d, **options), value),
                [noise(1, 3, 7, 8)], [t])  # fmt: skip
            for column in range(8):
                x = noise(1, 3, 7, 8)
                x[0, 1, 3, column] = value
                CORNERS.add(f"{options} of {value} at {column}", partial(F.conv_transpose2d, **options), [x], [t])


def times(op: Op, value: float) -> Op:
    """`op` whose gradient is nothing but `value`."""
    return lambda *tensors: op(*tensors) * value


convolving()


test_as_in_one_process = as_in_one_process(__name__, CASES)
test_corners = corners_as_in_torch(__name__)


def _transposed(g: dict[str, Any]) -> dict[str, float]:
    op = lambda x, w: F.conv_transpose2d(  # noqa: E731
        x, w, None, g["stride"], g["padding"], g["output_padding"], g["groups"], g["dilation"]
    )
    return windowed(op, g, (4, 4 // g["groups"], *g["kernel"]))


@settings(max_examples=100)
@given(geometries)
def test_any_window(g: dict[str, Any]) -> None:
    for n, extra in enumerate(g["output_padding"]):
        assume(extra < max(g["stride"][n], g["dilation"][n]))
    drawn = windows(TransposedWindow, g)
    sizes = [w.output_size(n, e) for w, n, e in zip(drawn, g["size"], g["output_padding"], strict=True)]
    assume(min(sizes) >= 1)
    require_exact(_transposed, g)
