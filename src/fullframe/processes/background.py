"""Calls that may return late or never, as over a cut link: they are made in a thread, which is left alone."""

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

_POLL_SECONDS = 0.1

T = TypeVar("T")


class AskedToStop(Exception):
    """There was a reason not to wait any longer."""


def in_background(call: Callable[[], T], seconds: float, asked: Callable[[], int] = lambda: 0) -> T:
    """What `call` returns or raises, in a thread that is left alone after `seconds`, or as soon as `asked()`.

    Raises TimeoutError, or AskedToStop.
    """
    results: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue()

    def run() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, name="fullframe rendezvous", daemon=True).start()
    deadline = time.monotonic() + seconds
    while True:
        try:
            value, error = results.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            if asked():
                raise AskedToStop from None
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer for {seconds:g} s") from None
            continue
        if error is not None:
            raise error
        return value  # type: ignore[return-value]
