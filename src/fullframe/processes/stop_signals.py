"""Being asked to stop, by a scheduler that preempts the job or by Ctrl-C: after the step, with a checkpoint."""

import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Stopped(SystemExit):
    """The run was asked to stop, has written a checkpoint and can go on.

    Uncaught it ends the process with code 0, so that a scheduler queues the job again, after Ctrl-C with 130.
    """

    code: int

    def __init__(self, number: int):
        super().__init__(130 if number == signal.SIGINT else 0)
        self.signal = signal.Signals(number)


def for_ranks() -> "StopSignals":
    """Those that a launcher hands on; what it ignores, as nohup has it ignore SIGHUP, the ranks need not hear of."""
    heard = [number for number in (*STOP_SIGNALS, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    return StopSignals(heard, interrupts=False)


class StopSignals:
    """While inside `with`, signals that ask for an end are kept, and the first of them is `number`.

    A second SIGINT, whatever came before it, sets `at_once` and, with `interrupts`, raises KeyboardInterrupt wherever
    the program is. Outside the main thread, where Python delivers no signals, nothing changes.
    """

    def __init__(self, signals: Sequence[int] = STOP_SIGNALS, *, interrupts: bool = True):
        self.number = 0
        self.at_once = False
        self._was_interrupted = False
        self._signals, self._interrupts = signals, interrupts
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in self._signals}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = self.number or number
        if number != signal.SIGINT:
            return
        self.at_once, self._was_interrupted = self._was_interrupted, True
        if self.at_once and self._interrupts:
            raise KeyboardInterrupt

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
