"""metrics.jsonl as columns of numbers."""

import bisect
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

_MOST = 2**63  # of what is not written as a float


class Table:
    """metrics.jsonl as columns of numbers: 8 bytes a value, so that a run of a million steps can be held.

    `steps` grows strictly; `column(name)` has a value for each of them, NaN where there is none. A step that comes
    again, after a resume, takes the place of what there was from that step on.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self._columns: dict[str, array[float]] = {}
        self._nulls: dict[str, array[int]] = {}  # the steps on which something was recorded that is no number

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def names(self) -> list[str]:
        """What was recorded, in the order of its first appearance."""
        return list(self._columns)

    def column(self, name: str) -> Sequence[float]:
        """One value a step; all NaN where `name` was never recorded."""
        return self._columns.get(name) or array("d", [math.nan]) * len(self.steps)

    def known(self, name: str) -> tuple[list[int], list[float]]:
        """The steps on which `name` is a number, and the numbers."""
        values = np.array(self.column(name))
        there = ~np.isnan(values)
        return np.array(self.steps)[there].tolist(), values[there].tolist()

    def last(self, name: str) -> float | None:
        """The newest number."""
        return next((value for value in reversed(self.column(name)) if value == value), None)

    def newest(self, name: str) -> float | None:
        """What was recorded last: NaN where that is no number, None where nothing was."""
        nulls = self._nulls.get(name)
        for step, value in zip(reversed(self.steps), reversed(self.column(name)), strict=True):
            if value == value or (nulls and nulls[-1] == step):
                return value
        return None

    def add(self, record: Mapping[str, Any]) -> None:
        """One line that has a step."""
        step = int(record["step"])
        if self.steps and step <= self.steps[-1]:
            self._drop_from(step)
        for name, value in record.items():
            if value is None:
                self._nulls.setdefault(name, array("q")).append(step)
            if name not in self._columns and name != "step" and (value is None or _is_number(value)):
                self._columns[name] = array("d", [math.nan]) * len(self.steps)
        self.steps.append(step)
        for name, column in self._columns.items():
            value = record.get(name)
            if value.__class__ is not float or math.isinf(value):  # most are plain numbers, of which there are millions
                value = float(value) if _is_number(value) else math.nan
            column.append(value)

    def _drop_from(self, step: int) -> None:
        start = bisect.bisect_left(self.steps, step)
        del self.steps[start:]
        for column in self._columns.values():
            del column[start:]
        for nulls in self._nulls.values():
            del nulls[bisect.bisect_left(nulls, step) :]


def _is_number(value: Any) -> TypeGuard[int | float]:
    return (isinstance(value, float) and not math.isinf(value)) or (isinstance(value, int) and abs(value) < _MOST)
