"""Boundaries and who owns what."""

import pytest

from fullframe.errors import ShapeError
from fullframe.geometry.extents import Extents, overlap


def test_even_puts_the_larger_parts_first() -> None:
    assert Extents.even(10, 3).bounds == (0, 4, 7, 10)
    assert Extents.even(2, 4).sizes == (1, 1, 0, 0)


def test_ranges_sizes_and_empty_parts() -> None:
    extents = Extents((0, 3, 3, 7))
    assert extents.ranges == (range(0, 3), range(3, 3), range(3, 7))
    assert (extents.size, extents.parts, extents.sizes, extents.has_empty) == (7, 3, (3, 0, 4), True)


@pytest.mark.parametrize("bounds", [(1, 4), (0, 3, 2), (0,)])
def test_boundaries_must_rise_from_zero(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="start at 0 and never fall"):
        Extents(bounds)


def test_clipping_and_overlap() -> None:
    extents = Extents((0, 10))
    assert extents.clipped(range(-3, 4)) == range(0, 4)
    assert extents.clipped(range(12, 15)) == range(10, 10)
    assert overlap(range(0, 5), range(3, 9)) == range(3, 5)
    assert not overlap(range(0, 3), range(5, 9))
