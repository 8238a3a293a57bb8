"""Which threads wait for other ranks just now: whoever waits says so, and the watchdog on hangs reads it.

How long each thread has waited in all is kept too, for the account of a step's seconds.
"""

from threading import get_ident
from time import perf_counter
from types import TracebackType

_waiting: dict[int, int] = {}  # thread -> how many waits it is inside of
_waited: dict[int, float] = {}  # thread -> seconds


class waiting_for_ranks:
    """Inside `with`, this thread waits for other ranks, or for a device that does."""

    __slots__ = ("_outer", "_since", "_thread")

    def __enter__(self) -> None:
        self._thread = thread = get_ident()
        self._outer = outer = _waiting.get(thread, 0)
        _waiting[thread] = outer + 1
        self._since = perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        thread = self._thread
        if self._outer:
            _waiting[thread] = self._outer
        else:
            del _waiting[thread]
            _waited[thread] = _waited.get(thread, 0.0) + perf_counter() - self._since


def waits(thread: int) -> bool:
    """Whether the thread with this identity waits for other ranks."""
    return thread in _waiting


def waited_seconds() -> float:
    """How long this thread has waited so far."""
    return _waited.get(get_ident(), 0.0)
