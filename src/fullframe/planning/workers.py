"""Simulations side by side: forked processes, for a recipe is functions, which no pickle carries."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

from fullframe.errors import FullframeError
from fullframe.simulation.prediction import Prediction
from fullframe.strategy import Strategy

Simulate = Callable[[Strategy], Prediction]
Outcome = Prediction | str  # what was predicted, or why nothing could be
Runner = Callable[[Sequence[Strategy]], list[Outcome]]

_simulate: Simulate | None = None  # in a worker: what it was forked with


@contextmanager
def runner(simulate: Simulate, workers: int) -> Iterator[Runner]:
    """Runs strategies `workers` at a time; with 1 in this process, where other threads may be at work.

    A refusal (FullframeError) is an outcome; anything else is raised.
    """
    if workers == 1:
        yield lambda strategies: [_outcome(simulate, strategy) for strategy in strategies]
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork"), _begin, (simulate,)) as pool:
        yield lambda strategies: list(pool.map(_work, strategies))


def _begin(simulate: Simulate) -> None:
    import torch

    global _simulate
    _simulate = simulate
    torch.set_num_threads(1)


def _work(strategy: Strategy) -> Outcome:
    assert _simulate is not None
    return _outcome(_simulate, strategy)


def _outcome(simulate: Simulate, strategy: Strategy) -> Outcome:
    try:
        return simulate(strategy)
    except FullframeError as error:
        return f"{type(error).__name__}: {error}"
