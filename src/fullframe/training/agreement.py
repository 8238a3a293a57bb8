"""What ranks must decide alike: one rank acts and all learn the outcome, or all act and all learn who failed."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fullframe.errors import FullframeError

T = TypeVar("T")


def on_first_rank(action: Callable[[], T]) -> T:
    """Rank 0 runs `action`; every rank returns its result or raises its FullframeError or OSError."""
    outcome: list[Any] = [None, None]  # the result, the error
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except (FullframeError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]  # type: ignore[no-any-return]


def from_all_ranks(value: T) -> list[T]:
    """`value` of every rank, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
