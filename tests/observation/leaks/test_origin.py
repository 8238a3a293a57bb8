"""Which line makes a tensor, and which one keeps it."""

import inspect
import sys

import torch

from fullframe.observation.leaks.origin import Investigation, Line, Makers, keeping_lines, seems_emptied
from fullframe.observation.leaks.walk import walk

HISTORY: list[torch.Tensor] = []
STATS = {"total": torch.zeros(())}


def keep(value):
    HISTORY.append(value)


def step(weight):
    value = (weight * 2).sum()
    keep(value)
    STATS["total"] = STATS["total"] + value
    return value


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return Line(__file__, first + next(n for n, line in enumerate(lines) if text in line))


def investigated(names, call):
    module = sys.modules[__name__]
    places = [place for place in walk({"m": module}, 0) if place.spot.path in names]
    watch = Investigation(sorted(places, key=lambda place: names.index(place.spot.path)))
    before = sys.gettrace()
    watch.start()
    call()
    kept = watch.stop()
    assert sys.gettrace() is before
    return watch, kept


def test_one_step_shows_who_makes_and_keeps():
    weight = torch.ones(3, requires_grad=True)
    watch, kept = investigated(["HISTORY", "STATS['total']"], lambda: step(weight))
    assert watch.has_grown(0) and watch.has_grown(1)
    assert watch.makers.line(HISTORY[-1]) == line_of(step, ".sum()")
    assert watch.makers.line(watch.now(1)) == line_of(step, "STATS[")
    assert watch.makers.line(torch.zeros(1)) is None
    if sys.gettrace() is None:  # where nothing else traces the tests
        assert kept == [line_of(keep, "append"), line_of(step, "STATS[")]


def test_a_step_in_which_nothing_grows():
    watch, kept = investigated(["HISTORY"], lambda: None)
    assert not watch.has_grown(0) and kept == [None]


def test_a_tensor_is_forgotten_with_its_end():
    makers = Makers()
    with makers:
        first = torch.ones(2) + 1
        again = first.add_(1)
    assert makers.line(first) == makers.line(again) == Line(__file__, inspect.currentframe().f_lineno - 1)


def test_the_source_tells_of_what_is_emptied(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(
        "kept = []\nrecent = []\nfresh = []\n"
        "def f(x):\n    global fresh\n    kept.append(x)\n    recent.append(x)\n"
        "    if len(recent) > 3: recent.pop(0)\n    fresh = []\n    total[x] = x\n"
    )
    assert [seems_emptied(str(file), name) for name in ("kept", "recent", "fresh")] == [False, True, True]
    assert [line.number for line in keeping_lines(str(file), "kept")] == [6]
    assert [line.number for line in keeping_lines(str(file), "total")] == [10]
    assert Line(str(file), 6).text == "kept.append(x)"
