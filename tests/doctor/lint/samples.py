"""Source texts for the tests of rules: for each rule some that have the fault and some that only look like it."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pytest

from fullframe.doctor.lint.catalog import RULES
from fullframe.doctor.lint.check import check_source
from fullframe.doctor.lint.rule import Rule

IMPORTS = "import torch, torch.nn as nn, torch.nn.functional as F\n"


class Samples(NamedTuple):
    """Of one rule: in each of `bad` a line that ends in `# here` is found, and no other; in `good` nothing is."""

    bad: Sequence[str]
    good: Sequence[str]


def lines_found(source: str, code: str) -> list[int]:
    return [f.line or 0 for f in check_source(source, "sample.py", [RULES[code]])]


def training(extra: str = "", before: str = "", after: str = "") -> str:
    """A training loop with lines added before it, at the end of its body, and after it."""
    body = """
for x, y in loader:
    out = model(x)
    loss = F.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
    return before + body + textwrap.indent(textwrap.dedent(extra), "    ") + "\n" + textwrap.dedent(after)


def judged(table: Mapping[str, Samples], family: Sequence[Rule]) -> tuple[Callable[..., None], Callable[[], None]]:
    """Of a family of rules: every sample, the examples of the documentation among them; and that there are enough."""
    rows: list[tuple[str, str, bool | None]] = []
    for code, samples in table.items():
        kind = RULES[code].kind
        rows += [(code, source, True) for source in samples.bad] + [(code, kind.example, None)]
        rows += [(code, source, False) for source in (*samples.good, kind.instead)]

    @pytest.mark.parametrize(("code", "source", "has_fault"), rows)
    def found(code: str, source: str, has_fault: bool | None) -> None:
        check(code, source, has_fault)

    def enough() -> None:
        assert sorted(table) == sorted(rule.kind.code for rule in family)
        assert {code for code, s in table.items() if len(s.bad) < 2 or len(s.good) < 2} == set()

    return found, enough


def check(code: str, source: str, has_fault: bool | None) -> None:
    """`has_fault` None: found somewhere."""
    source = IMPORTS + textwrap.dedent(source)
    expected = [number for number, line in enumerate(source.splitlines(), 1) if line.rstrip().endswith("# here")]
    assert bool(expected) is bool(has_fault), "a bad sample marks its lines, a good one has none"
    found = lines_found(source, code)
    assert found if has_fault is None else found == expected, source
