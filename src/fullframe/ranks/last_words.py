"""What a rank says to the others when an error ends it, so that they need not find out by waiting for it."""

import sys
from types import TracebackType
from typing import Any

import torch.distributed as dist

from fullframe.ranks.channel import announce
from fullframe.ranks.tags import line_of
from fullframe.ranks.waiting import naming_lost_ranks

_speaks = [False]


class with_last_words(naming_lost_ranks):
    """As `naming_lost_ranks`; and the ranks that wait for this one learn at once of an error of its own.

    Of a FullframeError they learn only with `even_ours`, as most are met by all ranks.
    """

    def __init__(self, even_ours: bool = False):
        self._even_ours = even_ours

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, Exception):
            announce(error, self._even_ours, line_of(trace))


def speak_last() -> None:
    """From now on an error that ends this process is told to the ranks that wait for it, and a lost rank in words."""
    if _speaks[0] or dist.get_backend() == "fake":
        return
    _speaks[0] = True
    then = sys.excepthook

    def told(kind: Any, error: BaseException, trace: TracebackType | None) -> None:
        try:
            with_last_words(even_ours=True).__exit__(kind, error, trace)
        except Exception as found:
            error.add_note(f"fullframe: {found}")
        then(kind, error, trace)

    sys.excepthook = told
