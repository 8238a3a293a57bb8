"""Watches a program for what grows from step to step, within a small share of its time."""

import gc
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fullframe.arguments import checked
from fullframe.observation.leaks.graph import next_number
from fullframe.observation.leaks.growth import Growth, Series
from fullframe.observation.leaks.origin import Investigation, Line, class_file, keeping_lines, seems_emptied
from fullframe.observation.leaks.report import Leak, leak
from fullframe.observation.leaks.walk import Place, Variables, is_users, plain, users_modules, walk
from fullframe.observation.leaks.weigh import Weight, new_elements, weigh

_SHARE = 0.002  # of the thread's processor time, beyond
_SECONDS = 0.04  # in all
_LEAST_BYTES = 4096  # a step, of what has no graph: below that it is a history of numbers
_EMPTIED_STEPS = 100  # of growth, where the program has a line that empties it
_TRIES = 12  # steps that are investigated for one place
_AT_ONCE = 8  # places in one investigation
_GAP = 20  # steps between two looks at most, where there is time


class LeakWatch:
    """`step()` after each step of a training loop; what grows is told to `say`, once, and kept in `leaks`.

    `roots` are objects to look into beside the user's modules, by the name that is to be said of them. `samples` is how
    many the data has: of dicts that hold no more than that, and of what the data itself keeps within an epoch, nothing
    is said.
    """

    def __init__(
        self,
        roots: Mapping[str, Any],
        say: Callable[[Leak], None],
        samples: int | None = None,
        samples_per_step: int = 1,
    ):
        self.leaks: list[Leak] = []
        self._roots, self._say, self._samples, self._per_step = dict(roots), say, samples, samples_per_step
        self._growth = Growth()
        self._number = 0
        self._spent, self._took, self._began = 0.0, 0.0, time.thread_time()
        self._judged: set[int] = set()  # keys of places that are reported or harmless
        self._tries: dict[int, int] = {}
        self._investigation: Investigation | None = None
        self._investigated: list[Series] = []
        self._sequence = next_number()
        self._evaluated_at = self._evaluates_every = self._looked_at = 0

    def before(self, number: int, frame: types.FrameType | None = None) -> None:
        """Before a step: watch it closely where that was found to be needed."""
        if self._investigation is None or not self._is_time(number):
            return
        self._sequence = next_number()
        self._investigation.start(frame)

    def stop(self) -> None:
        """Watch no closer; what runs goes on."""
        if self._investigation is not None and self._investigation.runs:
            self._investigation.stop()
        self._investigation = None

    def _is_time(self, number: int) -> bool:
        """What grows at evaluations is watched when the next one comes."""
        at_evaluation = any(series.at_evaluations for series in self._investigated)
        return not at_evaluation or number >= self._evaluated_at + self._evaluates_every

    def after(self, number: int, evaluated: bool = False, frame: types.FrameType | None = None) -> None:
        """After a step; `evaluated`: and after an evaluation."""
        self._number = number
        if evaluated:
            self._evaluates_every, self._evaluated_at = number - self._evaluated_at, number
        if self._investigation is not None and self._investigation.runs:
            self._conclude(self._investigation)
        elif self._investigation is None and (evaluated or number >= self._next) and self._has_time:
            self._look(evaluated, frame)

    @property
    def _has_time(self) -> bool:
        return self._spent + self._took <= _SECONDS + _SHARE * (time.thread_time() - self._began)

    @property
    def _next(self) -> int:
        """The step of the next look: often at first."""
        return self._looked_at + min(1 + self._looked_at // 6, _GAP)

    def _look(self, evaluated: bool, frame: types.FrameType | None) -> None:
        started, self._looked_at = time.thread_time(), self._number
        with _no_collection():  # which the many small objects of a walk would set off; at its end they are gone
            self._search(evaluated, frame)
        self._took = time.thread_time() - started
        self._spent += self._took

    def _search(self, evaluated: bool, frame: types.FrameType | None) -> None:
        sequence = next_number()
        places = list(walk(self._all_roots(frame), sequence))
        self._growth.look(places, self._number, sequence, evaluated)
        suspects = {s.spot.key: s for s in self._growth.long() if s.spot.key not in self._judged}
        found = [(p, suspects[p.spot.key]) for p in places if p.spot.key in suspects]
        found = [(place, series) for place, series in found if self._is_patient(place, series)][:_AT_ONCE]
        if found:
            self._investigated = [series for _, series in found]
            self._investigation = Investigation([place for place, _ in found])

    def _all_roots(self, frame: types.FrameType | None) -> dict[str, Any]:
        found: dict[str, Any] = dict(users_modules())
        while frame is not None:
            if is_users(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
                found[f"<{frame.f_code.co_name}>"] = Variables(frame)
            frame = frame.f_back
        return found | self._roots

    def _is_patient(self, place: Place, series: Series) -> bool:
        """Whether this has grown for longer than an honest one would, by what its kind and its program say."""
        steps = series.step - series.since
        if place.kind in ("graph", "hooks") or series.at_evaluations:
            return True
        bounded = self._samples is not None and (place.kind == "dict" or place.spot.root == "data")
        if bounded and place.size <= 1.25 * (self._samples or 0) + self._per_step:
            return False
        name, file = place.spot.name, class_file(place.owner)
        if place.kind == "list" and file is not None and seems_emptied(file, name):
            return steps >= _EMPTIED_STEPS
        return place.kind != "dict" or self._samples is not None or steps >= 2 * _EMPTIED_STEPS or _has_graph(place)

    def _conclude(self, investigation: Investigation) -> None:
        started = time.thread_time()
        self._investigation = None
        kept = investigation.stop()
        for index, series in enumerate(self._investigated):
            key = series.spot.key
            self._tries[key] = self._tries.get(key, 0) + 1
            if investigation.has_grown(index):
                self._judge(investigation, index, series, kept[index])
            if self._tries[key] >= _TRIES:
                self._judged.add(key)
        self._investigated = []
        self._spent += time.thread_time() - started

    def _judge(self, investigation: Investigation, index: int, series: Series, kept: Line | None) -> None:
        place = investigation.places[index]
        value = investigation.now(index)
        new = [value] if place.kind in ("graph", "tensor") else new_elements(value, investigation.sizes[index])
        weight = weigh(new, self._sequence)
        bytes = weight.bytes
        if place.kind == "graph":
            bytes = 0
        elif place.kind == "tensor" and series.at_evaluations:
            bytes -= series.size  # one evaluation later
        elif place.kind == "tensor":
            bytes = round((series.size - series.first) / max(series.step - series.since, 1))
        self._judged.add(series.spot.key)
        kind = _kind(place, series, weight)
        if weight.nodes == 0 and kind != "hooks" and bytes < _LEAST_BYTES:
            return
        made = next(filter(None, map(investigation.makers.line, weight.tensors)), None)
        kept = kept or self._by_its_source(place)
        every = "evaluation" if series.at_evaluations else "step"
        found = leak(kind, place.spot.path, made, kept, bytes, weight.nodes, self._number, every)
        self.leaks.append(found)
        self._say(found)

    def _by_its_source(self, place: Place) -> Line | None:
        file = class_file(place.owner)
        return None if file is None else next(iter(keeping_lines(file, place.spot.name)), None)


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _has_graph(place: Place) -> bool:
    values = place.value.values() if isinstance(place.value, dict) else ()
    return any(isinstance(value, Tensor) and plain(value).requires_grad for value in values)


def _kind(place: Place, series: Series, weight: Weight) -> str:
    if place.kind in ("graph", "hooks", "cache"):
        return place.kind
    if series.at_evaluations:
        return "evaluation"
    if place.kind == "tensor":
        return "growing tensor"
    if weight.what == "function":
        return "closures"
    if weight.what in ("array", "object"):
        return weight.what + "s"
    if place.spot.root == "model":
        return "activations"
    return "graphs" if weight.nodes else "outputs"


class LoopWatch(LeakWatch):
    """A `LeakWatch` for a loop of one's own; `fullframe.watch_leaks` makes it."""

    _ended = False

    def step(self) -> None:
        """To be called once after each step, in the loop."""
        if self._ended:
            return
        frame = sys._getframe(1)
        try:
            self.after(self._number + 1, frame=frame)
            self.before(self._number + 1, frame=frame)
        except Warning:
            raise
        except Exception as error:  # objects may answer in any way: that ends the watch, not the loop
            self._ended = True
            self.stop()
            warnings.warn(f"the watch on leaks has ended: {type(error).__name__}: {error}", stacklevel=2)


@checked
def watch_leaks(*, say: Callable[[str], None] | None = None, **objects: Any) -> LoopWatch:
    """Watch a training loop of one's own for what grows from step to step.

        watch = ff.watch_leaks(model=model, optimizer=optimizer)
        for batch in loader:
            ...
            watch.step()

    Looked into are the variables of the functions that run, the program's own modules and the named `objects`. A leak
    is told once, to `say` or as a warning, with the line that made it and the one that keeps it; `watch.leaks` has them
    as data. It takes about a quarter of a percent of the loop's time, and one slower step for each leak.
    """
    tell = say or (lambda text: warnings.warn(text, stacklevel=4))
    return LoopWatch(objects, lambda found: tell(found.text))
