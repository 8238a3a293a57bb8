"""Whose code an exception came from, in one line."""

import pytest
import torch

from fullframe.errors import RecipeError, ShapeError
from fullframe.simulation.fake.blame import blamed, told, users_frames


def _raised(action: object) -> BaseException:
    try:
        action()  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError


def test_the_innermost_line_that_is_no_library_s() -> None:
    program = lambda: torch.zeros(2) @ torch.zeros(3)  # noqa: E731
    said = told(_raised(program))
    assert said.startswith("RuntimeError: ") and "\n" not in said
    assert f"at {__file__}, line {program.__code__.co_firstlineno} (" in said
    assert "torch.zeros(2) @ torch.zeros(3)" in said


def test_all_lines_that_are_no_library_s() -> None:
    program = lambda: torch.utils.data.default_collate([torch.zeros(2), torch.zeros(3)])  # noqa: E731
    names = [frame.name for frame in users_frames(_raised(program))]
    assert names == ["_raised", "<lambda>"]


def test_an_error_without_words_or_lines() -> None:
    assert told(KeyError()) == "KeyError"
    assert told(ValueError("first\nsecond")) == "ValueError: first"


def test_what_is_raised_inside_is_blamed_on_the_recipe() -> None:
    with (
        pytest.raises(RecipeError, match=r"^no model: ZeroDivisionError: .*; mend it$") as caught,
        blamed("no model", "; mend it"),
    ):
        _ = 1 / 0
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_our_own_errors_and_those_that_pass_go_through() -> None:
    with pytest.raises(ShapeError, match=r"^mine$"), blamed("no model"):
        raise ShapeError("mine")
    with pytest.raises(KeyError), blamed("no model", passing=KeyError):
        raise KeyError
