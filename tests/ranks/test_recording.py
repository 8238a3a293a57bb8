"""Inside `recording` the recorder is asked, and what cannot wait for a graph is refused."""

from typing import Any

import pytest

from fullframe.ranks.recording import (
    NotCapturable,
    as_they_are,
    reason_not_to_compile,
    recorder,
    recording,
    require_sending,
)


def test_the_innermost_recorder_is_asked() -> None:
    first: Any = object()
    second: Any = object()
    assert recorder() is None
    with recording(first):
        with pytest.raises(ZeroDivisionError), recording(second):
            assert recorder() is second
            raise ZeroDivisionError
        assert recorder() is first
    assert recorder() is None


def test_what_needs_messages_now_is_refused() -> None:
    require_sending("it looks at numbers")
    by: Any = object()
    with recording(by), pytest.raises(NotCapturable, match="it looks at numbers"):
        require_sending("it looks at numbers")


def test_the_innermost_reason_is_said() -> None:
    with as_they_are("one"):
        with pytest.raises(ZeroDivisionError), as_they_are("other"):
            assert reason_not_to_compile() == "other"
            raise ZeroDivisionError
        assert reason_not_to_compile() == "one"
    assert reason_not_to_compile() == ""
