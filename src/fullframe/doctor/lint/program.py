"""What one file does, in the order in which it does it: events, each within its frames.

Events are numbered. A frame is a loop, a `with`, a branch, a handler or a call of a function of the file, and holds an
unbroken range of events, so "does this loop call `backward`?" is a question about a range.
"""

import ast
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import takewhile
from typing import TypeVar

from fullframe.doctor.lint.values import Definition, Value


class FrameKind(Enum):
    """What holds events."""

    MODULE = "module"
    FUNCTION = "function"
    LOOP = "loop"  # for and while
    COMPREHENSION = "comprehension"
    WITH = "with"  # also a decorator of the function
    IF = "if"  # one arm of it
    TRY = "try"  # what may raise
    EXCEPT = "except"


@dataclass(eq=False, slots=True)
class Frame:
    """One block that is being run, inside `parent`."""

    kind: FrameKind
    node: ast.AST
    parent: "Frame | None"
    value: Value | None = None  # iterable, test, context manager, exception type
    arm: bool = True  # of an `if`: its body rather than its `else`
    definition: Definition | None = None  # of a function
    start: int = 0  # its events are start <= index < stop
    stop: int = -1
    returned: list[Value] = field(default_factory=list)  # of a function

    def enclosing(self, *kinds: FrameKind) -> "Iterator[Frame]":
        """This frame and those around it, innermost first; of these kinds, where some are given."""
        frame: Frame | None = self
        while frame is not None:
            if not kinds or frame.kind in kinds:
                yield frame
            frame = frame.parent

    def innermost(self, *kinds: FrameKind) -> "Frame | None":
        """The nearest frame of such a kind, this one included."""
        return next(self.enclosing(*kinds), None)

    def inside(self, other: "Frame") -> bool:
        """Whether this frame lies in `other` or is it."""
        return any(frame is other for frame in self.enclosing())

    def is_always_run_in(self, outer: "Frame") -> bool:
        """Whether this frame runs each time `outer` does: no branch, handler or further loop lies between."""
        sometimes = (FrameKind.IF, FrameKind.EXCEPT, FrameKind.LOOP, FrameKind.COMPREHENSION)
        return self.inside(outer) and not any(frame.kind in sometimes for frame in self.up_to(outer))

    def is_run_before(self, other: "Frame", outer: "Frame") -> bool:
        """Whether this frame, which stands before `other`, has run whenever that runs in a round of `outer`."""
        around, always = set(map(id, other.up_to(outer))), (FrameKind.WITH, FrameKind.TRY, FrameKind.FUNCTION)
        return all(id(frame) in around or frame.kind in always for frame in self.up_to(outer))

    def up_to(self, outer: "Frame | None") -> "Iterator[Frame]":
        """This frame and those around it, as far as `outer`, which is left out."""
        return takewhile(lambda frame: frame is not outer, self.enclosing())


@dataclass(eq=False, slots=True)
class Call:
    """A call; `result` is what it gives where it was followed, else the call itself."""

    value: Value
    node: ast.Call
    frame: Frame
    index: int
    result: Value
    followed: bool = False

    @property
    def receiver(self) -> Value:
        """Of a call of a method: the object."""
        return self.value.function.inputs[0]


@dataclass(eq=False, slots=True)
class Store:
    """An assignment; `holder` is the object whose attribute or item is written, None for a name."""

    place: tuple[str, int, object]
    name: str
    old: Value | None
    new: Value
    holder: Value | None
    node: ast.AST
    frame: Frame
    index: int


Event = Call | Store
_Event = TypeVar("_Event", Call, Store)


class Program:
    """The events and frames of one file."""

    def __init__(self, source: str, tree: ast.Module):
        self.lines, self.tree = re.split(r"\r\n?|\n", source), tree  # where Python, too, ends a line
        self.events: list[Event] = []
        self.frames: list[Frame] = []
        self.definitions: list[Definition] = []
        self.paths: dict[str, Value] = {}  # dotted path -> what was imported, or reached through an import
        self.generic: dict[int, Value] = {}  # id of a class's definition -> the instance its methods were run with
        self.bare: list[tuple[ast.Attribute, Value]] = []  # statements that are only `x.name`, with x
        self._calls: dict[str, list[Call]] = defaultdict(list)
        self.stores: list[Store] = []

    def index(self) -> None:
        """To be called once after the last event."""
        for event in self.events:
            if isinstance(event, Store):
                self.stores.append(event)
            else:
                function = event.value.function
                self._calls[function.text.rpartition(".")[2]].append(event)

    def calls(self, *names: str) -> Iterator[Call]:
        """Calls of a function or method whose last name is one of `names`, in order of events for each name."""
        for name in names:
            yield from self._calls.get(name, ())

    def calls_in(self, frame: Frame, *names: str) -> Iterator[Call]:
        """Those inside `frame`."""
        for name in names:
            yield from _inside(frame, self._calls.get(name, []))

    def sets(self, *names: str) -> bool:
        """Whether a variable or attribute of such a name is assigned."""
        return any(store.name in names for store in self.stores)

    def stores_in(self, frame: Frame) -> list[Store]:
        """Those inside `frame`."""
        return _inside(frame, self.stores)

    def events_in(self, frame: Frame) -> list[Event]:
        """All events inside `frame`."""
        return self.events[frame.start : frame.stop]


def _inside(frame: Frame, events: list[_Event]) -> list[_Event]:
    """Those of `events`, in their order, that happen inside `frame`."""
    first, stop = (bisect_left(events, index, key=lambda event: event.index) for index in (frame.start, frame.stop))
    return events[first:stop]
