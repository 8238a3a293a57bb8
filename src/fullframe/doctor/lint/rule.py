"""What a lint rule is: a kind of finding, and a function from a program to the places that have it."""

import ast
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from fullframe.doctor.finding import Kind, Severity
from fullframe.doctor.lint.training import Training

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE
_LONGEST = 40


class Found(NamedTuple):
    """One place; `message` is a sentence with its names."""

    node: ast.AST
    message: str


@dataclass(frozen=True)
class Rule:
    """`check` yields places, the same one as often as it likes."""

    kind: Kind
    check: Callable[[Training], Iterable[Found]]


def rule(
    code: str, severity: Severity, title: str, reason: str, fix: str, change: str, default: bool = True
) -> Callable[[Callable[[Training], Iterable[Found]]], Rule]:
    """Makes a rule of the function below it.

    `change` is a source text whose lines with the fault begin with "- ", those without it with "+ ", and all others
    with two spaces.
    """
    kind = Kind(code, severity, title, reason, fix, _without(change, "+"), _without(change, "-"), default)
    return lambda check: Rule(kind, check)


def _without(change: str, mark: str) -> str:
    """The text without the lines that begin with `mark`."""
    lines = textwrap.dedent(change).splitlines()
    return "\n".join(line[2:] for line in lines if not line.startswith(mark)).strip()


def said(node: ast.AST | None) -> str:
    """The source of an expression, shortened."""
    text = " ".join(ast.unparse(node).split()) if node is not None else "it"
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def is_true(node: object) -> bool:
    """Whether an argument's value is the literal True."""
    return getattr(node, "constant", None) is True


def is_false(node: object) -> bool:
    """Whether an argument's value is the literal False."""
    return getattr(node, "constant", None) is False
