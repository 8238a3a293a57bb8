"""Bars and curves are as long and as high as what they stand for."""

import math

import pytest
from rich.text import Text

from fullframe.observation.kinds import CATEGORIES, KINDS
from fullframe.observation.watch.drawing import ASCII, Glyphs, bar, colour_of, curve, keys, letter_of, rule

PLAIN = ASCII._replace(has_colours=False)


def test_a_bar_is_as_long_as_its_parts() -> None:
    parts = [("data", 1.0), ("forward", 4.0), ("backward", 3.0)]
    assert bar(parts, 10, 10, PLAIN).plain == "dffffbbb.."
    assert bar(parts, 10, 20, Glyphs()).plain == "█" * 16 + "░" * 4
    assert bar(parts, 4, 10, PLAIN).plain == "ddffffffff"[:2] + "f" * 8, "what is too much is cut off"
    assert bar(parts, 0, 5, PLAIN).plain == "....."
    assert bar([("cached", 1.0)], 1, 3, PLAIN).plain == "kkk" and letter_of("cached") != letter_of("communication")


@pytest.mark.parametrize("kinds", [CATEGORIES, KINDS])
def test_parts_of_one_bar_have_letters_and_colours_of_their_own(kinds: tuple[str, ...]) -> None:
    assert len(set(map(letter_of, kinds))) == len(set(map(colour_of, kinds))) == len(kinds)


def test_a_mark_stands_at_its_value() -> None:
    assert bar([("data", 2.0)], 10, 10, PLAIN, mark=5).plain == "dd...|...."
    assert bar([("data", 2.0)], 10, 10, PLAIN, mark=10).plain == "dd.......|"


def test_parts_have_their_colours() -> None:
    drawn = bar([("data", 5.0), ("forward", 5.0)], 10, 10, Glyphs())
    assert [(span.start, span.end, span.style) for span in drawn.spans][:2] == [(0, 5, "yellow"), (5, 10, "blue")]


def test_keys_say_as_much_as_there_is_room_for() -> None:
    kinds = [("forward", "60%"), ("all_reduce", "40%")]
    assert keys(kinds, 80, Glyphs()).plain == "■ forward 60%  ■ all-reduce 40%"
    assert keys(kinds, 30, Glyphs()).plain == "■ fwd 60%  ■ all-reduce 40%"
    assert keys(kinds, 10, Glyphs()).plain == "■ fwd  ■ all-reduce"
    assert keys(kinds, 80, PLAIN).plain == "f forward 60%  a all-reduce 40%"


def test_a_curve_goes_where_its_values_go() -> None:
    assert curve([0, 1], 1, 1) == ["⡸"] or curve([0, 1], 1, 1) == [chr(0x2800 + 0x40 + 0x08 + 0x10 + 0x20 + 0x80)]
    flat = curve([5.0] * 10, 4, 2)
    assert flat == ["⠀⠀⠀⠀", "⣀⣀⣀⣀"], "all at the bottom"
    falling = curve([float(-n) for n in range(100)], 10, 3)
    assert len(falling) == 3 and all(len(line) == 10 for line in falling)
    assert falling[0][0] != "⠀" and falling[2][-1] != "⠀" and falling[0][-1] == falling[2][0] == "⠀"
    assert curve([], 10, 3) == [] and curve([math.nan], 10, 3) == []
    gap = curve([1.0, 1.0, math.nan, math.nan, 1.0, 1.0], 3, 1)
    assert gap == ["⣀⠀⣀"]


def test_a_rule_has_its_title() -> None:
    line = rule("memory", 20, PLAIN)
    assert isinstance(line, Text) and line.plain.startswith("- memory ---")
