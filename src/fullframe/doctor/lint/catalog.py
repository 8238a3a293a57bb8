"""The rules of `doctor lint`, by code; a code that is given twice is an error."""

from fullframe.doctor.lint.rule import Rule
from fullframe.doctor.lint.rules import (
    accumulation,
    data,
    evaluation,
    gradients,
    graphs,
    losses,
    memory,
    modules,
    old_forms,
    precision,
    ranks,
    waiting,
    wrappers,
)

_FAMILIES = (
    *(graphs, losses, modules, evaluation, gradients, accumulation, precision, memory, waiting, data),
    *(ranks, wrappers, old_forms),
)


def by_code(*families: tuple[Rule, ...]) -> dict[str, Rule]:
    """One table of all rules, in order of their codes."""
    found: dict[str, Rule] = {}
    for each in (each for family in families for each in family):
        if each.kind.code in found:
            raise ValueError(f"two rules have the code {each.kind.code}")
        found[each.kind.code] = each
    return dict(sorted(found.items()))


RULES = by_code(*(family.RULES for family in _FAMILIES))
