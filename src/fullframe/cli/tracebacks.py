"""The user's lines of a traceback as Python shows them; those of libraries in few words, and none left out."""

import re
import sysconfig
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException

_PACKAGE = Path(__file__).parents[1]
_LIBRARIES = [Path(sysconfig.get_paths()[name]) for name in ("purelib", "platlib", "stdlib", "platstdlib")]
_WIDTH = 120


def of_users(error: BaseException) -> str:
    """The traceback of `error` and of what led to it; as Python has it where no line of a user's is in it."""
    whole = TracebackException.from_exception(error)
    if not any(_is_users(frame) for link in _links(whole) for frame in link.stack):
        return "".join(whole.format()).rstrip()
    text = list[str]()
    for link in reversed(list(_links(whole))):
        text += ["\nwhich led to:\n\n"] if text else []
        text += ["Traceback (most recent call last):\n"] if link.stack else []
        for users, group in groupby(link.stack, _is_users):
            frames = list(group)
            text += StackSummary.from_list(frames).format() if users else [_in_few_words(frames)]
        text += link.format_exception_only()
    return "".join(text).rstrip()


def said_in_worker(error: BaseException) -> str:
    """What `error` says, without the traceback by which torch brings an error of ours out of a loader's worker."""
    told = re.fullmatch(r"Caught (\w+) in .+\nfullframe\.errors\.\1: (.+)", str(error), re.DOTALL)
    return told[2].rstrip() if told else str(error)


def lines_of_users(error: BaseException) -> str:
    """The user's own lines on the way to `error`, as a traceback has them; "" where there are none."""
    stack = TracebackException.from_exception(error).stack
    return "".join(StackSummary.from_list([frame for frame in stack if _is_users(frame)]).format()).rstrip()


def _links(last: TracebackException) -> Iterator[TracebackException]:
    """The exception, and those before it."""
    link: TracebackException | None = last
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_users(frame: FrameSummary) -> bool:
    path = Path(frame.filename)
    if not path.is_absolute():  # <frozen runpy>, <string>
        return False
    return not any(path.is_relative_to(folder) for folder in (_PACKAGE, *_LIBRARIES))


def _in_few_words(frames: list[FrameSummary]) -> str:
    """`through torch/nn/functional.py:3541, torch/overrides.py:1794`."""
    words = "through " + ", ".join(f"{_short(frame.filename)}:{frame.lineno}" for frame in frames)
    wrapped = textwrap.wrap(words, _WIDTH, break_long_words=False, break_on_hyphens=False)
    return textwrap.indent("\n".join(wrapped), "  ") + "\n"


def _short(filename: str) -> str:
    path = Path(filename)
    inside = (folder for folder in (_PACKAGE.parent, *_LIBRARIES) if path.is_relative_to(folder))
    folder = next(inside, None)
    return filename if folder is None else path.relative_to(folder).as_posix()
