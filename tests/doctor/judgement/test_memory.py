"""Measured memory against predicted."""

import pytest

from fullframe.doctor.judgement.memory import judged_memory, said_of_prediction
from fullframe.doctor.probes.notes import Memory
from tests.doctor.judgement.made import codes, ranks

GIB = 2**30
PREDICTED = {"peak_bytes": 4 * GIB, "device_bytes": 6 * GIB, "bytes": {"parameter": GIB}}


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("allocated_bytes", 4.9, []),
        ("allocated_bytes", 5.2, ["FF327"]),
        ("process_bytes", 8.4, []),
        ("process_bytes", 8.6, ["FF327"]),
    ],
)
def test_what_is_clearly_more_is_said(name: str, gib: float, expected: list[str]) -> None:
    notes = ranks([], [Memory(measured={name: gib * GIB})])
    assert codes(judged_memory(notes, PREDICTED)) == expected
    assert codes(judged_memory(notes, {"problem": "no"})) == []


def test_the_prediction_in_words() -> None:
    assert said_of_prediction(PREDICTED) == "6 GiB predicted for a rank, 4 of it allocated"
    assert said_of_prediction({"problem": "no sample"}) == "no prediction: no sample"
    assert said_of_prediction({}) == ""
