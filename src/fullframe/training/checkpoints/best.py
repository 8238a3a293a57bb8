"""Which of a run's checkpoints is the best by what the recipe measures; it stays when older ones are removed."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from fullframe.errors import RecipeError


@dataclass(frozen=True)
class Best:
    """The state after `step`, of which `value` was measured under the name `measure`; smaller is better after a "-"."""

    step: int
    measure: str
    value: float


def better(measure: str, measured: Mapping[str, float], step: int, than: Best | None) -> Best | None:
    """What was measured after `step`, if that is better `than` what was best; not where it is no number.

    Raises RecipeError where nothing was measured under the name.
    """
    name = measure.removeprefix("-")
    if name not in measured:
        names = ", ".join(measured) or "nothing"
        raise RecipeError(f"recipe.best is {measure!r}, and evaluate() measures {names}; name one of them")
    value, sign = measured[name], -1 if measure != name else 1
    if math.isnan(value):
        return None
    is_better = than is None or than.measure != measure or sign * value > sign * than.value
    return Best(step, measure, value) if is_better else None


def in_vain(measure: str, records: Iterable[Mapping[str, Any]], best: Best | None) -> int:
    """How many evaluations in a row gave no better value, by a run's records (a step each, growing).

    Those after the `best`. Where none is known by this measure, the last ones that gave no number: one that had given
    any would be the best.
    """
    name = measure.removeprefix("-")
    evaluated = [record for record in records if "step" in record and name in record]
    if best is not None and best.measure == measure:
        return sum(record["step"] > best.step for record in evaluated)
    return len(list(takewhile(lambda record: record[name] is None, reversed(evaluated))))
