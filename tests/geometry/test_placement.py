"""Split factors through reshapes, checked by really cutting an array.

(N, C, H, W) with W split   flatten(2) ->   (N, C, H*W): dim 2 is H x W x 1, the middle factor split
"""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fullframe.geometry.extents import Extents
from fullframe.geometry.placement import (
    Placement,
    Placements,
    coarsened,
    grain,
    local_factors,
    local_shape,
    permuted,
    reshaped,
)

WIDTH = Placement("width", 3, Extents.even(5, 2))
HEIGHT = Placement("height", 2, Extents.even(3, 2))


def cut(whole: np.ndarray, placements: Placements, parts: dict[str, int]) -> np.ndarray:
    """The part of an array that the rank at `parts` holds, factor by factor."""
    done: Placements = ()
    for p in placements:
        outer, rows, inner = local_factors(p, done, parts)
        shape = whole.shape
        rows_here = p.extents.ranges[parts[p.axis]]
        factored = whole.reshape(*shape[: p.dim], outer, rows, inner, *shape[p.dim + 1 :])
        whole = np.take(factored, list(rows_here), p.dim + 1).reshape(*shape[: p.dim], -1, *shape[p.dim + 1 :])
        done = (*done, p)
    return whole


def test_flatten_merges_factors() -> None:
    assert reshaped((WIDTH,), (2, 4, 3, 5), (2, 4, 15)) == (Placement("width", 2, WIDTH.extents, outer=3),)
    rows_of_five = Extents((0, 10, 15))  # a row of the image is five tokens, one behind the other
    assert reshaped((HEIGHT,), (2, 4, 3, 5), (2, 4, 15)) == (Placement("height", 2, rows_of_five),)
    both = (Placement("height", 2, HEIGHT.extents, inner=5), Placement("width", 2, WIDTH.extents, outer=3))
    assert reshaped((HEIGHT, WIDTH), (2, 4, 3, 5), (2, 4, 15)) == both


def test_unflatten_gives_the_factor_back() -> None:
    flat = reshaped((WIDTH,), (2, 4, 3, 5), (8, 15))
    assert flat is not None
    assert reshaped(flat, (8, 15), (2, 4, 3, 5)) == (WIDTH,)


def test_a_cut_factor_has_no_placement() -> None:
    assert reshaped((WIDTH,), (1, 1, 3, 4), (1, 1, 3, 2, 2)) is None
    assert reshaped((Placement("width", 0, Extents.even(6, 2)),), (6,), (2, 3)) is None


def test_windows_keep_runs_of_rows_together() -> None:
    """(1, 12, 8) -> (1, 3, 4, 8): the split dim must be cut at multiples of 4."""
    p = Placement("height", 1, Extents((0, 4, 12)))
    assert grain(p, (1, 12, 8), (1, 3, 4, 8)) == 4
    assert coarsened(p, 4) == Placement("height", 1, Extents((0, 1, 3)), inner=4)
    assert reshaped((coarsened(p, 4),), (1, 12, 8), (1, 3, 4, 8)) == (Placement("height", 1, Extents((0, 1, 3))),)
    assert grain(p, (1, 12, 8), (1, 96)) == 1
    assert grain(p, (1, 12, 8), (8, 12)) == 0


def test_permute_moves_dims() -> None:
    assert permuted((HEIGHT, WIDTH), (0, 2, 3, 1)) == (HEIGHT.at(1), WIDTH.at(2))


@given(st.sampled_from([(24, 5), (2, 4, 15), (2, 60), (120,), (8, 3, 5), (2, 2, 2, 3, 5), (2, 1, 4, 3, 5, 1)]),
       st.integers(0, 1), st.integers(0, 1), st.booleans())  # fmt: skip
def test_cutting_and_reshaping_commute(new_shape: tuple[int, ...], h: int, w: int, both: bool) -> None:
    shape, parts = (2, 4, 3, 5), {"height": h, "width": w}
    placements: Placements = (HEIGHT, WIDTH) if both else (WIDTH,)
    moved = reshaped(placements, shape, new_shape)
    assert moved is not None
    whole = np.arange(120).reshape(shape)
    expected = cut(whole.reshape(new_shape), moved, parts)
    sizes = local_shape(new_shape, moved, [parts[p.axis] for p in moved])
    assert expected.shape == sizes
    assert (cut(whole, placements, parts).reshape(sizes) == expected).all()
