"""Sizes of a mesh as they are given to a command, and the strategy that they make."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fullframe.errors import MeshError
from fullframe.strategy import Strategy, multiplied
from fullframe.wording import plural


def split_as(sizes: Mapping[str, int | None], ranks: int | None) -> Strategy:
    """A strategy of these sizes by axis, 1 where none is given; replicas then as many as torchrun's `ranks` leave.

    Raises MeshError for a size below 1, and where it is not for as many ranks as were started.
    """
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise MeshError(f"--{name} must be at least 1, got {value}")
    of_replica: dict[str, Any] = {name: size or 1 for name, size in sizes.items()} | {"data": 1}
    split = Strategy(**of_replica)
    strategy = replace(split, data=sizes["data"] or max((ranks or 1) // split.ranks, 1))
    require_ranks(strategy, ranks)
    return strategy


def require_ranks(strategy: Strategy, ranks: int | None) -> None:
    """Raises MeshError where another number of `ranks` was started than the strategy is for; None: none yet."""
    if ranks is not None and strategy.ranks != ranks:
        raise MeshError(
            f"{multiplied(strategy.mesh)} = {strategy.ranks} is not the number of ranks that were started, "
            f"{ranks}; start {strategy.ranks} or choose other axes"
        )


def place_of(strategy: Strategy) -> str:
    """As printed: 2 ranks (data 1 x height 1 x width 2)."""
    return f"{plural(strategy.ranks, 'rank')} ({multiplied(strategy.mesh)})"
