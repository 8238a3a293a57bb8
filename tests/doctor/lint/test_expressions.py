"""What expressions stand for."""

import pytest

from fullframe.doctor.lint.expressions import SAME_OBJECT
from fullframe.doctor.lint.values import Origin
from tests.doctor.lint.test_values import run, stored


@pytest.mark.parametrize(
    ("source", "constant"),
    [
        ("x = 3", 3),
        ("a = [1, 2]\nx = a[1]", 2),
        ("a = {'k': 5}\nx = a['k']", 5),
        ("a = {}\na['k'] = 5\nx = a['k']", 5),
        ("a, (b, c) = 1, (2, 3)\nx = c", 3),
        ("class A:\n    k = 4\nx = A().k", 4),
        ("class A:\n    def __init__(self, k):\n        self.k = k\nx = A(7).k", 7),
        ("class A:\n    @property\n    def k(self):\n        return 8\nx = A().k", 8),
        ("class A:\n    @staticmethod\n    def f(k):\n        return k\nx = A().f(9)", 9),
        ("f = lambda a, b=6: b\nx = f(1)", 6),
        ("def f(a, *, b):\n    return b\nx = f(1, b=6)", 6),
        ("from functools import partial\ndef f(a, b):\n    return b\nx = partial(f, 1)(2)", 2),
        ("if (x := 3):\n    pass", 3),
        ("for i, x in enumerate([4]):\n    pass", 4),
        ("for a, x in zip([1], [5]):\n    pass", 5),
        ("x = [a for a in [2]][0]", 2),
    ],
)
def test_a_value_is_followed(source: str, constant: int) -> None:
    assert stored(source, "x").constant == constant


def test_imports_are_resolved_whatever_they_are_called() -> None:
    for source in (
        "import torch\nx = torch.optim.SGD",
        "import torch.optim as o\nx = o.SGD",
        "from torch import optim as o\nx = o.SGD",
        "from torch.optim import SGD as x\nx = x",
    ):
        assert stored(source, "x").path == "torch.optim.SGD"
    assert stored("from ..a import b\nx = b", "x").path == "..a.b"
    assert stored("x = print", "x").path == "builtins.print"


def test_a_name_may_stand_for_either_branch() -> None:
    value = stored("a = 1\nif c:\n    a = 2\nelse:\n    a = 3\nx = a", "x")
    assert sorted(m.constant for m in value.members()) == [2, 3]
    value = stored("a = 1\nfor i in c:\n    a = 2\nx = a", "x")
    assert sorted(m.constant for m in value.members()) == [1, 2]
    assert stored("def f():\n    if c:\n        return 1\n    a = 2\n    x = a\nf()", "x").constant == 2


def test_a_number_held_by_a_name_is_no_fixed_key() -> None:
    (first, second) = (s for s in run("a = {}\ni = 0\na[i] = 1\ni += 1\na[0] = 2").stores if s.name == "[]")
    assert first.place[2] == ("item",) and second.place[2] == ("item", 0)


@pytest.mark.parametrize("method", sorted(SAME_OBJECT))
def test_a_moved_object_shares_what_is_done_with_it(method: str) -> None:
    program = run(f"def f(m):\n    n = m.{method}('cuda')\n    n.eval()\nf(a)")
    (given,) = (c.value.arguments[0] for c in program.calls("f"))
    assert {method, "eval"} <= given.uses


def test_what_is_not_known_is_one_value() -> None:
    (x, y) = (stored(f"{name} = trainer.model", name) for name in "xy")
    assert x.origin is y.origin is Origin.ATTRIBUTE
    values = [s.new for s in run("x = a.b\ny = a.b").stores]
    assert values[0] is values[1]
