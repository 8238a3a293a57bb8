"""Fresh ranks for one question, forked from a process that has everything imported, killed when they do not answer."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.peers.libraries import RANKS

GRACE_SECONDS = 2.0  # for the other ranks, once one has failed


class Failure(NamedTuple):
    """Why there is no answer: `error` or `hang`, and what was said."""

    kind: str
    exception: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.exception}" if self.exception else self.kind


def on_ranks(function: Callable[..., Any], *args: Any, seconds: float) -> list[Any] | Failure:
    """`function(*args)` on every rank of a new process group; the answers by rank, or what went wrong."""
    context = multiprocessing.get_context("fork")  # torch and the libraries are imported once, in the parent
    with tempfile.TemporaryDirectory() as directory:
        pipes = [context.Pipe() for _ in range(RANKS)]
        store = str(Path(directory, "store"))
        processes = [
            context.Process(target=_serve, args=(rank, store, theirs, function, args), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
        try:
            return _collected([ours for ours, _ in pipes], seconds)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _collected(pipes: list[Any], seconds: float) -> list[Any] | Failure:
    answers: dict[int, Any] = {}
    failures: dict[int, Failure] = {}
    deadline = time.monotonic() + seconds
    while len(answers) + len(failures) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in answers and rank not in failures]
        ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = pipes.index(pipe)
            try:
                failed, answers_or_why = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                failed, answers_or_why = True, ("process died", "")
            if failed:
                failures[rank] = Failure("error", *answers_or_why)
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            else:
                answers[rank] = answers_or_why
    silent = len(pipes) - len(answers) - len(failures)
    if failures:
        first = failures[min(failures)]
        return first._replace(kind=f"error, {silent} of {len(pipes)} ranks hang") if silent else first
    return Failure("hang", "", f"no answer within {seconds:.0f} s") if silent else [answers[n] for n in sorted(answers)]


def _serve(rank: int, store: str, pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
        pipe.send((False, function(*args)))
        pipe.recv()  # stay until killed: a rank that leaves early would fail its neighbour's last message
    except EOFError:
        return
    except BaseException as error:
        lines = str(error).strip().splitlines()
        pipe.send((True, (type(error).__name__, lines[0] if lines else "")))
