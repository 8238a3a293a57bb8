"""Where what grows is made and kept: one step is watched line by line and call by call.

The lines of the program are followed by Python's tracing, torch's functions by a torch function mode; neither changes
what is computed. Where a debugger or a coverage tool traces already, the source is searched instead.
"""

import linecache
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fullframe.observation.leaks.walk import PACKAGE, Place, Variables, is_users, plain, size_of

_TORCH = str(Path(torch.__file__).parent) + "/"
_PYTHON = str(Path(linecache.__file__).parent) + "/"
_LOOP = PACKAGE + "training/"  # what called it has made nothing


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a source file."""

    file: str
    number: int

    @property
    def text(self) -> str:
        """What stands there."""
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"{shortened(self.file)}:{self.number}"


def shortened(file: str) -> str:
    """As seen from the working directory, where it lies below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


class Makers(TorchFunctionMode):
    """Remembers the line of the user's program that made each tensor, as long as the tensor lives."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[int, tuple[weakref.ref[Tensor], Line]] = {}

    def _followed(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [one for one in (out if isinstance(out, tuple | list) else (out,)) if isinstance(one, Tensor)]
        if made:
            line = _line_of_user(sys._getframe(1))
            if line is not None:
                self._lines.update((id(one), (weakref.ref(one), line)) for one in made)
        return out

    # Under a name of its own: messages between ranks tell each other the op by the frame of `__torch_function__`, and
    # only one of the ranks is watched.
    __torch_function__ = _followed

    def line(self, tensor: Tensor) -> Line | None:
        """Where the program made it; None where it was made out of Python's sight."""
        reference, line = self._lines.get(id(tensor), (None, None))
        return line if reference is not None and reference() is tensor else None


