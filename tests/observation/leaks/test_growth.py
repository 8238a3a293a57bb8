"""When growth is a leak: tables of sizes, a column a look."""

import pytest

from fullframe.observation.leaks.growth import Growth
from fullframe.observation.leaks.walk import Place, Spot


def place(kind, size, name="kept", parent=None):
    spot = Spot(None, name, hash(name)) if parent is None else parent.under(name)
    return Place(spot, kind, size, None, None)


@pytest.mark.parametrize(
    ("kind", "sizes", "steps", "long"),
    [
        ("list", range(20), 1, True),
        ("list", range(10), 1, False),  # not for long enough
        ("list", range(10), 2, True),
        ("list", [0, 1, 2, 3, 4, 5, 6, 6], 4, False),  # it has stopped
        ("list", [0, 9, 1, 9, 2, 9, 3, 9], 4, False),  # it is emptied
        ("list", [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5], 4, False),  # now and then
        ("list", [0, 0, 1, 2, 3], 20, False),  # few looks, however far apart
        ("list", [0, 0, 1, 2, 3, 4], 20, True),
        ("hooks", range(8), 1, True),
        ("tensor", [0, 10, 20, 30, 40], 4, True),
        ("tensor", [10, 30, 20, 40, 30, 50], 4, False),  # its size changes
        ("bounded", range(20), 1, False),
    ],
)
def test_growth_for_long(kind, sizes, steps, long):
    growth = Growth()
    for look, size in enumerate(sizes):
        growth.look([place(kind, size)], look * steps, 0, evaluated=False)
    assert bool(growth.long()) is long


def test_growth_at_evaluations():
    growth, size = Growth(), 0
    for step in range(1, 22):
        evaluated = step % 5 == 0
        size += 3 * evaluated
        growth.look([place("list", size)], step, 0, evaluated)
        assert bool(growth.long()) is (step >= 20)
    assert growth.long()[0].at_evaluations


def test_what_each_evaluation_fills_and_the_next_step_empties():
    growth = Growth()
    for step in range(1, 60):
        growth.look([place("list", 3 * (step % 5 == 0))], step, 0, evaluated=step % 5 == 0)
        assert growth.long() == []


def test_elements_that_grow_older_in_a_list_that_fills():
    """The oldest of a window's graphs reaches back as far as the window is long."""
    growth, window = Growth(), place("bounded", 0)
    for step in range(1, 40):
        filled = min(step, 20)
        made = 100 * (step - filled)  # the number of the oldest node in the window
        inside = place("graph", 100 * step - made, "[0]", window.spot)
        growth.look([place("bounded", filled), inside], step, 100 * step, evaluated=False)
        assert growth.long() == []
    for step in range(40, 60):  # the first element is a total from now on
        inside = place("graph", 100 * step - 2000, "[0]", window.spot)
        growth.look([place("bounded", 20), inside], step, 100 * step, evaluated=False)
    assert [series.spot.path for series in growth.long()] == ["kept[0]"]


def test_a_place_that_was_gone_begins_anew():
    growth = Growth()
    for step in range(12):
        growth.look([place("list", step)], step, 0, evaluated=False)
    growth.look([], 12, 0, evaluated=False)
    for step in range(13, 20):
        growth.look([place("list", step)], step, 0, evaluated=False)
        assert growth.long() == []
