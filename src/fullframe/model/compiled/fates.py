"""A result of a compiled block that no loss uses gives no gradient to what it alone depends on, not zeros.

A compiled backward computes all gradients at once, with zeros for a result that is not used. In one process what hangs
on that result alone has no gradient, and an optimizer leaves it as it is: so here too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fullframe.spatial.gradients import graph_behind

Fates = tuple[frozenset[int], ...]  # for each tensor that goes in, the numbers of the results that depend on it


def fates(inputs: Sequence[Tensor], results: Sequence[Tensor]) -> Fates | None:
    """By which results each input gets its gradient; None where all results depend on the same inputs."""
    nodes = {get_gradient_edge(t).node: n for n, t in enumerate(inputs) if t.requires_grad}
    reached = {n: _reached(t, nodes) for n, t in enumerate(results) if t.requires_grad}
    if len(set(reached.values())) <= 1:
        return None
    return tuple(frozenset(r for r, there in reached.items() if n in there) for n in range(len(inputs)))


def _reached(result: Tensor, targets: dict[Any, int]) -> frozenset[int]:
    behind = graph_behind([get_gradient_edge(result).node], until=targets)
    return frozenset(targets[node] for node in behind if node in targets)


def with_fates(run: Callable[..., Any], inputs: Sequence[Tensor], by: Fates) -> list[Tensor]:
    """The results of `run(*inputs)`; in backward, inputs of which no result has a gradient get none."""
    passes: dict[int, int] = {}  # by result, the backward pass that has last brought it a gradient
    every = frozenset().union(*by)
    read = [
        _Input.apply(t, passes, results) if t.requires_grad and results != every else t  # type: ignore[no-untyped-call]
        for t, results in zip(inputs, by, strict=True)
    ]
    return [
        _Result.apply(t, passes, n) if t.requires_grad else t  # type: ignore[no-untyped-call]
        for n, t in enumerate(run(*read))
    ]


class _Result(torch.autograd.Function):
    """A result; notes the backward passes that use it."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, passes: dict[int, int], number: int) -> Tensor:
        ctx.passes, ctx.number = passes, number
        ctx.set_materialize_grads(False)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        if gradient is not None:
            ctx.passes[ctx.number] = torch._C._current_graph_task_id()
        return gradient, None, None


class _Input(torch.autograd.Function):
    """An input; lets its gradient through where the pass has used one of the results that depend on it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, passes: dict[int, int], results: frozenset[int]) -> Tensor:
        ctx.passes, ctx.results = passes, results
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        this = torch._C._current_graph_task_id()
        is_used = any(ctx.passes.get(number) == this for number in ctx.results)
        return gradient if is_used else None, None, None
