"""Convolution and pooling over kernels, strides, paddings, dilations, groups and sizes drawn by hypothesis.

The map is sliced before the op, so boundaries are uneven and a dim may have fewer rows than ranks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fullframe.geometry.window import TransposedWindow, Window
from tests.exactness import differences
from tests.rank_group import rank_group

TOLERANCE = 1e-11
MESHES = [(1, 2), (2, 1), (1, 3), (2, 2), (4, 1)]

pairs = st.tuples(st.integers(1, 19), st.integers(1, 19))
geometries = st.fixed_dictionaries(
    {
        "mesh": st.sampled_from(MESHES),
        "size": pairs,  # that the op sees
        "extra": st.tuples(st.integers(0, 6), st.integers(0, 6)),  # rows sliced off the start before it
        "kernel": st.tuples(st.integers(1, 7), st.integers(1, 7)),
        "stride": st.tuples(st.integers(1, 4), st.integers(1, 4)),
        "padding": st.tuples(st.integers(0, 5), st.integers(0, 5)),
        "dilation": st.tuples(st.integers(1, 3), st.integers(1, 3)),
        "groups": st.sampled_from([1, 2, 4]),
        "output_padding": st.tuples(st.integers(0, 2), st.integers(0, 2)),
    }
)


def _windows(kind: Any, g: dict[str, Any]) -> list[Any]:
    return [kind(*row) for row in zip(g["kernel"], g["stride"], g["dilation"], g["padding"], strict=True)]


def _sees_data(window: Window, size: int, ceil: bool) -> bool:
    """Whether every output row reads a row of the image; where one does not, torch's own max pool reads elsewhere."""
    rows = range(window.output_size(size, ceil_mode=ceil))
    starts = [o * window.stride - window.padding for o in rows]
    return all(any(0 <= s + window.dilation * j < size for j in range(window.kernel)) for s in starts)


def _run(op: Any, g: dict[str, Any], weight: tuple[int, ...] | None) -> dict[str, float]:
    torch.manual_seed(0)
    height, width = g["mesh"]
    (first_row, first_column), (rows, columns) = g["extra"], g["size"]
    size = (max(first_row + rows, height), max(first_column + columns, width))
    x = torch.randn(2, 4, *size, dtype=torch.float64)
    whole = [torch.randn(weight, dtype=torch.float64)] if weight else []

    def sliced(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        return op(x[:, :, first_row : first_row + rows, first_column : first_column + columns], *rest)

    return differences(sliced, [x], whole, height, width)


def _convolution(g: dict[str, Any]) -> dict[str, float]:
    op = lambda x, w: F.conv2d(x, w, None, g["stride"], g["padding"], g["dilation"], g["groups"])  # noqa: E731
    return _run(op, g, (4, 4 // g["groups"], *g["kernel"]))


def _transposed(g: dict[str, Any]) -> dict[str, float]:
    op = lambda x, w: F.conv_transpose2d(  # noqa: E731
        x, w, None, g["stride"], g["padding"], g["output_padding"], g["groups"], g["dilation"]
    )
    return _run(op, g, (4, 4 // g["groups"], *g["kernel"]))


def _max_pool(g: dict[str, Any]) -> dict[str, float]:
    return _run(lambda x: F.max_pool2d(x, g["kernel"], g["stride"], g["padding"], g["dilation"], g["ceil"]), g, None)


def _avg_pool(g: dict[str, Any]) -> dict[str, float]:
    op = lambda x: F.avg_pool2d(x, g["kernel"], g["stride"], g["padding"], g["ceil"], g["include"])  # noqa: E731
    return _run(op, g, None)


def _check(function: Any, g: dict[str, Any]) -> None:
    for found in rank_group(g["mesh"][0] * g["mesh"][1]).run(function, g):
        assert all(error <= TOLERANCE for error in found.values()), found


@settings(max_examples=150)
@given(geometries)
def test_convolution(g: dict[str, Any]) -> None:
    assume(all(w.output_size(n) >= 1 for w, n in zip(_windows(Window, g), g["size"], strict=True)))
    _check(_convolution, g)


@settings(max_examples=100)
@given(geometries)
def test_transposed_convolution(g: dict[str, Any]) -> None:
    for n, extra in enumerate(g["output_padding"]):
        assume(extra < max(g["stride"][n], g["dilation"][n]))
    windows = _windows(TransposedWindow, g)
    sizes = [w.output_size(n, e) for w, n, e in zip(windows, g["size"], g["output_padding"], strict=True)]
    assume(min(sizes) >= 1)
    _check(_transposed, g)


@settings(max_examples=100)
@given(geometries, st.booleans())
def test_max_pool(g: dict[str, Any], ceil: bool) -> None:
    assume(all(p <= k // 2 for p, k in zip(g["padding"], g["kernel"], strict=True)))
    assume(all(w.output_size(n) >= 1 for w, n in zip(_windows(Window, g), g["size"], strict=True)))
    assume(all(_sees_data(w, n, ceil) for w, n in zip(_windows(Window, g), g["size"], strict=True)))
    _check(_max_pool, g | {"ceil": ceil})


@settings(max_examples=100)
@given(geometries, st.booleans(), st.booleans())
def test_avg_pool(g: dict[str, Any], ceil: bool, include: bool) -> None:
    g = g | {"dilation": (1, 1), "ceil": ceil, "include": include}
    assume(all(p <= k // 2 for p, k in zip(g["padding"], g["kernel"], strict=True)))
    assume(all(w.output_size(n) >= 1 for w, n in zip(_windows(Window, g), g["size"], strict=True)))
    _check(_avg_pool, g)
