"""What a rule is made of."""

import ast

from fullframe.doctor.finding import Severity
from fullframe.doctor.lint.rule import Found, rule, said


def test_the_function_below_becomes_the_check() -> None:
    change = """
      a

    -   b
    + c
    """
    made = rule("FF1", Severity.NOTE, "t", "r", "f", change)(lambda training: [Found(ast.Pass(), "here")])
    assert (made.kind.code, made.kind.example, made.kind.instead) == ("FF1", "a\n\n  b", "a\n\nc")
    assert made.kind.default


def test_long_source_is_shortened() -> None:
    assert said(ast.parse("f(a)").body[0]) == "f(a)"
    assert said(ast.parse("f(" + "a" * 60 + ")").body[0]).endswith("...")