def _line_of_user(frame: types.FrameType | None) -> Line | None:
    while frame is not None and not frame.f_code.co_filename.startswith(_LOOP):
        if is_users(frame.f_code.co_filename):
            return Line(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


class Lines:
    """Finds the line that changes a place, by looking at it before and after each line of the program."""

    def __init__(self, places: Sequence[Place]):
        self._tokens = [token_of(place) for place in places]
        self._before = [token() for token in self._tokens]
        self.found: list[Line | None] = [None] * len(places)
        self._at: dict[types.FrameType, int] = {}

    def start(self, frame: types.FrameType | None) -> None:
        """Begin, with the functions that run already, from `frame` outwards."""
        sys.settrace(self._called)
        while frame is not None:
            if _is_followed(frame.f_code.co_filename):
                self._at[frame] = frame.f_lineno
                frame.f_trace = self._line
            frame = frame.f_back

    def stop(self) -> None:
        """Trace no more."""
        sys.settrace(None)
        for frame in self._at:
            frame.f_trace = None
        self._at.clear()

    def _called(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if not _is_followed(frame.f_code.co_filename):
            return None
        self._at[frame] = frame.f_lineno
        return self._line

    def _line(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        number = self._at.get(frame, frame.f_lineno)
        for index, token in enumerate(self._tokens):
            now = token()
            if now != self._before[index]:
                self._before[index] = now
                self.found[index] = self.found[index] or Line(frame.f_code.co_filename, number)
        if event == "return":
            self._at.pop(frame, None)
        else:
            self._at[frame] = frame.f_lineno
        return self._line


def _is_followed(file: str) -> bool:
    return not file.startswith((_TORCH, PACKAGE, "<frozen", "<string>")) and (
        not file.startswith(_PYTHON) or is_users(file)
    )


def token_of(place: Place) -> Callable[[], Any]:
    """A function whose value changes when something is put into the place."""
    if place.kind == "cache":
        return lambda: place.value.cache_info().currsize
    if place.kind not in ("graph", "tensor"):
        return lambda: size_of(place.value)
    read = _reader(place)

    def token() -> Any:
        try:
            value = read()
        except (KeyError, AttributeError, IndexError, ValueError):
            return None
        return (id(value), plain(value)._version) if isinstance(value, Tensor) else id(value)

    return token


def _reader(place: Place) -> Callable[[], Any]:
    """Reads what the place holds now."""
    owner, label = place.owner, place.spot.label
    name = label.lstrip(".")
    if isinstance(owner, Variables):
        frame = owner.frame
        return lambda: frame.f_locals[name]
    if label.startswith("["):
        text = label[1:-1]
        key: Any = int(text) if re.fullmatch(r"-?\d+", text) else text[1:-1]
        return lambda: owner[key]
    if isinstance(owner, types.FunctionType) and name in owner.__code__.co_freevars:
        cell = (owner.__closure__ or ())[owner.__code__.co_freevars.index(name)]
        return lambda: cell.cell_contents
    return lambda: getattr(owner, name)


class Investigation:
    """One step during which the places are watched; `stop` gives the makers and the lines that kept something."""

    def __init__(self, places: Sequence[Place]):
        # What a tensor's place holds is let go: the next one may replace it.
        self.places = tuple(replace(p, value=None) if p.kind in ("graph", "tensor") else p for p in places)
        self.sizes = [_size(place) for place in places]
        self.makers = Makers()
        self._lines = Lines(places)
        self._traces = self.runs = False

    def start(self, frame: types.FrameType | None = None) -> None:
        """From here on; `frame` is the program's own that runs now, where there is one."""
        self.runs = True
        self.makers.__enter__()  # type: ignore[no-untyped-call]
        self._traces = sys.gettrace() is None
        if self._traces:
            self._lines.start(frame)

    def stop(self) -> list[Line | None]:
        """Until here: for each place the line that put something into it."""
        if self._traces:
            self._lines.stop()
        self.makers.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return self._lines.found

    def has_grown(self, index: int) -> bool:
        """Whether something was put into this place."""
        return bool(_size(self.places[index]) != self.sizes[index])

    def now(self, index: int) -> Any:
        """What the place holds now."""
        place = self.places[index]
        return _reader(place)() if place.kind in ("graph", "tensor") else place.value


def _size(place: Place) -> Any:
    return token_of(place)()


def keeping_lines(file: str, name: str) -> Iterator[Line]:
    """The lines of a file that seem to put something into what has this name."""
    n = re.escape(name)
    keeps = re.compile(
        rf"\b{n}\s*(\.(append|extend|add|insert|update|setdefault|appendleft|register_\w+)\s*\(|\[[^\]]*\]\s*=[^=]|\+=)"
        rf"|\b{n}\s*=[^=].*\b{n}\b"
    )
    for number, text in enumerate(linecache.getlines(file), start=1):
        if keeps.search(text):
            yield Line(file, number)


def seems_emptied(file: str, name: str) -> bool:
    """Whether a file has a line that takes something out of what has this name, or makes it anew in a function."""
    n = re.escape(name)
    takes = re.compile(
        rf"\b{n}\s*\.\s*(clear|pop|popleft|popitem|remove)\s*\(|\bdel\s+[\w.]*\b{n}\b|\b{n}\[.*:.*\]\s*="
    )
    anew = re.compile(rf"\b{n}\b\s*(:[^=]+)?=(?!=)")
    lines = linecache.getlines(file)
    return any(map(takes.search, lines)) or sum(anew.search(text) is not None for text in lines) > 1


def class_file(owner: Any) -> str | None:
    """The file of the class of an object, or of a module or function itself."""
    if isinstance(owner, Variables):
        return owner.frame.f_code.co_filename
    if isinstance(owner, types.FunctionType):
        return owner.__code__.co_filename
    if isinstance(owner, types.ModuleType):
        return getattr(owner, "__file__", None)
    kind = owner if isinstance(owner, type) else type(owner)
    if kind is nn.Module or kind.__module__ in ("builtins", "collections"):
        return None
    return getattr(sys.modules.get(kind.__module__), "__file__", None)
