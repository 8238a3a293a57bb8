"""What a value remembers."""

import ast

from fullframe.doctor.lint.interpret import interpret
from fullframe.doctor.lint.program import Program
from fullframe.doctor.lint.values import Origin, Scope, Value, cone, either


def run(source: str) -> Program:
    return interpret(source, ast.parse(source))


def stored(source: str, name: str) -> Value:
    """What `name` is given last."""
    return [s.new for s in run(source).stores if s.name == name][-1]


def test_a_call_tells_its_arguments_apart() -> None:
    call = stored("import torch\nx = torch.load(a, *b, map_location=c)", "x")
    assert (call.path, call.method, call.receiver) == ("torch.load", "", None)
    assert [a.text for a in call.arguments] == ["a", "starred"]
    place = call.argument(9, "map_location")
    assert place is not None and place.text == "c"
    assert call.argument(0, "f") is call.arguments[0] and call.argument(5, "weights_only") is None


def test_a_call_of_a_method_knows_its_object() -> None:
    call = stored("x = a.b(1)", "x")
    assert call.method == "b" and call.receiver is not None and call.receiver.text == "a" and call.path == ""
    assert call.receiver.uses == {"b"}


def test_either_stands_for_each() -> None:
    a, b, c = (Value(Origin.UNKNOWN, text=name) for name in "abc")
    both = either([a, either([b, c]), a])
    assert {m.text for m in both.members()} == {"a", "b", "c"}
    assert either([a, a]) is a and list(a.members()) == [a]
    both.use("step")
    assert "step" in a.uses


def test_the_cone_holds_all_that_a_value_was_made_of_once() -> None:
    value = stored("x = f(a + b, b)", "x")
    assert sorted(v.text for v in cone([value]) if v.origin is Origin.UNKNOWN) == ["a", "b", "f"]


def test_a_function_does_not_see_the_names_of_a_class_around_it() -> None:
    module = Scope()
    inside = Scope(Scope(module, is_class=True))
    assert inside.parent is not None
    inside.parent.names["x"] = Value(Origin.UNKNOWN)
    assert inside.get("x") is None and inside.parent.get("x") is not None
    assert inside.module is module


def test_a_class_finds_members_of_its_bases() -> None:
    source = "import torch\nclass A(torch.nn.Module):\n    def f(self): ...\nclass B(A):\n    def g(self): ...\nb = B()"
    value = stored(source, "b")
    assert value.definition is not None
    assert value.definition.lookup("f") is not None and value.definition.lookup("h") is None
    assert value.definition.base_paths() == {"torch.nn.Module"}
