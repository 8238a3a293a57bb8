"""Which threads wait for other ranks just now: whoever waits says so, and the watchdog on hangs reads it.

And which thread calls a parallel model: messages of two would meet one another's on the other ranks.

How long each thread has waited in all is kept too, for the account of a step's seconds. A wait that ends because
another rank is gone, or does not come, ends by an error that says so, in place of gloo's, NCCL's or the store's words.
"""

import os
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from threading import _DummyThread, current_thread, get_ident
from time import perf_counter
from types import TracebackType

import torch.distributed as dist

from fullframe.errors import RankError
from fullframe.ranks.tags import line
from fullframe.wording import first_line

ALONE_RULE = (
    "Where it did not fail, it did something else than the others, or left early: take out of what one rank alone "
    "does (`if rank == 0:`), skips, catches or breaks off whatever needs the other ranks"
)
_TOO_LATE = ("timed out", "timeout")

_waiting: dict[int, int] = {}  # thread -> how many waits it is inside of
_waited: dict[int, float] = {}  # thread -> seconds
_caller = [0]  # the thread inside of a parallel model's call; 0 where none is


class LostRank(RankError, dist.DistNetworkError):
    """A `RankError` also to those who look for torch's own; whoever starts ranks may start them again."""


def lost_rank(error: BaseException | None, seconds: float | None = None) -> LostRank | None:
    """What `error` says of another rank, in words; None where it says something else, or is in words already."""
    says = str(error)
    if error is None or isinstance(error, RankError):
        return None
    if not (isinstance(error, dist.DistError) or "gloo/transport" in says):
        return None
    me = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "?")
    waited = "" if seconds is None else f" for {seconds:.0f} s"
    late = any(sign in says.lower() for sign in _TOO_LATE)
    other = "another rank does not come" if late else "another rank has ended; its own last words say why"
    by_torch = first_line(error).partition(". This is typically")[0]
    return LostRank(f"rank {me} waited{waited} for the others at {line()}: {other}. {ALONE_RULE} ({by_torch})")


class naming_lost_ranks(ContextDecorator):
    """Inside `with`, what torch raises because another rank is gone is raised as a `RankError`."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and (lost := lost_rank(error)) is not None:
            raise lost from error


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
        if error is not None and (lost := lost_rank(error, perf_counter() - self._since)) is not None:
            raise lost from error


def waits(thread: int) -> bool:
    """Whether the thread with this identity waits for other ranks."""
    return thread in _waiting


def waited_seconds() -> float:
    """How long this thread has waited so far."""
    return _waited.get(get_ident(), 0.0)


@contextmanager
def calling_a_model() -> Iterator[None]:
    """Inside `with`, and in calls within it, this thread alone sends, unless another one was first."""
    is_first = not _caller[0]
    if is_first:
        _caller[0] = get_ident()
    try:
        yield
    finally:
        if is_first:
            _caller[0] = 0


def another_thread_calls() -> bool:
    """Whether a parallel model is being called by another thread of the program's; autograd's own do not count."""
    caller = _caller[0]
    return caller != 0 and caller != get_ident() and not isinstance(current_thread(), _DummyThread)
