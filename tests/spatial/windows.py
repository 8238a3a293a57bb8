"""Windows drawn by hypothesis: kernels, strides, paddings, dilations, groups, sizes.

The map is sliced before the op, so boundaries are uneven and a dim may have fewer rows than ranks.
"""

from typing import Any

import torch
from hypothesis import strategies as st

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


def windows(kind: Any, g: dict[str, Any]) -> list[Any]:
    return [kind(*row) for row in zip(g["kernel"], g["stride"], g["dilation"], g["padding"], strict=True)]


def windowed(op: Any, g: dict[str, Any], weight: tuple[int, ...] | None) -> dict[str, float]:
    torch.manual_seed(0)
    height, width = g["mesh"]
    (first_row, first_column), (rows, columns) = g["extra"], g["size"]
    size = (max(first_row + rows, height), max(first_column + columns, width))
    x = torch.randn(2, 4, *size, dtype=torch.float64)
    whole = [torch.randn(weight, dtype=torch.float64)] if weight else []

    def sliced(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        return op(x[:, :, first_row : first_row + rows, first_column : first_column + columns], *rest)

    return differences(sliced, [x], whole, height, width)


def require_exact(function: Any, g: dict[str, Any]) -> None:
    for found in rank_group(g["mesh"][0] * g["mesh"][1]).run(function, g):
        assert all(error <= TOLERANCE for error in found.values()), found
