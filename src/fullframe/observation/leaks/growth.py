"""When a place that grows is a leak: it grew at every look, for longer than warm-ups, caches and windows do."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from fullframe.observation.leaks.walk import Place, Spot

_LOOKS = 4  # in a row at which it has grown
_STEPS = {"graph": 8, "hooks": 6, "list": 12, "dict": 24, "tensor": 16, "cache": 24}  # for so many steps
_EVALUATIONS = 4
_MARKS = 512


@dataclass
class Series:
    """How one place has grown without a look at which it had not."""

    spot: Spot
    kind: str
    size: int
    since: int  # the step of the first look of the row
    first: int  # the size then
    looks: int = 0
    evaluations: int = 0  # in a row at which it grew
    step: int = 0
    grew_at: int = 0  # the step of the last look at which it had grown

    def follow(self, size: int, step: int, evaluated: bool) -> None:
        """The next look."""
        grew, shrank = size > self.size, size < self.size
        self.size, self.step = size, step
        if grew:
            self.looks, self.grew_at = self.looks + 1, step
        else:
            self.looks, self.since, self.first = 0, step, size
        if evaluated or shrank:
            self.evaluations = self.evaluations + 1 if grew else 0

    @property
    def is_long(self) -> bool:
        """Whether it has grown for long enough, as far as its kind tells."""
        return self.looks >= _LOOKS and self.step - self.since >= _STEPS[self.kind]

    @property
    def at_evaluations(self) -> bool:
        """Whether it grows when the run evaluates, and then alone."""
        return self.looks < _LOOKS and self.evaluations >= _EVALUATIONS


class Growth:
    """Fed with the places of each look, it knows which of them have grown."""

    def __init__(self) -> None:
        self._series: dict[int, Series] = {}
        self._marks: deque[tuple[int, int]] = deque(maxlen=_MARKS)  # (number of an autograd node, step) of each look

    def look(self, places: Iterable[Place], step: int, sequence: int, evaluated: bool) -> None:
        """Take in a walk made after `step`, when the next autograd node was to be number `sequence`."""
        before, self._series = self._series, {}
        for place in places:
            key = place.spot.key
            size = self._steps_back(place, sequence) if place.kind == "graph" else place.size
            known = before.get(key)
            if known is None or known.kind != place.kind:
                known = Series(place.spot, place.kind, size, step, size, step=step)
            else:
                known.follow(size, step, evaluated)
            self._series[key] = known
        self._marks.append((sequence, step))

    def _steps_back(self, place: Place, sequence: int) -> int:
        """How many looks ago the oldest node of a graph was made."""
        oldest = sequence - place.size
        return sum(number > oldest for number, _ in self._marks)

    def long(self) -> list[Series]:
        """What has grown for long, and in nothing that grows itself."""
        found = [series for series in self._series.values() if series.kind != "bounded"]
        return [s for s in found if (s.is_long or s.at_evaluations) and not self._in_growing(s)]

    def _in_growing(self, series: Series) -> bool:
        """Elements of a list that fills grow older by themselves."""
        around = (self._series.get(spot.key) for spot in islice(series.spot.upwards(), 1, None))
        return any(other is not None and other.grew_at > series.since for other in around)
