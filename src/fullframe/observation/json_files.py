"""JSON that another process writes meanwhile, and values of whatever type they should be, or None."""

import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

T = TypeVar("T")
_MOST = 1e18


class JsonLines:
    """The objects of a file of JSON lines that is written meanwhile."""

    def __init__(self, path: Path):
        self._path, self._offset, self._file_number = path, 0, 0
        self.unreadable = 0

    def fresh(self) -> tuple[Iterator[dict[str, Any]], bool]:
        """What came since the last call; and whether the file is another one than then, and this all of it.

        A line is read when it is asked for, as there may be millions: go through all of them before the next call.
        """
        try:
            found = self._path.stat()
        except OSError:
            again = self._offset > 0
            self._offset = self._file_number = self.unreadable = 0
            return iter(()), again
        again = found.st_ino != self._file_number or found.st_size < self._offset
        if again:
            self._offset, self._file_number, self.unreadable = 0, found.st_ino, 0
        return self._read(), again

    def _read(self) -> Iterator[dict[str, Any]]:
        with suppress(OSError), open(self._path, "rb") as file:
            if os.fstat(file.fileno()).st_ino != self._file_number:
                return  # it was replaced just now; the next call sees it
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # it may still be written
                    return
                self._offset += len(line)
                found = parsed(line)
                if found is not None:
                    yield found
                elif line.strip():
                    self.unreadable += 1


def parsed(text: bytes | str) -> dict[str, Any] | None:
    """The JSON object that this is; None where it is none."""
    try:
        # json.loads of bytes takes longer to find out how they are encoded than to read them.
        found = json.loads(text if isinstance(text, str) else text.decode())
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none."""
    try:
        return parsed(path.read_bytes())
    except OSError:
        return None


def number(value: Any) -> float | None:
    """A number that bytes, seconds or steps may have; truth is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _MOST else None


def whole_number(value: Any) -> int | None:
    """A finite number without its fraction."""
    found = number(value)
    return None if found is None else int(found)


def mapping(value: Any) -> dict[str, Any]:
    """An object, or an empty one."""
    return value if isinstance(value, dict) else {}


def numbers(value: Any) -> dict[str, float]:
    """The entries of an object that are finite numbers."""
    return {name: found for name, each in mapping(value).items() if (found := number(each)) is not None}


def sizes(value: Any) -> dict[str, int]:
    """The entries of an object that are finite numbers, without fractions."""
    return {name: int(each) for name, each in numbers(value).items()}


def moment(value: Any) -> datetime | None:
    """An ISO 8601 time, with the zone of this machine where it names none."""
    try:
        return datetime.fromisoformat(value).astimezone()
    except (TypeError, ValueError):
        return None


def record(kind: Callable[..., T], found: Mapping[str, Any]) -> T:
    """A dataclass of what an object has of its fields' names and types; all else are the fields' defaults."""
    values = {name: read(found.get(name)) for name, read in _readers(kind)}
    return kind(**{name: value for name, value in values.items() if value is not None and value != ""})


@functools.cache
def _readers(kind: Any) -> list[tuple[str, Callable[[Any], Any]]]:
    return [(field.name, _reader(field.type)) for field in fields(kind)]


def _reader(kind: Any) -> Callable[[Any], Any]:
    """How a field of this type is read."""
    if kind in _OF_TYPE:
        return _OF_TYPE[kind]
    if isinstance(kind, type):  # a dataclass
        return lambda value: record(kind, mapping(value))
    inner = _reader(get_args(kind)[0])
    if get_origin(kind) is not tuple:
        return lambda value: inner(value) if isinstance(value, dict) else None
    return lambda value: tuple(
        one for one in map(inner, value if isinstance(value, list | tuple) else ()) if one is not None
    )


_OF_TYPE: dict[Any, Callable[[Any], Any]] = {
    str: lambda value: str(value or ""),
    int: whole_number,
    int | None: whole_number,
    float: number,
    float | None: number,
    datetime | None: moment,
    Mapping[str, Any]: mapping,
    Mapping[str, float]: numbers,
    Mapping[str, int]: sizes,
    Mapping[str, str]: lambda value: {name: str(each) for name, each in mapping(value).items()},
}
