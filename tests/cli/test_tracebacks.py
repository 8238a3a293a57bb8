"""What is left of a traceback: every line of the user's, a word for each of the libraries', all causes."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fullframe.cli.tracebacks import lines_of_users, of_users, said_in_worker
from fullframe.errors import RecipeError

RECIPE = """
import json

def loss(text):
    return read(text)

def read(text):
    return json.loads(text)

def wrapped(text):
    try:
        loss(text)
    except ValueError as error:
        raise KeyError("no batch") from error

def while_handling(text):
    try:
        loss(text)
    except ValueError:
        text.lost
"""


@pytest.fixture
def users(tmp_path: Path) -> dict[str, Callable[[str], object]]:
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    names: dict[str, Callable[[str], object]] = {}
    exec(compile(RECIPE, str(path), "exec"), names)
    return names


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return of_users(error)
    raise AssertionError("nothing was raised")


def test_libraries_are_a_line_and_the_users_lines_are_whole(users: dict[str, Callable[[str], object]]) -> None:
    text = said(lambda: users["loss"]("{"))
    lines = text.splitlines()
    assert lines[0] == "Traceback (most recent call last):" and lines[-1].startswith("json.decoder.JSONDecodeError: ")
    assert [re.search(r"line (\d+), in (\w+)", line)[2] for line in lines if "recipe.py" in line] == ["loss", "read"]  # type: ignore[index]
    assert "    return json.loads(text)" in lines
    (through,) = [line for line in lines if line.startswith("  through ")]
    assert re.fullmatch(r"  through json/__init__.py:\d+, json/decoder.py:\d+, json/decoder.py:\d+", through)


@pytest.mark.parametrize("name", ["wrapped", "while_handling"])
def test_what_led_to_it_comes_first(name: str, users: dict[str, Callable[[str], object]]) -> None:
    before, _, after = said(lambda: users[name]("{")).partition("\nwhich led to:\n\n")
    assert before.splitlines()[-1].startswith("json.decoder.JSONDecodeError")
    assert after.splitlines()[-1].startswith("KeyError: 'no batch'" if name == "wrapped" else "AttributeError: ")
    assert before.count("in read") == 1 and after.count("in read") == 0


def test_without_a_users_line_nothing_is_shortened() -> None:
    def called() -> None:
        return None

    exec(compile("def called(): json.loads('{')", f"{Path(json.__file__).parent}/x.py", "exec"), globals(), found := {})
    try:
        found["called"]()
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]  # this file's own
        text = of_users(error)
    assert "through" not in text and f'File "{Path(json.__file__).parent}/decoder.py", line' in text


def test_syntax_errors_have_their_line(tmp_path: Path) -> None:
    text = said(lambda: compile("a = (\n", str(tmp_path / "recipe.py"), "exec"))
    assert "recipe.py" in text and "line 1" in text and "SyntaxError" in text


def test_the_users_lines_alone(users: dict[str, Callable[[str], object]]) -> None:
    with pytest.raises(KeyError) as raised:
        users["wrapped"]("{")
    raised.value.__traceback__ = raised.tb.tb_next  # this file's own
    (where, line) = lines_of_users(raised.value).splitlines()
    assert where.endswith(", in wrapped") and "recipe.py" in where
    assert line == '    raise KeyError("no batch") from error'
    assert lines_of_users(KeyError("never raised")) == ""


class Wrong(torch.utils.data.Dataset[object]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, number: int) -> object:
        raise RecipeError("these samples make no batch:\nsample 0 is an Image")


def test_an_error_of_ours_comes_out_of_a_loader_s_worker_without_its_way() -> None:
    with pytest.raises(RecipeError) as raised:
        list(torch.utils.data.DataLoader(Wrong(), num_workers=1))
    assert "Original Traceback" in str(raised.value)
    assert said_in_worker(raised.value) == "these samples make no batch:\nsample 0 is an Image"
    assert said_in_worker(RecipeError("Caught cold")) == "Caught cold"
