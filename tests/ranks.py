"""Groups of gloo ranks, spawned once and used for many cases.

`run(function, *args)` calls a module-level function on every rank and returns the ranks' results in order.
An exception on any rank comes back as `RankFailure` with that rank's traceback; a silent rank as a time-out.
"""

import atexit
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

TIMEOUT_SECONDS = 120.0


class RankFailure(AssertionError):
    """One or more ranks raised; `errors` holds (rank, exception type name, message, traceback)."""

    def __init__(self, errors: list[tuple[int, str, str, str]]):
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}: {trace}" for rank, _, _, trace in errors))


class RankGroup:
    """`size` processes that share one gloo process group until `close`."""

    def __init__(self, size: int):
        self.size = size
        context = multiprocessing.get_context("spawn")
        self._directory = tempfile.TemporaryDirectory()
        store = os.path.join(self._directory.name, "store")
        pipes = [context.Pipe() for _ in range(size)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> list[Any]:
        """Call `function(*args)` on every rank; the results, by rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout_seconds):
                self.close()
                others = [(r, *error) for r, *error in errors]
                raise RankFailure(
                    [(rank, "TimeoutError", "", f"no answer within {timeout_seconds} s"), *others]  # type: ignore[list-item]
                )
            failed, value = pipe.recv()
            if failed:
                errors.append((rank, *value))
            results.append(value)
        if errors:
            raise RankFailure(errors)
        return results

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


def _serve(rank: int, size: int, store: str, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    while True:
        function, args = pipe.recv()
        try:
            pipe.send((False, function(*args)))
        except BaseException as error:
            pipe.send((True, (type(error).__name__, str(error), traceback.format_exc())))
