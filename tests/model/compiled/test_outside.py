"""What functions read that a forward calls: each change of it is seen, and nothing else is."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from fullframe.model.compiled import outside
from fullframe.model.compiled.guard import Guard
from fullframe.model.compiled.outside import Outside
from tests.model.compiled import outside_code as code
from tests.model.compiled.outside_code import Doubled, Rounding, by_default, deep, in_wrapper, remembered, scaled

UNREAD = 1.0
rounding = Rounding()
closed = code.closing(2.0)


class Block(nn.Module):
    """Its forward is `called`; it has a method and an attribute of its class."""

    rate = 1.0

    def __init__(self, called: Callable[[Any], Any]):
        super().__init__()
        self.called, self.sub = called, nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.called(self.helped(x))

    def helped(self, x: Tensor) -> Any:
        return x * self.rate


def of_module(x: Any) -> Any:
    return code.scaled(x)


# name: what is called, (table or class, name) that changes or the list or dict in which something does
CASES: dict[str, tuple[Callable[[Any], Any], Any, str, Any]] = {
    "a global of a function": (lambda x: scaled(x), code, "SCALE", 3.0),
    "a global of a module that is called by its name": (of_module, code, "SCALE", 3.0),
    "a name for getattr": (lambda x: x * getattr(code, "SCALE", 1.0), code, "SCALE", 3.0),
    "two calls deep": (lambda x: deep(x), code.FLAGS, "0", 2.0),
    "a table": (lambda x: code.by_table(x), code.TABLE, "a", 2.0),
    "an attribute of an object": (lambda x: code.by_settings(x), code.SETTINGS, "bias", 1.0),
    "an attribute of its class": (lambda x: code.by_settings(x), code.Settings, "gain", 2.0),
    "a default": (lambda x: by_default(x), code.TABLE, "a", 2.0),
    "a function in a default": (lambda x: by_default(x), code.FLAGS, "0", 2.0),
    "a partial": (code.partial_of, code.FLAGS, "0", 2.0),
    "what is remembered": (lambda x: x * remembered(1), code, "SCALE", 3.0),
    "a decorator": (lambda x: in_wrapper(x), code.TABLE, "a", 2.0),
    "what is decorated": (lambda x: in_wrapper(x), code.FLAGS, "0", 2.0),
    "a function by its name in a table": (lambda x: code.BY_NAME["deep"](x), code, "SCALE", 3.0),
    "another function in its place": (lambda x: code.by_flag(x), code, "by_flag", scaled),
    "an object that is called": (lambda x: rounding(x), code, "SCALE", 3.0),
    "an object that is an attribute": (Rounding(), Rounding, "digits", 4),
    "a function with a backward": (lambda x: Doubled.apply(x), code.FLAGS, "0", 2.0),
    "a NumPy array": (lambda x: code.by_array(x), code.WEIGHTS, "0", 2.0),
    "what a function imports": (lambda x: code.importing(x), code, "SCALE", 3.0),
    "what a function imports from": (lambda x: code.importing_from(x), code.FLAGS, "0", 2.0),
    "an attribute of a class's class": (lambda x: code.by_kind(x), code.Kind, "rate", 2.0),
    "an attribute that a class gets": (lambda x: code.by_class(x), code.Settings, "late", 2.0),
    "an attribute that a function gets": (lambda x: code.counting(x), code.counting, "count", 2.0),
    "a method with some arguments": (code.Twice(), code, "SCALE", 3.0),
    "a function by type": (lambda x: code.by_type(x), code.FLAGS, "0", 2.0),
    "what Python calls by itself": (code.Called(), code.TABLE, "a", 2.0),
    "an attribute of the module's class": (lambda x: x, Block, "rate", 2.0),
    "a method of the module's class": (lambda x: x, Block, "helped", lambda self, x: x),
}


@contextmanager
def changed(where: Any, name: str, value: Any) -> Iterator[None]:
    if isinstance(where, (list, np.ndarray)):
        where[0], before = value, where[0]
        yield
        where[0] = before
        return
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(where, dict):
            patch.setitem(where, name, value)
        else:
            patch.setattr(where, name, value, raising=False)
        yield


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    called, where, what, value = CASES[name]
    guard, equal = Guard(Block(called)), Block(called)
    assert guard.holds() and guard.structure == Guard(equal).structure
    with changed(where, what, value):
        assert not guard.holds() and guard.structure != Guard(equal).structure
    assert guard.structure == Guard(equal).structure


def test_a_change_of_a_closure_is_seen() -> None:
    guard = Guard(Block(closed))
    assert guard.holds()
    closed.change(3.0)
    assert not guard.holds()
    closed.change(2.0)


def test_the_environment_is_seen_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, does_not = Guard(Block(lambda x: code.by_environment(x))), Guard(Block(lambda x: scaled(x)))
    assert reads.holds()
    monkeypatch.setitem(os.environ, "FULLFRAME_TEST", "2")
    assert not reads.holds() and does_not.holds()


def test_what_seeds_is_refused() -> None:
    why = "it seeds torch's random numbers, or reads their seed"
    assert Guard(Block(lambda x: code.seeding(x))).refusal == why


def test_a_name_that_is_gone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(Block(of_module))
    monkeypatch.delattr(code, "SCALE")
    assert not guard.holds()


def test_what_is_not_read_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard(Block(lambda x: scaled(x)))
    monkeypatch.setattr(code, "FLAGS", [])
    monkeypatch.setitem(globals(), "UNREAD", 2.0)
    assert guard.holds()
    assert {place.name for place in guard.outside.places} == {"scaled", "SCALE", "called", "helped", "rate"} - {
        "called"
    }


def test_equal_modules_read_the_same_places_in_one_order() -> None:
    first, second = (Outside(list(Block(deep).modules())) for _ in range(2))
    assert first.places == second.places and [*first.now()] == first.values == second.values


def test_more_than_can_be_looked_at_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "FLAGS", [1.0] * 5000)
    assert Outside([Block(deep)]).refusal == "it reads FLAGS, a list of 5000 values"
    monkeypatch.undo()
    monkeypatch.setattr(code, "WEIGHTS", np.ones(10_000))
    assert Guard(Block(code.by_array)).refusal == "it reads a NumPy array of 80000 bytes"
    monkeypatch.setattr(outside, "_MOST", 3)
    assert Outside([Block(deep)]).refusal == "it calls more than 3 functions"


def test_a_module_of_torch_reads_nothing() -> None:
    assert not Outside(list(nn.TransformerEncoderLayer(4, 2).modules())).places
