"""Axes: round ticks, a range that shows what there is, and few points that draw the same line."""

import math
import random

import pytest

from fullframe.observation.report.scales import Scale, linear_ticks, scale_for, step_scale, thinned, tick_text


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 437, [0, 100, 200, 300, 400]),
        (1, 300, [100, 200, 300]),
        (-3, 3, [-2, 0, 2]),
        (0.0012, 0.0049, [0.002, 0.003, 0.004]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert linear_ticks(low, high) == pytest.approx(ticks)


def test_logarithmic_ticks_are_one_two_and_five() -> None:
    assert Scale(low=0.9, high=24, logarithmic=True).ticks() == pytest.approx([1, 2, 5, 10, 20])
    assert Scale(low=1e-6, high=10, logarithmic=True).ticks()[:2] == pytest.approx([1e-6, 1e-4]), (
        "whole powers, not all of them"
    )
    assert len(Scale(low=1e-30, high=10, logarithmic=True).ticks()) <= 8


def test_a_value_has_its_place() -> None:
    assert Scale(low=2, high=4).place(3) == 0.5
    assert Scale(low=1, high=100, logarithmic=True).place(10) == pytest.approx(0.5)
    assert Scale(low=1, high=100, logarithmic=True).place(0) < 0


def test_a_range_shows_what_there_is() -> None:
    assert scale_for([]) == Scale(low=0, high=1)
    assert scale_for([5.0, 5.0]).low < 5 < scale_for([5.0, 5.0]).high
    assert scale_for([0.0, 0.0], from_zero=True) == Scale(low=0, high=1)
    assert scale_for([1, 100], may_be_logarithmic=True).logarithmic
    assert not scale_for([1, 100]).logarithmic
    assert not scale_for([0, 100], may_be_logarithmic=True).logarithmic, "zero has no logarithm"
    assert scale_for([1.0, math.nan, 2.0, math.inf]).high < 3


def test_one_first_slow_step_does_not_flatten_all_others() -> None:
    assert scale_for([9.0, *[0.4] * 200], from_zero=True).high == pytest.approx(0.52)
    assert scale_for([0.9, *[0.4] * 200], from_zero=True).high == pytest.approx(0.972), "not that far off: it is shown"


def test_one_step_has_an_axis() -> None:
    assert step_scale(1, 1) == Scale(low=1, high=2)


def test_thinning_keeps_ends_and_spikes() -> None:
    draw = random.Random(0)
    values = [draw.random() for _ in range(100_000)]
    values[54_321], values[77_777], values[3] = 9.0, -9.0, math.nan
    kept = thinned(values)
    assert len(kept) <= 702 and kept == sorted(kept)
    assert {0, 54_321, 77_777, 99_999} <= set(kept) and 3 not in kept
    assert thinned([1.0, math.nan, 2.0]) == [0, 2] and thinned([]) == []


def test_tick_labels_are_short() -> None:
    assert [tick_text(v) for v in (0, 0.25, 300, 25000, 3e6, 1e-7)] == ["0", "0.25", "300", "25k", "3M", "1e-07"]
