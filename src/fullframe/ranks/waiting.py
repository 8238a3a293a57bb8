"""Which threads wait for other ranks just now: whoever waits says so, and the watchdog on hangs reads it."""

import threading
from types import TracebackType

_waiting: dict[int, int] = {}  # thread -> how many waits it is inside of


class waiting_for_ranks:
    """Inside `with`, this thread waits for other ranks, or for a device that does."""

    __slots__ = ("_thread",)

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        _waiting[self._thread] = _waiting.get(self._thread, 0) + 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        depth = _waiting[self._thread] - 1
        if depth:
            _waiting[self._thread] = depth
        else:
            del _waiting[self._thread]


def waits(thread: int) -> bool:
    """Whether the thread with this identity waits for other ranks."""
    return thread in _waiting
