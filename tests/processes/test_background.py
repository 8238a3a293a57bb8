"""A call that does not return holds nobody up."""

import threading

import pytest

from fullframe.processes.background import AskedToStop, in_background


def test_what_never_answers_is_left_alone() -> None:
    with pytest.raises(TimeoutError):
        in_background(threading.Event().wait, 0.3)
    assert in_background(lambda: 7, 60.0) == 7
    with pytest.raises(KeyError, match="a"):
        in_background(lambda: {}["a"], 60.0)


def test_a_reason_not_to_wait_ends_the_waiting() -> None:
    asked = threading.Event()
    threading.Timer(0.2, asked.set).start()
    with pytest.raises(AskedToStop):
        in_background(threading.Event().wait, 1000.0, asked.is_set)
