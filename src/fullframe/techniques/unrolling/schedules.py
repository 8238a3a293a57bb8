"""In which order iterations are run and run again, so that backward finds what it needs in little memory.

A schedule is a tuple of what is run one after the other: the number of an iteration, whose graph is kept, or another
schedule, of which the state before it alone is kept and which is run again in backward.
"""

import math
from functools import cache
from typing import Union

Schedule = tuple[Union[int, "Schedule"], ...]


def in_place(iterations: int) -> Schedule:
    """All graphs are kept."""
    return tuple(range(iterations))


def each_again(iterations: int) -> Schedule:
    """All states are kept; each iteration but the last is run twice."""
    return (*((number,) for number in range(iterations - 1)), iterations - 1)


def nested(iterations: int) -> Schedule:
    """About twice the square root of the states are kept; each iteration is run three times at most."""
    length = math.isqrt(iterations - 1) + 1  # of a run of iterations
    runs = [later(each_again(min(length, iterations - first)), first) for first in range(0, iterations, length)]
    return (*runs[:-1], *runs[-1])


def later(schedule: Schedule, by: int) -> Schedule:
    """The same for iterations that come `by` numbers later."""
    return tuple(each + by if isinstance(each, int) else later(each, by) for each in schedule)


def binomial(iterations: int, states: int) -> Schedule:
    """At most `states` states are kept at once, the first one among them; the fewest iterations are run again.

    Griewank and Walther, "Algorithm 799: revolve", ACM TOMS 26 (2000): with s states and each iteration run again r
    times at most, binomial(s + r, s) iterations are reached.
    """
    return _binomial(0, iterations, states)


def _binomial(first: int, iterations: int, states: int) -> Schedule:
    if iterations == 1:
        return (first,)
    before = _cheapest(iterations, states)[1]
    return (_binomial(first, before, states), *_binomial(first + before, iterations - before, states - 1))


def extra_runs(iterations: int, states: int) -> int:
    """How many iterations the binomial schedule runs again."""
    return 0 if iterations == 1 else _cheapest(iterations, states)[0]


@cache
def _cheapest(iterations: int, states: int) -> tuple[int, int]:
    """(iterations run again, iterations before the next state that is kept), for two iterations or more.

    What lies before that state is run again as a whole when backward gets there, and then has all states to itself.
    """
    if states == 1:
        return iterations * (iterations - 1) // 2, iterations - 1
    choices = range(1, iterations)
    return min((n + extra_runs(iterations - n, states - 1) + extra_runs(n, states), n) for n in choices)
