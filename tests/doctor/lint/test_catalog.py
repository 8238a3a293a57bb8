"""One table of all rules."""

import pytest

from fullframe.doctor.lint.catalog import RULES, by_code
from fullframe.doctor.lint.check import UNREADABLE, check_source
from tests.doctor.lint.samples import IMPORTS


def test_a_code_is_given_once() -> None:
    family = tuple(RULES.values())[:1]
    with pytest.raises(ValueError, match="two rules"):
        by_code(family, family)


def test_every_rule_is_documented() -> None:
    for code, each in RULES.items():
        kind = each.kind
        assert code == kind.code and all((kind.title, kind.reason, kind.fix, kind.example, kind.instead))
        assert kind.reason.endswith(".") and kind.fix.endswith("."), code


def test_an_example_shows_its_fault_and_the_remedy_leaves_none() -> None:
    on = [rule for rule in RULES.values() if rule.kind.default]
    for kind in (UNREADABLE, *(rule.kind for rule in RULES.values())):
        rules = on if kind.default else [*on, RULES[kind.code]]
        assert kind.code in {found.code for found in check_source(IMPORTS + kind.example, "a.py", rules)}, kind.code
        assert check_source(IMPORTS + kind.instead, "a.py", rules) == [], kind.code
