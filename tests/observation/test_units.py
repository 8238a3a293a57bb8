"""Numbers as a person would write them."""

import math

import pytest

from fullframe.observation.units import duration_text, number_text, seconds_text, share_text, size_text


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (size_text(0), "0"),
        (size_text(64), "64 B"),
        (size_text(2500), "2.44 KiB"),
        (size_text(437 * 2**20), "0.427 GiB"),
        (size_text(64 * 2**20), "64 MiB"),
        (size_text(14.25 * 2**30), "14.2 GiB"),
        (size_text(1200 * 2**30), "1,200 GiB"),
        (seconds_text(2.309), "2.31 s"),
        (seconds_text(0.5464), "546 ms"),
        (seconds_text(8.01e-5), "80.1 us"),
        (duration_text(47.6), "48 s"),
        (duration_text(185), "3 min 05 s"),
        (duration_text(7800), "2 h 10 min"),
        (duration_text(274000), "3 d 4 h"),
        (number_text(1.23456), "1.235"),
        (number_text(1234567.8), "1,234,568"),
        (number_text(math.nan), "not finite"),
        (share_text(0.0312), "+3.1 %"),
        (share_text(-0.118), "-12 %"),
        (share_text(-0.0000097), "0.0 %"),
    ],
)
def test_a_number_is_short_and_has_its_unit(said: str, expected: str) -> None:
    assert said == expected
