"""Whose code an exception came from, so that one line can say it in place of a hundred of torch's own frames."""

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fullframe.errors import FullframeError, RecipeError

_LIBRARIES = tuple(
    str(Path(path).resolve())
    for path in (
        Path(__file__).parents[2],
        Path(torch.__file__).parent,
        sysconfig.get_paths()["stdlib"],
        sysconfig.get_paths()["purelib"],
    )
)


def told(error: BaseException) -> str:
    """The exception in one line, with its `place`."""
    first = (str(error).strip().splitlines() or [""])[0]
    return (f"{type(error).__name__}: {first}" if first else type(error).__name__) + place(error)


def place(error: BaseException) -> str:
    """The innermost line of no library, nor of torch or fullframe, as ", at file, line 7 (code)"; "" without one."""
    own = users_frames(error)
    if not own:
        return ""
    code = f" ({own[-1].line})" if own[-1].line else ""
    return f", at {own[-1].filename}, line {own[-1].lineno}{code}"


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The lines on the way to `error` that are of no library, nor of torch or fullframe."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if Path(frame.filename).is_file() and not _of_a_library(frame.filename)]


def _of_a_library(filename: str) -> bool:
    return str(Path(filename).resolve()).startswith(_LIBRARIES)


@contextmanager
def blamed(what: str, remedy: str = "", passing: type[Exception] = FullframeError) -> Iterator[None]:
    """Whatever is raised inside becomes a RecipeError "{what}: ... {remedy}"; FullframeError and `passing` do not."""
    try:
        yield
    except (FullframeError, passing):
        raise
    except Exception as error:
        raise RecipeError(f"{what}: {told(error)}{remedy}") from error
