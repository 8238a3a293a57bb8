"""Groups of gloo ranks, started once and used for many cases.

`run(function, *args)` calls a module-level function on every rank and returns the ranks' results in order.
An exception on any rank comes back as `RankFailure` with that rank's traceback; a silent rank as a time-out.
"""

import atexit
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from fullframe.spatial.rules.convolution import JOINED_BYTES

TIMEOUT_SECONDS = 250.0  # less than what pytest gives a test
JOINED_BYTES_ON_CPU = JOINED_BYTES["cpu"]
# Ranks of a group of so many that convolve the borders of small maps too, as of large ones; the others join them.
_RANKS_THAT_CONVOLVE_BORDERS = {1: (), 2: (1,), 3: (0, 1), 4: (0, 3), 8: (0, 3, 5, 6)}
GRACE_SECONDS = 15.0  # for the other ranks, once one has failed: on a busy machine they fail seconds later
# Processes are forks of one that has loaded these and done nothing else: to load them takes seconds.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch._dynamo", "fullframe.training.loop", "fullframe.verification.verify"])


class RankFailure(AssertionError):
    """One or more ranks raised; `errors` holds (rank, exception type name, message, traceback)."""

    def __init__(self, errors: list[tuple[int, str, str, str]]):
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {trace}" for rank, _, _, trace in errors))


class RankGroup:
    """`size` processes that share one gloo process group until `close`."""

    def __init__(self, size: int):
        self.size = size
        self._directory = tempfile.TemporaryDirectory()
        store = os.path.join(self._directory.name, "store")
        pipes = [CONTEXT.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            CONTEXT.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        os.environ.setdefault("PYTHONHASHSEED", "0")  # as our launcher does; the ranks inherit it
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
        """Call `function(*args)` on every rank; the results, by rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_seconds
        while len(answers) < self.size:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    answers[rank] = True, ("EOFError", "the process died", "the process died")
                if answers[rank][0]:  # the others may wait for this rank for ever
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if not ready:
                break
        errors = [(rank, *value) for rank, (failed, value) in sorted(answers.items()) if failed]
        silent = [rank for rank in range(self.size) if rank not in answers]
        if silent:
            self.close()
            errors += [(rank, "TimeoutError", "", f"no answer within {timeout_seconds} s") for rank in silent]
        if errors:
            if any(kind == "EOFError" for _, kind, _, _ in errors):
                self.close()  # what the dead rank owed the others never comes
            elif not silent and function is not _forget_meshes:
                try:
                    self.run(_forget_meshes)
                except RankFailure:  # what the first error left behind; that is the one to see
                    self.close()
            raise RankFailure(errors)
        return [answers[rank][1] for rank in range(self.size)]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._directory.cleanup()


_groups: dict[int, RankGroup] = {}


def rank_group(size: int) -> RankGroup:
    """The shared group of `size` ranks, started on first use and again after a time-out killed it."""
    group = _groups.get(size)
    if group is None or not group.alive:
        group = _groups[size] = RankGroup(size)
    return group


@atexit.register
def _close_groups() -> None:
    for group in _groups.values():
        if group.alive:
            group.close()


def _forget_meshes() -> None:
    """A message that nobody read before an error must not meet the next case."""
    from fullframe.ranks.mesh import forget_meshes

    forget_meshes()


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    serve(rank, size, store, pipe, "gloo", "cpu", lambda function, args: function(*args))


def serve(
    rank: int, size: int, store: str, pipe: Any, backend: str, kind: str, call: Callable[[Any, Any], Any]
) -> None:
    """Be a rank that sends by `backend` and computes on devices of a `kind`; `call` runs a function on arguments."""
    import torch
    import torch.distributed as dist

    # As a rank that a launcher has started: it may have children, and its loader's workers are forks.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    if rank in _RANKS_THAT_CONVOLVE_BORDERS[size]:
        JOINED_BYTES[kind] = 0
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((False, call(function, args)))
        except BaseException as error:
            pipe.send((True, (type(error).__name__, str(error), traceback.format_exc())))
