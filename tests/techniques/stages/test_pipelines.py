"""The order of a pipeline's actions, drawn; how long the stages wait, against the theory."""

from collections.abc import Sequence

import pytest

from fullframe.techniques.stages.pipelines import Action, Order, bubble, gpipe, one_forward_one_backward, timeline

# Three stages, four microbatches, forward as long as backward; F small, B capital letters. `.` is a wait.
GPIPE = """
abcd....ABCD
.abcd..ABCD.
..abcdABCD..
"""
ONE_EACH = """
abc..AdB.C.D
.ab.AcBdC.D.
..aAbBcCdD..
"""


def drawn(order: Order) -> str:
    timed = timeline(order, 4, [1, 1, 1], [1, 1, 1])
    lines = [["."] * 12 for _ in range(3)]
    for stage, (kind, number), start, stop in timed:
        assert stop == start + 1
        lines[stage][int(start)] = "abcd"[number] if kind == "forward" else "ABCD"[number]
    return "\n" + "\n".join(map("".join, lines)) + "\n"


@pytest.mark.parametrize(("order", "picture"), [(gpipe, GPIPE), (one_forward_one_backward, ONE_EACH)])
def test_the_picture(order: Order, picture: str) -> None:
    assert drawn(order) == picture


@pytest.mark.parametrize("order", [gpipe, one_forward_one_backward])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_each_microbatch_once_and_the_bubble_of_theory(order: Order, stages: int, microbatches: int) -> None:
    for stage in range(stages):
        actions = order(stage, stages, microbatches)
        assert sorted(actions) == sorted(set(actions)) and len(actions) == 2 * microbatches
        for kind in ("forward", "backward"):
            assert [n for found, n in actions if found == kind] == list(range(microbatches))
    found = bubble(timeline(order, microbatches, [1.0] * stages, [2.0] * stages))
    assert found == pytest.approx((stages - 1) / (microbatches + stages - 1))


def most_kept(actions: Sequence[Action]) -> int:
    """How many microbatches' graphs a stage holds at most."""
    kept = most = 0
    for action in actions:
        kept += 1 if action.kind == "forward" else -1
        most = max(most, kept)
    return most


def test_what_is_kept() -> None:
    assert [most_kept(gpipe(stage, 3, 8)) for stage in range(3)] == [8, 8, 8]
    assert [most_kept(one_forward_one_backward(stage, 3, 8)) for stage in range(3)] == [3, 2, 1]


def test_the_slowest_stage_sets_the_pace() -> None:
    timed = timeline(one_forward_one_backward, 8, [1.0, 3.0], [2.0, 6.0])
    assert max(each.stop for each in timed) == pytest.approx(1 + 8 * 9 + 2)
