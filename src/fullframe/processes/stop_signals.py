"""Being asked to stop, by a scheduler that preempts the job or by Ctrl-C: after the step, with a checkpoint."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_ASK = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(SystemExit):
    """The run was asked to stop, has written a checkpoint and can go on.

    Uncaught it ends the process with code 0, so that a scheduler queues the job again, after Ctrl-C with 130.
    """

    code: int

    def __init__(self, number: int):
        super().__init__(130 if number == signal.SIGINT else 0)
        self.signal = signal.Signals(number)


class StopSignals:
    """While inside `with`, SIGTERM, SIGUSR1 and SIGINT are kept in `number`; a second SIGINT interrupts at once.

    Outside the main thread, where Python delivers no signals, nothing changes.
    """

    number = 0  # the first that came

    def __enter__(self) -> "StopSignals":
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _ASK}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.number == signal.SIGINT:
            raise KeyboardInterrupt
        self.number = self.number or number

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Undisturbed:
    """A loader worker's `worker_init_fn` around the user's: schedulers signal every process of a job.

    A worker that ended at once would take its rank with it before the rank has written its checkpoint; left alone, it
    ends with its rank.
    """

    def __init__(self, then: Callable[[int], None] | None = None):
        self._then = then

    def __call__(self, worker: int) -> None:
        for number in _ASK:
            signal.signal(number, signal.SIG_IGN)
        if self._then is not None:
            self._then(worker)
