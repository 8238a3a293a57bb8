"""Optimizers that train at one point and are evaluated at another: the schedule-free ones, with `train()` and `eval()`.

As Defazio et al., The Road Less Scheduled (2024), whose optimizers move the parameters from one to the other and back;
other libraries' do so by the same two methods.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer


def has_evaluation_point(optimizer: Optimizer) -> bool:
    """Whether it has another point for evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def to_training_point(optimizer: Optimizer) -> None:
    """The parameters are where the next step wants them; they may be there already."""
    if has_evaluation_point(optimizer):
        optimizer.train()  # type: ignore[attr-defined]


def to_evaluation_point(optimizer: Optimizer) -> None:
    """The parameters are those to evaluate, keep and give away; they may be already."""
    if has_evaluation_point(optimizer):
        optimizer.eval()  # type: ignore[attr-defined]


@contextmanager
def at_evaluation_point(optimizer: Optimizer) -> Iterator[None]:
    """Inside, the parameters are those to evaluate. The way there and back rounds."""
    to_evaluation_point(optimizer)
    try:
        yield
    finally:
        to_training_point(optimizer)
