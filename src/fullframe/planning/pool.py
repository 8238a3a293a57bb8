"""Simulations side by side: forked processes, for a recipe is functions, which no pickle carries."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fullframe.errors import FullframeError
from fullframe.processes.orphans import die_with
from fullframe.simulation.memory.trace import OutOfTime
from fullframe.simulation.prediction import Prediction

T = TypeVar("T")


@dataclass(frozen=True)
class Refusal:
    """Why nothing could be predicted; `kind` is the error's type."""

    kind: type[FullframeError]
    text: str

    def __str__(self) -> str:
        return self.text


Outcome = Prediction | Refusal | None  # what was predicted, why nothing could be, or None: the time was over
Runner = Callable[[Sequence[T]], list[Outcome]]

_work: Callable[[Any], Prediction] | None = None  # in a worker: what it was forked with


@contextmanager
def runner(simulate: Callable[[T], Prediction], workers: int) -> Iterator[Runner[T]]:
    """Simulates items `workers` at a time; with 1 in this process, where other threads may be at work.

    What `simulate` knows is forked, its items are pickled. A refusal (FullframeError) is an outcome, and so is that
    there was no time; anything else is raised, and FullframeError where a process was killed.
    """
    if workers == 1:
        yield lambda items: [_outcome(simulate, item) for item in items]
        return
    forked = multiprocessing.get_context("fork")
    try:
        with ProcessPoolExecutor(workers, forked, _begin, (simulate, os.getpid())) as pool:
            yield lambda items: list(pool.map(_run, items))
    except BrokenProcessPool as error:
        raise FullframeError(
            "a process that simulated was killed, most likely as this machine's memory ran out; plan where more is "
            "free, or by ff.plan in Python, which simulates one strategy at a time"
        ) from error


def in_time(run: Runner[T], items: Sequence[T], width: int, end: float) -> list[Outcome]:
    """The outcomes of the first items, `width` at a time, until `end` by `time.monotonic()`."""
    done = list[Outcome]()
    while len(done) < len(items) and time.monotonic() < end:
        done += run(items[len(done) : len(done) + width])
    return done


def _begin(simulate: Callable[[Any], Prediction], parent: int) -> None:
    import torch

    die_with(parent)  # or it would wait for ever: workers hold the pipe open by which one hears that it is gone

    global _work
    _work = simulate
    torch.set_num_threads(1)


def _run(item: Any) -> Outcome:
    assert _work is not None
    return _outcome(_work, item)


def _outcome(simulate: Callable[[T], Prediction], item: T) -> Outcome:
    try:
        return simulate(item)
    except OutOfTime:
        return None
    except FullframeError as error:
        return Refusal(type(error), str(error))
