"""Forked workers that start, and that leave alone what their parent has left.

What Python has not collected yet in the parent may hold process groups, whose end joins threads that a child has not:
one that collects it hangs or dies. So a child here never does.

Before Python 3.12 a child that is forked while another thread of its parent enters or leaves the interpreter waits for
ever in a lock of the interpreter's own, before it runs a line: `os.fork` takes over a lock that is held, and clears it
too late. Threads of torch do that whenever they let go of a tensor, gloo's after each collective. The parent then waits
for a worker that never says anything. So a child here says that it is through, and one that does not say so in time is
ended and forked again: it has done nothing yet.
"""

import gc
import multiprocessing
import os
import select
import signal
from contextlib import suppress
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from typing import Any

_PATIENCE_SECONDS = 4.0  # doubled each time, as the machine may only be slow
_ATTEMPTS = 6

_said: tuple[int, int] | None = None  # in a child: the pipe by which it says that it is through


def _begin() -> None:
    global _said
    if _said is not None:
        gc.freeze()
        here, there = _said
        _said = None
        os.close(here)
        os.write(there, b".")
        os.close(there)


os.register_at_fork(after_in_child=_begin)


class _Popen(Popen):
    def _launch(self, process_obj: Any) -> None:
        global _said
        for attempt in range(_ATTEMPTS):
            here, there = _said = os.pipe()
            try:
                super()._launch(process_obj)  # type: ignore[misc]  # a child never returns from it
            finally:
                _said = None
                os.close(there)
            heard = select.poll()
            heard.register(here, select.POLLIN | select.POLLHUP)
            with os.fdopen(here, "rb"):
                if heard.poll(1000 * _PATIENCE_SECONDS * 2**attempt):
                    return
            self._give_up()
        raise OSError(f"{_ATTEMPTS} forked processes in a row did not begin to run; start the job again")

    def terminate(self) -> None:
        """At once: a loader's worker ignores what asks its rank to stop, and who ends a process so waits for it."""
        self.kill()

    def _give_up(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        self.finalizer()  # type: ignore[misc]  # set by _launch


class _Process(ForkProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> Popen:
        return _Popen(process_obj)


class _Context(ForkContext):
    Process = _Process


def worker_context(asked: BaseContext | None) -> BaseContext | None:
    """The context for a loader's workers: `asked` (None: Python's default), with the forks of this file."""
    forks = isinstance(asked, ForkContext) or (asked is None and multiprocessing.get_start_method() == "fork")
    return _Context() if forks else asked
