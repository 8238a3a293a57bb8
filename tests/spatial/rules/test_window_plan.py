"""How a window op is cut: output boundaries, rows that are read, maps too small for the ranks."""

import pytest
import torch

from fullframe.geometry.extents import Extents
from fullframe.geometry.window import TransposedWindow, Window
from fullframe.spatial.rules.registry import TooSmall
from fullframe.spatial.rules.window_plan import embedded, ints, nonempty, plan_windows, region
from tests.spatial.fake import on_height, on_width, spatial, spec

#   rows    0 1 2 3 | 4 5 6 7 8       kernel 3, padding 1: rank 1 computes 4..8 and reads 3..9 (9 is padding)
BOUNDS = (0, 4, 9)


def test_a_plan_names_rows_read_and_rows_computed() -> None:
    with spatial(1, 2, rank=1) as on:
        given = spec(on, (1, 2, 5, 9), on_width(BOUNDS, 3))
        plan = plan_windows(given, (2, 3), (Window(3, padding=1),) * 2, (5, 9), (1, 4, 5, 9))
        assert (plan.needs, plan.outs) == ((range(3, 10),), (range(4, 9),))
        assert plan.cuts[0].wanted == (range(0, 5), range(3, 9)) and plan.borrows
        assert plan.spec.placements == (on_width(BOUNDS, 3),) and plan.spec.shape == (1, 4, 5, 9)
        strided = plan_windows(given, (3,), (Window(2, stride=2),), (4,), (1, 2, 5, 4))
        assert strided.spec.placements == (on_width((0, 2, 4), 3),) and not strided.borrows


def test_pointwise_windows_are_no_cut() -> None:
    with spatial(2, 2) as on:
        given = spec(on, (1, 2, 6, 9), on_height((0, 3, 6), 2), on_width(BOUNDS, 3))
        plan = plan_windows(given, (2, 3), (Window(1), Window(1)), (6, 9), (1, 8, 6, 9))
        assert plan.cuts == () and plan.spec.placements == given.placements


def test_a_map_that_is_too_small_names_the_axis_to_gather() -> None:
    with spatial(1, 2) as on:
        given = spec(on, (1, 2, 5, 9), on_width(BOUNDS, 3))
        with pytest.raises(TooSmall) as caught:
            plan_windows(given, (3,), (Window(9),), (1,), (1, 2, 5, 1))
        assert tuple(caught.value.axes) == ("width",)


def test_boundaries_without_empty_parts() -> None:
    assert nonempty(Extents((0, 1, 4))) == Extents((0, 1, 4))
    assert nonempty(Extents((0, 0, 4))) == Extents((0, 2, 4))
    assert nonempty(Extents((0, 0, 1))) is None and nonempty(Extents((0, 1))) is None
    assert nonempty(Extents((0, 2, 2, 2))) is None


def test_a_transposed_window_reads_no_row_outside_the_image() -> None:
    with spatial(1, 2, rank=1) as on:
        given = spec(on, (1, 2, 5, 9), on_width(BOUNDS, 3))
        plan = plan_windows(given, (3,), (TransposedWindow(3, 2, 1, 1),), (18,), (1, 2, 5, 18))
        assert plan.spec.placements[0].extents.size == 18
        assert all(need.start >= 0 and need.stop <= 9 and need for need in plan.needs)


def test_a_region_without_a_neighbour_is_narrowed_and_padded() -> None:
    with spatial(1, 2, rank=1) as on:
        given = spec(on, (2, 9), on_width(BOUNDS, 1))
        plan = plan_windows(given, (1,), (Window(2, stride=2, padding=0),), (4,), (2, 4))
        local = torch.arange(10.0).view(2, 5)
        assert torch.equal(region(local, plan), local[:, :4])
        padded = plan_windows(given, (1,), (Window(1, stride=4, padding=4),), (5,), (2, 5))
        got = region(local, padded, fill=7.0)
        assert got.shape[1] == len(padded.needs[0]) and bool((got == 7).any())


def test_a_gradient_in_a_larger_place() -> None:
    with spatial(1, 2) as on:
        given = spec(on, (2, 9), on_width(BOUNDS, 1))
        cuts = plan_windows(given, (1,), (Window(3, padding=1),), (9,), (2, 9)).cuts
        gradient = torch.ones(2, 3)
        placed = embedded(gradient, (range(2, 5),), (range(1, 6),), cuts)
        assert placed[0].tolist() == [0, 1, 1, 1, 0]
        cut = embedded(gradient, (range(2, 5),), (range(3, 4),), cuts)
        assert cut.shape == (2, 1) and cut.data_ptr() != gradient.data_ptr()
        assert embedded(gradient, (range(2, 5),), (range(6, 8),), cuts).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("value", "expected"), [(2, (2, 2)), ((3, 4), (3, 4)), ([5], (5, 5))])
def test_options_as_one_number_a_dim(value: object, expected: tuple[int, ...]) -> None:
    assert ints(value, 2) == expected  # type: ignore[arg-type]
