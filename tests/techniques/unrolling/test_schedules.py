"""Orders of iterations: every one is there once, the fewest run again for the states that are kept."""

from functools import lru_cache
from math import comb

import pytest

from fullframe.techniques.unrolling.schedules import Schedule, binomial, each_again, extra_runs, in_place, nested


def iterations(schedule: Schedule) -> list[int]:
    """As a first pass runs them."""
    return [number for part in schedule for number in ([part] if isinstance(part, int) else iterations(part))]


def runs_again(schedule: Schedule) -> int:
    parts = [part for part in schedule if not isinstance(part, int)]
    return sum(len(iterations(part)) + runs_again(part) for part in parts)


def most_states(schedule: Schedule) -> int:
    """Kept at once, each before a part that is run again; backward takes the parts from the last one to the first."""
    parts = [part for part in schedule if not isinstance(part, int)]
    return max([len(parts), *(before + max(1, most_states(part)) for before, part in enumerate(parts))])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 14, 30])
def test_each_iteration_once_in_its_place(count: int) -> None:
    schedules = [in_place(count), each_again(count), nested(count), *(binomial(count, s) for s in (1, 2, 3, count))]
    for schedule in schedules:
        assert iterations(schedule) == list(range(count))
        assert isinstance(schedule[-1], int)  # the last one's graph is wanted at once


@pytest.mark.parametrize("count", [2, 5, 14, 30])
def test_states_and_runs(count: int) -> None:
    assert runs_again(each_again(count)) == count - 1 and most_states(each_again(count)) == count - 1
    assert runs_again(nested(count)) <= 2 * count and most_states(nested(count)) <= 2 * count**0.5 + 2
    for states in range(1, count + 1):
        schedule = binomial(count, states)
        assert most_states(schedule) <= states
        assert runs_again(schedule) == extra_runs(count, states)


@lru_cache
def _fewest(count: int, states: int) -> float:
    """By brute force: advance to any state, keep it, and take back what lies behind and then what lies before."""
    if count == 1:
        return 0
    if states == 0:
        return float("inf")
    return min(n + _fewest(count - n, states - 1) + _fewest(n, states) for n in range(1, count))


def test_no_schedule_runs_fewer_again() -> None:
    for count in range(2, 13):
        for states in range(1, 6):
            assert extra_runs(count, states) == _fewest(count, states)


def test_the_number_of_griewank_and_walther() -> None:
    """R * l - C(s + r, r - 1) extra runs of l iterations, r the least with C(s + r, s) >= l."""
    for count in (10, 14, 30, 64):
        for states in (2, 3, 5):
            r = next(r for r in range(count) if comb(states + r, states) >= count)
            assert extra_runs(count, states) == r * count - comb(states + r, r - 1)
