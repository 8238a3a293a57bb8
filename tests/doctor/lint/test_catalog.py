"""One table of all rules."""

import pytest

from fullframe.doctor.lint.catalog import RULES, by_code


def test_a_code_is_given_once() -> None:
    family = tuple(RULES.values())[:1]
    with pytest.raises(ValueError, match="two rules"):
        by_code(family, family)


def test_every_rule_is_documented() -> None:
    for code, each in RULES.items():
        kind = each.kind
        assert code == kind.code and all((kind.title, kind.reason, kind.fix, kind.example, kind.instead))
        assert kind.reason.endswith(".") and kind.fix.endswith("."), code
