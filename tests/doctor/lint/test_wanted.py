"""Which functions are run."""

import ast

import pytest

from fullframe.doctor.lint.wanted import has_words, wanted


def names(source: str) -> set[str]:
    tree = ast.parse(source)
    ids = wanted(source, tree)
    return {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef) and id(n) in ids}


def test_those_with_a_word_and_those_that_call_them() -> None:
    source = "def a():\n    x.backward()\ndef b():\n    a()\ndef c():\n    b()\ndef d():\n    return 1\n"
    assert names(source) == {"a", "b", "c"}


def test_a_class_with_its_methods_that_have_a_word() -> None:
    source = "class A:\n    def f(self):\n        return 1\n    def g(self):\n        torch.load(p)\n"
    assert names(source) == {"A", "g"}


def test_all_where_very_many_have_a_word() -> None:
    many = "".join(f"def f{n}():\n    x.backward()\n" for n in range(201))
    assert len(names(many + "def g():\n    return 1\n")) == 202


def test_a_decorator_counts() -> None:
    assert names("@torch.autocast('cuda')\ndef f():\n    return 1\n") == {"f"}


@pytest.mark.parametrize("line", ["self.x = y", "self.xs.append(y)", "self.x[0] = y", "z = torch.zeros(1).to(d)"])
def test_what_forward_may_keep(line: str) -> None:
    source = f"class A:\n    def forward(self, y):\n        {line}\n    def f(self):\n        return 1\n"
    assert names(source) - {"A"} == {"forward"}


def test_the_last_line_without_an_end_counts() -> None:
    assert names("def f():\n    x.backward()") == {"f"}
    assert has_words("x.backward()") and not has_words("import torch\nx = torch.zeros(1)\n")
