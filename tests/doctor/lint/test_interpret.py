"""Which statements are run, and in which order."""

import ast

from fullframe.doctor.lint.interpret import interpret
from fullframe.doctor.lint.program import Call
from fullframe.doctor.lint.values import Origin
from tests.doctor.lint.test_values import run, stored


def order(source: str) -> list[str]:
    """The last names of what is called, in order."""
    return [e.value.function.text.rpartition(".")[2] for e in run(source).events if isinstance(e, Call)]


def test_calls_are_followed_where_they_stand() -> None:
    assert order("def f():\n    b()\na()\nf()\nc()") == ["a", "f", "b", "c"]
    assert order("class A:\n    def f(self):\n        self.g()\n    def g(self):\n        b()\nA().f()\nc()") == [
        "A", "f", "g", "b", "c",
    ]  # fmt: skip


def test_what_no_call_reaches_is_run_by_itself_afterwards() -> None:
    assert order("def f(x):\n    a(x)\n    def g():\n        b()\nc()") == ["c", "a", "b"]
    program = run("class A:\n    def __init__(self, x):\n        self.x = x\n    def g(self):\n        y = self.x")
    (y,) = (s.new for s in program.stores if s.name == "y")
    assert y.origin is Origin.PARAMETER and y.text == "x"


def test_a_function_that_calls_itself_ends() -> None:
    assert order("def f():\n    a()\n    f()\nf()") == ["f", "a", "f"]


def test_functions_that_are_not_wanted_are_left_out() -> None:
    source = "def f():\n    a()\ndef g():\n    b()\n"
    tree = ast.parse(source)
    program = interpret(source, tree, lambda node: getattr(node, "name", "") == "g")
    assert [c.value.function.text for c in program.calls("a", "b")] == ["b"]


def test_a_generator_gives_what_it_yields() -> None:
    assert stored("def f():\n    yield 3\nfor x in f():\n    pass", "x").constant == 3


def test_nonlocal_and_global_names_are_written_where_they_live() -> None:
    source = "def f():\n    a = 1\n    def g():\n        nonlocal a\n        a = 2\n    g()\n    x = a\nf()"
    assert stored(source, "x").constant == 2
    assert stored("a = 1\ndef f():\n    global a\n    a = 2\nf()\nx = a", "x").constant == 2


def test_what_follows_raise_or_a_branch_whose_arms_all_leave_is_not_run() -> None:
    assert order("def f():\n    raise E(a())\n    b()\nf()") == ["f", "a", "E"]
    assert order("def f():\n    if a():\n        return 1\n    else:\n        raise E\n    b()\nf()") == ["f", "a"]
    assert order("assert a()\nb()") == ["a", "b"]


def test_each_case_of_a_match_is_run_and_a_name_stands_for_either() -> None:
    source = "x = 0\nmatch a():\n    case 1:\n        x = 1\n    case 2:\n        x = 2\ny = x"
    assert {member.constant for member in stored(source, "y").members()} == {0, 1, 2}


def test_an_object_of_the_file_that_is_called_runs_its_call() -> None:
    assert stored("class A:\n    def __call__(self, x):\n        return x\ny = A()(3)", "y").constant == 3
    assert stored("class A: ...\ny = A()(3)", "y").origin is Origin.CALL


def test_a_nonlocal_name_may_live_two_functions_out() -> None:
    inner = "        def h():\n            nonlocal a\n            a = 2\n        h()\n"
    assert stored(f"def f():\n    a = 1\n    def g():\n{inner}    g()\n    x = a\nf()", "x").constant == 2


def test_further_arguments_are_a_tuple() -> None:
    assert stored("def f(a, *rest, **named):\n    x = rest[1]\n    y = named\nf(1, 2, 3, b=4)", "x").constant == 3
    assert stored("def f(*rest, **named):\n    y = named\nf(b=4)", "y").origin is Origin.PARAMETER
