"""A step that does not fit in memory is taken again with its batch cut finer.

A process alone does so at once. In a job of several ranks the others wait in the middle of that step for the one that
ran out, some of them inside a device's kernel; so that one writes down the state before the step and ends, and the
launcher starts all ranks again, which also leaves no fragmented memory behind.

Where several ranks run out, each at an op of its own, the device of a later one waits for ever for messages of an
earlier one, and whatever waits for that device does too. The earliest one's gets through: all that it sent is met.
"""

import gc
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from fullframe.errors import RunError
from fullframe.ranks import device
from fullframe.ranks.channel import is_out_of_memory
from fullframe.ranks.waiting import waiting_for_ranks
from fullframe.strategy import Strategy
from fullframe.training.step import StepRecord, TrainStep
from fullframe.wording import first_line

_PATIENCE_SECONDS = 120.0  # for a device to get through what it was given: longer than a step


def attempt(
    step: TrainStep, batch: Any, hand: bool, on_failure: Callable[[Exception], None] = lambda error: None
) -> StepRecord | str:
    """Take the step: its record, or how memory ran out; then nothing was updated, and `let_go` is to be called.

    `on_failure` is called while what the step computed is still there.
    Raises RunError when it ran out while parameters were being updated.
    """
    try:
        return step(batch, hand)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        on_failure(error)
        problem = first_line(error)
    # Outside the except block, for the exception's traceback holds what the step computed.
    if step.updating:
        raise RunError(
            f"out of memory while the parameters were updated ({problem}), which smaller microbatches do not help; "
            "go on from the last checkpoint with --resume and an optimizer that keeps less, or a sharded one"
        )
    return problem


def let_go(step: TrainStep) -> None:
    """Put the model back to before the step, and free the step's memory; waits for the device."""
    step.abandon()
    free_memory()


def free_memory() -> None:
    """Give back what nothing refers to any more; waits for the device."""
    gc.collect()
    device.release_memory()


def by_one_that_is_through(what: str, action: Callable[[], None]) -> None:
    """Run `action` on the first rank whose device has done all that it was given; the others wait for it."""
    with waiting_for_ranks():
        is_through = device.is_through(_PATIENCE_SECONDS)
    by_one_rank(what, action, is_through)


def by_one_rank(what: str, action: Callable[[], None], may_act: bool = True) -> None:
    """Run `action` on the first rank that gets here and `may_act`; others that do wait for it, as often all do."""
    store: Any = dist.distributed_c10d._get_default_store()
    if may_act and store.add(f"fullframe: {what}", 1) == 1:
        action()
        store.set(f"fullframe: {what} is done", "")
    else:
        with waiting_for_ranks():
            store.wait([f"fullframe: {what} is done"], timedelta(hours=1))


def cut_finer(strategy: Strategy, batch_size: int, problem: str) -> Strategy:
    """`strategy` with at least twice the microbatches; raises RunError when they hold one sample each already."""
    samples = batch_size // strategy.data
    counts = [n for n in range(2 * strategy.microbatches, samples + 1) if samples % n == 0]
    if not counts or strategy.update_in_backward:
        why = "update_in_backward takes one" if strategy.update_in_backward else "each holds one sample"
        raise RunError(
            f"out of memory ({problem}), and {strategy.microbatches} microbatches cannot be cut finer, for {why}; "
            "recompute activations (recompute='blocks'), split the frame over more ranks (height, width, depth), or "
            "take an optimizer that keeps less"
        )
    return replace(strategy, microbatches=counts[0])


def batch_norm_warning(model: nn.Module) -> str:
    """What cutting finer changes beyond rounding; "" when nothing."""
    norms: Any = nn.modules.batchnorm._BatchNorm
    if any(isinstance(module, norms) and module.training for module in model.modules()):
        return "; batch norm now takes its statistics over these smaller microbatches"
    return ""
